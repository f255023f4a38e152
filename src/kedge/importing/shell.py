"""The arguments of a Python module in a shell script, found by reading: no shell, no expansion, nothing is run."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kedge.core.errors import ConfigError
from kedge.core.quoting import one_line
from kedge.core.yaml.limits import MAX_VALUES, read_bounded

_ASSIGNED: Final = re.compile(r"^\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(\S.*)?$", re.M)
_VARIABLE: Final = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_ARRAY: Final = re.compile(r"^\s*([A-Za-z_][A-Za-z0-9_]*)(\+?)=\(", re.M)
_ALL_OF_IT: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\[[@*]\]\}")
_NUMBER: Final = re.compile(r"-?(\d|\.\d)[\d.eE+-]*")
_ANSI: Final = re.compile(r"\$'((?:[^'\\]|\\.)*)'")
"""A text in which bash writes a new line as backslash and n."""
_ESCAPED: Final = {"n": "\n", "t": "\t"}
_ENDS: Final = (";", "&", "&&", "|", "||", ">", ">>", "<", "<<", "(", ")", "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    module: str
    launcher: str
    """What starts the module: python, deepspeed, ray."""
    options: dict[str, Any]
    lines: dict[str, int]


def read_command(file: Path, module: re.Pattern[str]) -> Command:
    """The options behind the only command of a script that runs a module of this name."""
    try:
        text = read_bounded(file)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text (byte {error.start}); a shell script is expected") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    matches = [match for match in module.finditer(text) if not _is_comment(text, match.start())]
    if len(matches) != 1:
        raise ConfigError(
            f"{file}: expected one command such as `python3 -m openrlhf.cli.train_dpo --pretrain …`, "
            f"found {len(matches)}"
        )
    match = matches[0]
    tokens = _tokens(text[match.end() :], file, 1 + text[: match.start()].count("\n"))
    tokens = _with_arrays(tokens, _arrays(text[: match.start()]))
    options, lines = _options(tokens, _assigned(text[: match.start()]), file)
    before = re.findall(r"\b(deepspeed|ray|torchrun|accelerate|python3?)\b", text[: match.start()])
    return Command(module=match[1], launcher=before[0] if before else "", options=options, lines=lines)


def _is_comment(text: str, at: int) -> bool:
    return text[text.rfind("\n", 0, at) + 1 : at].lstrip().startswith("#")


def _tokens(rest: str, file: Path, line: int) -> list[tuple[str, int]]:
    """Words up to the end of the command, each with its line. A backslash at the end of a line goes on."""
    joined = _ANSI.sub(_plainly_quoted, rest)
    joined = re.sub(r"\\\r?\n", "\v", joined)  # a mark of its own, so that lines can still be counted
    lexer = shlex.shlex(joined, posix=True, punctuation_chars=";&|<>()\n")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r\v", "", True
    words: list[tuple[str, int]] = []
    try:
        while (word := lexer.get_token()) is not None:
            if word.startswith("#") or word[:1] in _ENDS or word in _ENDS or len(words) > MAX_VALUES:
                break
            words.append((word, 0))
    except ValueError as problem:
        raise ConfigError(f"{file}: line {line}: a quotation mark that is not closed ({problem})") from None
    return _numbered(words, rest, line)


def _plainly_quoted(ansi: re.Match[str]) -> str:
    return shlex.quote(re.sub(r"\\(.)", lambda match: _ESCAPED.get(match[1], match[1]), ansi[1]))


def _numbered(words: list[tuple[str, int]], rest: str, first: int) -> list[tuple[str, int]]:
    """The line of each option, by looking for it in the text."""
    numbered: list[tuple[str, int]] = []
    at = 0
    for word, _ in words:
        if word.startswith("--"):
            place = rest.find(word.partition("=")[0], at)
            at = place if place >= 0 else at
        numbered.append((word, first + rest[:at].count("\n")))
    return numbered


def _arrays(before: str) -> dict[str, list[tuple[str, int]]]:
    """The words of the script's arrays, each with its line: `ARGS=(--lr 1e-6 …)`, one word or many a line."""
    arrays: dict[str, list[tuple[str, int]]] = {}
    for match in _ARRAY.finditer(before):
        words: list[tuple[str, int]] = []
        first = 1 + before[: match.end()].count("\n")
        try:
            for number, text in enumerate(before[match.end() :].split("\n"), start=first):
                held, is_closed = _array_line(text)
                words += [(word, number) for word in held]
                if is_closed or len(words) > MAX_VALUES:
                    break
        except ValueError:  # a text over several lines: the command is told where it names this array
            continue
        arrays[match[1]] = [*(arrays.get(match[1], []) if match[2] else []), *words]
    return arrays


def _array_line(text: str) -> tuple[list[str], bool]:
    """The words of one line of an array, and whether its bracket is closed there; a comment ends the line."""
    lexer = shlex.shlex(text.rstrip().removesuffix("\\"), posix=True, punctuation_chars="()")
    lexer.commenters, lexer.whitespace_split = "", True
    words: list[str] = []
    if text.lstrip().startswith("#"):
        return words, False
    for word in lexer:
        if word.startswith(("#", ")")):
            return words, word.startswith(")")
        words.append(word)
    return words, False


def _with_arrays(tokens: list[tuple[str, int]], arrays: dict[str, list[tuple[str, int]]]) -> list[tuple[str, int]]:
    """The command's words with those of the arrays that it names in their places."""
    filled: list[tuple[str, int]] = []
    for word, line in tokens:
        named = _ALL_OF_IT.fullmatch(word)
        filled += arrays[named[1]] if named and named[1] in arrays else [(word, line)]
    return filled


def _assigned(before: str) -> dict[str, str]:
    """Plain assignments of the script, which its command may name."""
    values: dict[str, str] = {}
    for match in _ASSIGNED.finditer(before):
        try:
            words = shlex.split(match[2] or "", comments=True)
        except ValueError:
            continue
        if len(words) <= 1:
            values[match[1]] = _filled_in(words[0], values) if words else ""
    return values


def _filled_in(word: str, assigned: dict[str, str]) -> str:
    """The word with the plain variables of the script in their places."""
    return _VARIABLE.sub(lambda match: assigned.get(match[1] or match[2], match[0]), word)


def _options(
    tokens: list[tuple[str, int]], assigned: dict[str, str], file: Path
) -> tuple[dict[str, Any], dict[str, int]]:
    options: dict[str, Any] = {}
    lines: dict[str, int] = {}
    name = ""
    for raw, line in tokens:
        word = _filled_in(raw, assigned)
        if word.startswith("--") and not _NUMBER.fullmatch(word):
            name, has_value, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name in options:
                raise ConfigError(
                    f"{file}: line {line}: --{one_line(name)} stands twice (line {lines[name]} has it too)"
                )
            options[name], lines[name] = (value if has_value else True), line
            continue
        if not name:
            raise ConfigError(f"{file}: line {line}: {one_line(word)!r} belongs to no option")
        held = options[name]
        options[name] = word if held is True else [*(held if isinstance(held, list) else [held]), word]
    for option, value in options.items():
        if "$" in str(value) or "`" in str(value):
            raise ConfigError(
                f"{file}: line {lines[option]}: --{one_line(option)}: {one_line(str(value))!r} is known to a shell "
                "alone, and none is started; write its value"
            )
    return options, lines
