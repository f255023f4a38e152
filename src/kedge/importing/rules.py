"""What becomes of a field of another tool's configuration: the verdicts, and the rules that give one.

A tool is a table of rules by field name. A rule looks at a value and at the whole configuration, and says which
settings of a recipe follow, or why none does. Nothing of a configuration is ever run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, cast

from kedge.core.quoting import quoted

Verdict = Literal["taken", "changed", "not needed", "refused", "unknown"]
Kind = Literal["sft", "reward", "preference", "ppo", "group"]
"""The kind of stage that a configuration becomes."""
OPTIMISERS: Final[Mapping[str, tuple[str, ...]]] = {"ppo": ("actor", "critic"), "group": ("actor",)}
"""The sections of a stage that one optimiser of another tool becomes; `optimiser` where nothing is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What follows from a field. Paths of `sets` begin with `stage.` where they are settings of the stage."""

    verdict: Verdict
    sets: Mapping[str, Any] = field(default_factory=dict[str, Any])
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a command line adds to a configuration that does not say it, or puts in its place."""

    model: str | None = None
    data: str | None = None
    reward: str | None = None
    trainer: str | None = None
    processes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A configuration that was read: its fields by name, those of lists as `datasets[0].path`, and what it is of."""

    file: Path
    trainer: str
    """In the tool's own word: sft, dpo, rm, …"""
    kind: Kind
    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    """What the tool does where a field is absent, for those fields in which Kedge would do otherwise."""
    lines: Mapping[str, int] = field(default_factory=dict[str, int])
    asked: Asked = Asked()
    is_lora: bool = False
    num_rows: int | None = None
    """Rows of the training data, where they lie in a file that was counted."""
    folder: Path = Path()
    """Where the recipe will lie: relative files of the recipe start there."""

    def get(self, name: str, otherwise: Any = None) -> Any:
        """The value of a field, or what the tool takes in its place."""
        value = self.given.get(name)
        value = self.defaults.get(name) if value is None else value
        return otherwise if value is None else value

    def number(self, name: str, otherwise: float) -> float:
        return number(self.get(name, otherwise))

    @property
    def is_rl(self) -> bool:
        return self.kind in ("ppo", "group")

    @property
    def processes(self) -> int:
        return self.asked.processes or int(self.number("num_processes", 1))


Rule = Callable[[Any, Source], Outcome]


def paths_of(path: str, kind: Kind) -> list[str]:
    """Where a setting stands in a stage of this kind: `optimiser.lr`, `lora.rank`, and everything else as it is.

    >>> paths_of("optimiser.lr", "ppo"), paths_of("lora.rank", "sft")
    (['stage.actor.lr', 'stage.critic.lr'], ['stage.lora.rank'])
    """
    section, _, key = path.partition(".")
    if section == "optimiser":
        return [f"stage.{name}.{key}" for name in OPTIMISERS.get(kind, ("optimiser",))]
    if section == "lora":
        return [f"stage.{'memory.' if kind in OPTIMISERS else ''}lora.{key}"]
    return [path]


def taken(path: str, value: Any, source: Source, why: str = "") -> Outcome:
    return Outcome(verdict="taken", sets=dict.fromkeys(paths_of(path, source.kind), value), why=why)


def changed(path: str, value: Any, source: Source, why: str) -> Outcome:
    return Outcome(verdict="changed", sets=dict.fromkeys(paths_of(path, source.kind), value), why=why)


def told(why: str) -> Outcome:
    """Kedge does it otherwise, without a setting for it."""
    return Outcome(verdict="changed", why=why)


def refused(why: str) -> Outcome:
    return Outcome(verdict="refused", why=why)


def unneeded(why: str) -> Outcome:
    return Outcome(verdict="not needed", why=why)


def take(path: str, read: Callable[[Any], Any] = lambda value: value, why: str = "") -> Rule:
    """The same setting under another name."""
    return lambda value, source: taken(path, read(value), source, why)


