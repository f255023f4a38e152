"""Recipes that are wrong, and what the error has to say. `attempt` tries one; `benchmarks/trials.py` tries them all."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.core.errors import ConfigError
from kedge.core.quoting import escaped
from kedge.recipe.schema import Recipe, load_recipe, recipe_of
from kedge.recipe.wiring import connect

HEAD = "kedge: 1\nname: n\nmodel: tiny\n"
GOOD = (
    HEAD
    + """\
seed: 7
stages:
  sft: {kind: sft, data: d.jsonl}
  reward: {kind: reward, from: sft, data: p.jsonl}
  ppo: {kind: ppo, from: sft, reward: reward, prompts: q.jsonl}
"""
)
LONGEST_MESSAGE = 8000
"""Characters: what a person may be asked to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """A file, overrides over a good one, or values of a script; and parts of the message that has to come."""

    name: str
    expected: tuple[str, ...]
    content: str | bytes | None = None
    sets: tuple[str, ...] = ()
    values: Callable[[], Mapping[str, Any]] | None = None
    prepare: Callable[[Path], None] = lambda folder: None


def _file(name: str, content: str | bytes, *expected: str) -> Malformed:
    return Malformed(name=name, content=content, expected=expected)


def _stages(name: str, stages: str, *expected: str) -> Malformed:
    return _file(name, f"{HEAD}stages:\n{stages}", *expected)


def _set(override: str, *expected: str) -> Malformed:
    shown = override if len(override) < 60 else f"{override[:50]}…"
    return Malformed(name=f"--set {shown}", sets=(override,), expected=expected)


def _values(name: str, values: Callable[[], Mapping[str, Any]], *expected: str) -> Malformed:
    return Malformed(name=name, values=values, expected=expected)


def _holds_itself() -> dict[str, Any]:
    values: dict[str, Any] = {"kedge": 1, "name": "n", "model": "tiny"}
    values["stages"] = values
    return values


