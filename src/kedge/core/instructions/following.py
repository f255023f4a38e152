"""Whether an answer follows an instruction, strictly or loosely, and what is wrong with one that cannot be checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

from kedge.core.errors import ConfigError
from kedge.core.instructions.checkers import INSTRUCTIONS, RELATIONS, ArgumentKind
from kedge.core.quoting import quoted
from kedge.core.suggest import did_you_mean

_WANTED: Final[Mapping[ArgumentKind, str]] = {
    "count": "a whole number, 0 or more",
    "text": "a text",
    "texts": "a list of texts",
    "relation": " or ".join(f"'{relation}'" for relation in RELATIONS),
}


def needs_language(kinds: Iterable[str]) -> bool:
    """Whether the language of an answer is detected for one of these kinds, which needs the package langdetect."""
    return any(INSTRUCTIONS[kind].needs_language for kind in kinds)


def follows(instruction_id: str, kwargs: Mapping[str, Any], prompt: str, answer: str) -> bool:
    """Whether an answer follows one instruction, strictly. An unknown kind or a wrong argument is a ConfigError.

    >>> follows("punctuation:no_comma", {}, "Say hello.", "Hello there")
    True
    >>> follows("detectable_format:number_bullet_lists", {"num_bullets": 2}, "Name two.", "* one\\n* two")
    True
    """
    if complaint := complaint_about(instruction_id, kwargs):
        raise ConfigError(complaint)
    return bool(answer.strip()) and INSTRUCTIONS[instruction_id].follows(kwargs, prompt, answer)


def follows_loosely(instruction_id: str, kwargs: Mapping[str, Any], prompt: str, answer: str) -> bool:
    return any(follows(instruction_id, kwargs, prompt, variant) for variant in variants(answer))


def variants(answer: str) -> list[str]:
    """The answer, and what is left of it without its first line, its last, or both, each without stars too.

    >>> variants("Sure!\\n*yes*")
    ['Sure!\\n*yes*', 'Sure!\\nyes', '*yes*', 'yes', 'Sure!', 'Sure!', '', '']
    """
    lines = answer.split("\n")
    cut = [answer, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [text for shorter in cut for text in (shorter, shorter.replace("*", ""))]


def complaint_about(instruction_id: str, kwargs: Mapping[str, Any]) -> str:
    """What is wrong with an instruction and its arguments; empty where nothing is. An argument of null is none.

    >>> complaint_about("punctuation:no_coma", {})
    "no instruction named 'punctuation:no_coma' (did you mean 'punctuation:no_comma'?)"
    >>> complaint_about("length_constraints:number_words", {"num_words": 5})
    "length_constraints:number_words: relation: expected 'at least' or 'less than', found None"
    """
    if instruction_id not in INSTRUCTIONS:
        return f"no instruction named {quoted(instruction_id)}{did_you_mean(instruction_id, INSTRUCTIONS)}"
    required, optional = INSTRUCTIONS[instruction_id].arguments, INSTRUCTIONS[instruction_id].optional
    given = {name: value for name, value in kwargs.items() if value is not None}
    for name, kind in required.items():
        if not _is_a(kind, given.get(name)):
            return f"{instruction_id}: {name}: expected {_WANTED[kind]}, found {quoted(given.get(name))}"
    for name, value in given.items():
        if name in optional and not _is_a(optional[name], value):
            return f"{instruction_id}: {name}: expected {_WANTED[optional[name]]}, found {quoted(value)}"
        if name not in required and name not in optional:
            allowed = ", ".join((*required, *optional)) or "none"
            return f"{instruction_id}: no argument {quoted(name)}{did_you_mean(name, required)}; it takes {allowed}"
    return ""


def _is_a(kind: ArgumentKind, value: Any) -> bool:
    match kind:
        case "count":
            return isinstance(value, int) and not isinstance(value, bool) and value >= 0
        case "text":
            return isinstance(value, str) and bool(value.strip())
        case "texts":
            values = cast(list[Any], value) if isinstance(value, list | tuple) else []
            return bool(values) and all(isinstance(text, str) and bool(text.strip()) for text in values)
        case "relation":
            return value in RELATIONS