def take_in(kinds: Sequence[str], path: str, read: Callable[[Any], Any], why: str = "") -> Rule:
    """The same for some kinds of stage; others do not read it, in the tool neither."""

    def rule(value: Any, source: Source) -> Outcome:
        if source.kind not in kinds:
            return unneeded(f"{source.trainer} does not read it")
        return taken(path, read(value), source, why)

    return rule


def skip(why: str) -> Rule:
    return lambda value, source: unneeded(why)


def refuse(why: str, unless: tuple[Any, ...] = ()) -> Rule:
    """Refused, unless the value says that nothing is wanted."""

    def rule(value: Any, source: Source) -> Outcome:
        if not value or str(value).lower() in ("false", "none", "0", "0.0"):
            return unneeded("it asks for nothing")
        if any(value == allowed for allowed in unless):
            return unneeded("as it is here")
        return refused(why)

    return rule


def part_of(path: str, why: str) -> Rule:
    """A factor of another field's outcome, which says how."""
    return lambda value, source: _replaced(path, source) or told(f"a part of `{path}`: {why}")


def split_of(path: str) -> Rule:
    """The split of a dataset, of which a share cannot be named."""

    def rule(value: Any, source: Source) -> Outcome:
        if replaced := _replaced(path, source):
            return replaced
        if "[" in str(value):
            return refused("a slice of a split is not there: `limit` of a file takes its first rows")
        return told(f"a part of `{path}`: the split")

    return rule


def _replaced(path: str, source: Source) -> Outcome | None:
    """What a field says of data that the command line names others for."""
    if path != "data" or not source.asked.data:
        return None
    return refused("of the data that --data stands in the place of; what holds for that file too is written beside it")


def lora(key: str, read: Callable[[Any], Any], why: str = "") -> Rule:
    """A setting of adapters, where there are any."""

    def rule(value: Any, source: Source) -> Outcome:
        if not source.is_lora:
            return unneeded("there are no adapters: all weights learn")
        return taken(f"lora.{key}", read(value), source, why)

    return rule


def table(rules: Mapping[str, Rule], groups: Mapping[str, Rule]) -> dict[str, Rule]:
    """Rules by field; the keys of `groups` are several fields with one rule, apart by blanks."""
    return {**{name: rule for names, rule in groups.items() for name in names.split()}, **rules}


def number(value: Any) -> float:
    """A number, which YAML and shells may have left as text (`2e-5`).

    >>> number("2e-5"), number(3)
    (2e-05, 3)
    """
    read: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        read = value
    elif isinstance(value, str):
        with suppress(ValueError):
            read = float(value)
    if read is None or not math.isfinite(read):
        raise ValueError(f"must be a number, found {quoted(value)}")
    return read


def whole(value: Any) -> int:
    """A whole number, also one written 1e4."""
    read = number(value)
    if read != int(read):
        raise ValueError(f"must be a whole number, found {quoted(value)}")
    return int(read)


def flag(value: Any) -> bool:
    """Yes or no, in the words that the YAML of other tools has for it.

    >>> flag("yes"), flag("False"), flag(None)
    (True, False, False)
    """
    text = str(value).strip().lower()
    if text in ("true", "yes", "on", "1"):
        return True
    if text in ("false", "no", "off", "0", "none", ""):
        return False
    raise ValueError(f"must be true or false, found {quoted(value)}")


def text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"must be text, found {quoted(value)}")
    return value.strip()


def names(value: Any) -> list[str]:
    """One or several names: a list, or a text with commas or blanks between them."""
    if isinstance(value, list):
        return [text(item) for item in cast("list[Any]", value)]
    return [name for name in re.split(r"[,\s]+", text(value)) if name]


def folder_name(value: Any) -> str:
    """What a run may be called after a path or a name of others.

    >>> folder_name("./saves/llama-3 8b/dpo"), folder_name("ppo_out/")
    ('dpo', 'ppo_out')
    """
    last = re.split(r"[/\\]", str(value).strip().rstrip("/\\"))[-1]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", last).strip("-_")[:100] or "imported"