def _deep(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(levels):
        inner = {"a": inner}
    return {"kedge": 1, "name": "n", "model": "tiny", "stages": {"sft": inner}}


def _laughs(levels: int) -> str:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return HEAD + "\n".join(lines) + "\n"


def _loop_of_links(folder: Path) -> None:
    (folder / "recipe.yaml").symlink_to(folder / "other.yaml")
    (folder / "other.yaml").symlink_to(folder / "recipe.yaml")


SFT = "kind: sft, data: d.jsonl"

CASES: list[Malformed] = [
    # What YAML can do to a reader
    _file("billion laughs", _laughs(10), "line 8", "more than 20,000 values"),
    _file("billion laughs in mappings", HEAD + "a: &a {x: 1, y: 2}\n" + "".join(
        f"{chr(98 + n)}: &{chr(98 + n)} {{{', '.join(f'k{i}: *{chr(97 + n)}' for i in range(9))}}}\n" for n in range(8)
    ), "more than 20,000 values"),
    _file("an alias inside of itself", HEAD + "stages: &s {sft: *s}\n", "line 4", "*s stands inside"),
    _file("an alias without an anchor", HEAD + "stages: *gone\n", "line 4", "undefined alias"),
    _file("3,000 levels of lists", HEAD + "stages: " + "[" * 3000 + "]" * 3000, "line 4", "more than 40 mappings"),
    _file("3,000 levels of mappings", HEAD + "stages: " + "{a: " * 3000 + "}" * 3000, "more than 40 mappings"),
    _file("3,000 levels by indents", HEAD + "".join(f"{' ' * n}a:\n" for n in range(3000))[:900_000],
          "more than 40 mappings"),
    _file("an integer of 5,000 digits", HEAD + f"seed: {'9' * 5000}\n", "line 4", "more than 300 digits"),
    _file("a hexadecimal of 5,000 digits", HEAD + f"seed: 0x{'f' * 5000}\n", "line 4", "more than 300 digits"),
    _file("a float of 5,000 digits", GOOD.replace("seed: 7", f"seed: 1.5{'9' * 5000}"), "seed", "whole number"),
    _file("40,000 unknown keys", HEAD + "".join(f"key{n}: 1\n" for n in range(40_000)),
          "line 10000", "more than 20,000 values"),
    _file("1,000 unknown keys", GOOD + "".join(f"key{n}: 1\n" for n in range(1000)),
          "1,000 problem(s)", "line 9: key0: not a setting here", "and 980 more"),
    _file("1,000 unknown keys of a stage", HEAD + "stages:\n  sft:\n    kind: sft\n    data: d\n" + "".join(
        f"    key{n}: 1\n" for n in range(1000)), "1,000 problem(s)", "stages.sft.key0", "and 980 more"),
    _file("600 stages", HEAD + "stages:\n" + "".join(f"  s{n}: {{{SFT}}}\n" for n in range(600)),
          "stages: may have at most 500 item(s), found 600"),
    _file("2 MiB of comments", HEAD + "#" * 2**21, "larger than 1 MiB"),
    _file("a tag of Python", HEAD + "stages: !!python/object/apply:os.system [ls]\n", "line 4", "python/object"),
    _file("a tag of nobody", HEAD + "seed: !secret 3\n", "line 4", "the tag !secret"),
    _file("bytes", HEAD + "seed: !!binary aGk=\n", "line 4", "binary"),
    _file("a set", HEAD + "stages: !!set {a, b}\n", "line 4", "the tag"),
    _file("a date", HEAD.replace("name: n", "name: 2024-01-01"), "line 2", "put it in quotes"),
    _file("a date of the 99th month", HEAD.replace("name: n", "name: 2024-99-01"), "not valid YAML"),
    _file("a list as a key", HEAD + "? [a, b]\n: 1\n", "line 4", "a key is a word"),
    _file("a key as number and as text", HEAD + "1: a\n'1': b\n", "line 5", "duplicate key '1'"),
    _file("a key twice", HEAD + "name: m\n", "line 4", "found duplicate key"),
    _file("two documents", HEAD + "---\n" + HEAD, "not valid YAML"),
    _file("a tab as indent", HEAD + "stages:\n\tsft: 1\n", "line 5", "not valid YAML"),
    _file("an open quote", HEAD + "seed: 'x\n", "not valid YAML"),
    _file("an open bracket", HEAD + "stages: {sft: [\n", "not valid YAML"),
    _file("a control character", HEAD + "seed: \x07\n", "line 4", "unacceptable character #x0007"),
    _file("not UTF-8", b"kedge: 1\nname: \xff\xfe\n", "not UTF-8 text"),
    _file("UTF-16", HEAD.encode("utf-16"), "not UTF-8 text"),
    _file("nothing", "", "the file is empty"),
    _file("comments alone", "# kedge\n", "the file is empty"),
    _file("a list", "- kedge\n", "a mapping of settings, found a list"),
    _file("a word", "kedge\n", "a mapping of settings, found 'kedge'"),
    # Names
    _stages("a stage that leaves its folder", f'  "../../evil": {{{SFT}}}\n', "line 5", "'../../evil'", "letters"),
    _stages("a stage with an absolute path", f'  "/etc": {{{SFT}}}\n', "line 5", "'/etc'", "letters, digits"),
    _stages("a stage called ..", f'  "..": {{{SFT}}}\n', "letters, digits"),
    _stages("a stage without a name", f'  "": {{{SFT}}}\n', "letters, digits", "found ''"),
    _stages("a stage with a dot", f"  sft.v2: {{{SFT}}}\n", "letters, digits", "'sft.v2'"),
    _stages("a stage with a blank", f"  my sft: {{{SFT}}}\n", "letters, digits", "'my sft'"),
    _stages("a stage of 300 characters", f"  {'s' * 300}: {{{SFT}}}\n", "at most 100 characters", "(302 characters)"),
    _stages("a stage with an escape sequence", f'  "s\\e[2J\\a": {{{SFT}}}\n', "stages.s\\x1b[2J\\x07", "letters"),
    _stages("a stage with a bidi mark", f'  "s\\u202etfs": {{{SFT}}}\n', "stages.s\\u202etfs", "letters, digits"),
    _stages("a stage with a line break", f'  "s\\nt": {{{SFT}}}\n', "stages.s\\nt", "letters, digits"),
    _stages("a stage called inputs", f"  inputs: {{{SFT}}}\n", "'inputs' is the name of another folder"),
    _stages("a stage called NUL", f"  NUL: {{{SFT}}}\n", "'NUL' is the name of another folder"),
    _stages("stages that differ in capitals", f"  sft: {{{SFT}}}\n  SFT: {{{SFT}}}\n", "'sft' is a stage already"),
    _stages("a stage called by a number", "  1: 2\n", "stages.1: must be a mapping"),
    _set("name=../../evil", "name: must match"),
    _set(f"name={'n' * 300}", "name: must have at most 100 characters", "(302 characters)"),
    _set('name="n\\e[31m"', "name: must match", "n\\x1b[31m"),
    _set(f"model={'m' * 300}", "model: longer than a file's name can be"),
    _set('model="a\\0b"', "model: no file name has control characters"),
    _set(f"chat_template={'t' * 300}", "chat_template: longer than a file's name can be"),
    _set(f"stages.sft.data={'d' * 300}", "sft.data: longer than a file's name can be"),
    _set(f"stages.sft.data={'d/' * 3000}", "sft.data: longer than a file's name can be"),
    _set('stages.sft.data="d\\0"', "sft.data: no file name has control characters"),
    _file("an unknown key with an escape sequence", GOOD + '"se\\e[2Jed": 1\n', "line 9: se\\x1b[2Jed: not a setting"),
    _file("an unknown key with a bidi mark", GOOD + '"\\u2066seed": 1\n', "\\u2066seed: not a setting"),
    _file("an unknown key with a line break", GOOD + '"a\\nline 1: fine": 1\n', "a\\nline 1: fine: not a setting"),
    _file("an unknown key of 100,000 characters", GOOD + f"? {'k' * 100_000}\n: 1\n", "… (100,000 characters)"),
    _file("a kind with an escape sequence", HEAD + 'stages: {s: {kind: "p\\epo"}}\n', "'p\\x1bpo'"),
    _file("a value of 100,000 characters", GOOD.replace("seed: 7", f"seed: {'s' * 100_000}"), "seed", "characters)"),
    # Numbers
    _set("stages.sft.epochs=1e308", "stages.sft.epochs: must be at most 10000, found 1e+308"),
    _set("stages.sft.epochs=1e999", "stages.sft.epochs: must be a finite number"),
    _set("stages.sft.epochs=.nan", "stages.sft.epochs: must be a finite number"),
    _set("stages.sft.epochs=0", "stages.sft.epochs: must be greater than 0"),
    _set("stages.ppo.epochs=1000000", "stages.ppo.epochs: must be at most 10000"),
    _set("stages.sft.batch=1e18", "stages.sft.batch: must be at most 1e+06, found 1e+18"),
    _set("stages.ppo.batch=1000000000000000000", "stages.ppo.batch: must be at most 1e+06"),
    _set(f"stages.ppo.batch=1{'0' * 40}", "stages.ppo.batch"),
    _set(f"stages.ppo.batch={'9' * 5000}", "more than 300 digits"),
    _set("stages.ppo.iterations=1e12", "stages.ppo.iterations: must be at most 1e+09"),
    _set("stages.ppo.micro_batch=-3", "micro_batch: must be auto or a whole number from 1 to 1,000,000, found -3"),
    _set("stages.ppo.answers=1e9", "stages.ppo.answers: must be at most 100000"),
    _set("stages.ppo.actor.lr=1e300", "stages.ppo.actor.lr: must be at most 100"),
    _set("stages.ppo.sampling.temperature=1e-300", "stages.ppo.sampling.temperature: must be at least 1e-06"),
    _set("stages.ppo.sampling.max_new_tokens=1e15", "sampling.max_new_tokens: must be at most 1e+08"),
    _set("stages.ppo.scores.missing_eos_score=-1e300", "scores.missing_eos_score: must be at least -1e+09"),
    _set("stages.ppo.kl.limit=1e300", "stages.ppo.kl.limit: must be at most 1e+09"),
    _set("stages.ppo.checkpoints.every=1e30", "stages.ppo.checkpoints.every"),
    _set("stages.reward.members=1e6", "stages.reward.members: must be at most 16"),
    _set(f"seed={2**64}", "seed: must be less than 9.22337e+18"),
    _set("stages.ppo.memory.lora.rank=1e6", "memory.lora.rank: must be at most 1024"),
    _set("stages.ppo.reward={kind: http, url: 'http://x', timeout_s: 1e12}", "timeout_s: must be at most 604800"),
    # Overrides
    _set("seed", "expected a.b=value"),
    _set("..=1", "expected a.b=value"),
    _set("=1", "expected a.b=value"),
    _set("seed=[1", "cannot read the value"),
    _set(f"{'a.' * 3000}b=1", "more than 40 mappings"),
    _set("stages.sft=" + "[" * 500 + "]" * 500, "more than 40 mappings"),
    _set("stages={}", "stages: needs at least 1 item(s), found 0"),
    _set("stages.sft={}", "stages.sft.kind: is required and missing"),
    _set("stages.ppo.actor=null", "stages.ppo.actor: must be a mapping of settings, found None"),
    _set("stages.ppo.kl.limt=3", "stages.ppo.kl.limt: not a setting here (did you mean 'limit'?)"),
    # Wiring and other files
    _set("stages.sft.from=ppo", "stages wait for each other"),
    _set("stages.ppo.reward=sft", "needs reward_model"),
    _file("extends itself", "extends: recipe.yaml\n", "goes in a circle"),
    _file("extends a number", "extends: 3\n", "a file name or a list of them, found 3"),
    _file("extends what is not there", "extends: gone.yaml\n", "there is no file"),
    _file("extends a name of 300 characters", f"extends: {'e' * 300}\n", "there is no file"),
    Malformed(name="a recipe that is a loop of links", expected=("cannot be read",), prepare=_loop_of_links),
    Malformed(name="a recipe that is a folder", expected=("cannot be read",),
              prepare=lambda folder: (folder / "recipe.yaml").mkdir()),
    Malformed(name="a recipe that is not there", expected=("there is no such recipe",)),
    # Values of a script
    _values("a dict that holds itself", _holds_itself, "more than 40 mappings"),
    _values("a dict of 3,000 levels", lambda: _deep(3000), "more than 40 mappings"),
    _values("a dict with a number of 5,000 digits", lambda: {"seed": 10**5000}, "more than 300 digits"),
    _values("a dict of 200,000 values", lambda: {"stages": {"sft": {"data": ["x"] * 200_000}}}, "more than 20,000"),
    _values("a dict with a stage that leaves its folder", lambda: {"stages": {"../x": {}}}, "letters, digits"),
    _values("a dict with keys that are no text", lambda: {1: 2, "stages": {None: 3}}, "keys are text"),
]  # fmt: skip


def attempt(case: Malformed) -> str | None:
    """Load the recipe: None where it is refused with a message that says what it should; else what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            connect(_load(case, Path(folder)))
        except ConfigError as error:
            return _fault_of(str(error), case)
        except BaseException as error:
            return f"{type(error).__name__} instead of a ConfigError: {str(error)[:200]}"
    return "was accepted"


def _load(case: Malformed, folder: Path) -> Recipe:
    if case.values is not None:
        return recipe_of(case.values())
    file = folder / "recipe.yaml"
    case.prepare(folder)
    if case.sets:
        file.write_text(GOOD, encoding="utf-8")
    elif case.content is not None:
        file.write_bytes(case.content.encode() if isinstance(case.content, str) else case.content)
    return load_recipe(file, case.sets)


def _fault_of(message: str, case: Malformed) -> str | None:
    missing = [part for part in case.expected if part not in message]
    if missing:
        return f"the message lacks {missing[0]!r}: {message[:300]!r}"
    if len(message) > LONGEST_MESSAGE:
        return f"a message of {len(message):,} characters"
    if escaped(message) != message:
        return f"characters that steer a terminal: {message[:300]!r}"
    return None
