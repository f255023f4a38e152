"""A configuration through the table of its tool: the settings of a recipe, and a row for every field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from kedge.core.errors import ConfigError
from kedge.core.quoting import one_line, quoted
from kedge.core.suggest import did_you_mean
from kedge.core.urls import redacted
from kedge.importing.rules import Outcome, Rule, Source, Verdict, refused, unneeded

HIDDEN: Final = "(hidden)"
_SECRET_NAME: Final = re.compile(r"(^|_)token$|api_?key|secret|password|passwd|credential|webhook|^env$", re.I)
_SECRET_VALUE: Final = re.compile(r"\b(hf_|sk-|ghp_|xox|AKIA|wandb_v)[A-Za-z0-9_-]{8,}|\b[0-9a-f]{40}\b")
_NOT_SECRET: Final = frozenset({"eos_token", "pad_token", "bos_token", "stop_token"})
_INDEX: Final = re.compile(r"\[\d+\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One field of a configuration, and what became of it."""

    field: str
    value: str
    verdict: Verdict
    becomes: tuple[str, ...]
    """Settings of the recipe, as `lr: 2e-05`."""
    why: str
    line: int | None = None
    is_default: bool = False
    """The field is not written; the tool's default is, so that the training is the same."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Settings of a recipe by path, those of its stage under `stage.`, and where each came from."""

    settings: Mapping[str, Any]
    rows: tuple[Row, ...]

    @property
    def unknown(self) -> list[Row]:
        return [row for row in self.rows if row.verdict == "unknown"]


def through(source: Source, table: Mapping[str, Rule], fixed: Mapping[str, Any], *, skip_unknown: bool) -> Imported:
    """Every field through its rule. Defaults go first, so that what is written goes over them; `fixed` goes last."""
    settings: dict[str, Any] = {}
    defaults: list[Row] = []
    for name, value in source.defaults.items():
        if source.given.get(name) is None and name in table:
            outcome = _judged(name, value, table, source)
            settings |= outcome.sets
            if name not in source.given and (outcome.sets or outcome.verdict == "refused"):
                defaults.append(_row(name, value, outcome, source, is_default=True))
    outcomes = {name: _judged(name, value, table, source) for name, value in source.given.items()}
    for outcome in outcomes.values():
        settings |= outcome.sets
    settings |= fixed
    rows = [_row(name, source.given[name], _settled(name, outcomes, settings), source) for name in outcomes]
    if fixed:
        outcome = Outcome(verdict="taken", sets=fixed, why="what this trainer always does")
        defaults.append(_row("(trainer)", source.trainer, outcome, source, is_default=True))
    imported = Imported(settings=settings, rows=(*rows, *defaults))
    if imported.unknown and not skip_unknown:
        listed = "\n".join(f"  {_where(source, row.field)}{one_line(row.field)}: {row.why}" for row in imported.unknown)
        raise ConfigError(
            f"{source.file}: {len(imported.unknown)} field(s) that are not known\n{listed}\n"
            "Correct them, or leave them out with --skip-unknown."
        )
    return imported


def _settled(name: str, outcomes: Mapping[str, Outcome], settings: Mapping[str, Any]) -> Outcome:
    """The outcome of a field, or a refusal where another field has set something else in the same place."""
    outcome = outcomes[name]
    lost = [path for path, value in outcome.sets.items() if settings[path] != value]
    if not lost:
        return outcome
    others = [other for other, its in outcomes.items() if its.sets.get(lost[0]) == settings[lost[0]]]
    winner = f"`{others[-1]}`" if others else "the trainer"
    kept = {path: value for path, value in outcome.sets.items() if path not in lost}
    return Outcome(verdict="refused", sets=kept, why=f"{winner} says otherwise, and stands in the recipe: keep one")


def is_secret(name: str, value: Any) -> bool:
    """Whether a field holds a key by its name, or by what it looks like."""
    last = name.rsplit(".", 1)[-1]
    if "revision" in last:  # a commit has forty digits, as some keys have
        return False
    return (last not in _NOT_SECRET and bool(_SECRET_NAME.search(last))) or bool(_SECRET_VALUE.search(str(value)))


def _judged(name: str, value: Any, table: Mapping[str, Rule], source: Source) -> Outcome:
    rule = table.get(_INDEX.sub("[]", name))
    if rule is None:
        return Outcome(verdict="unknown", why=f"no such field{did_you_mean(name, table)}")
    if value is None and source.defaults.get(name) is None:
        return unneeded("null, as if it were not there")
    if is_secret(name, value) and not _is_flag(value):
        return (
            rule(HIDDEN, source)
            if name == "use_wandb"
            else refused("a key is never copied; keep it in the environment")
        )
    try:
        return rule(source.defaults.get(name) if value is None else value, source)
    except ValueError as problem:
        raise ConfigError(f"{source.file}: {_where(source, name)}{one_line(name)}: {problem}") from None
    except (TypeError, ArithmeticError):  # a list where a number should be, a batch of 0
        found = f"cannot be read, found {quoted(value)}"
        raise ConfigError(f"{source.file}: {_where(source, name)}{one_line(name)}: {found}") from None


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or value is None


def _where(source: Source, name: str) -> str:
    return f"line {source.lines[name]}: " if name in source.lines else ""


def _row(name: str, value: Any, outcome: Outcome, source: Source, *, is_default: bool = False) -> Row:
    return Row(
        field=name,
        value=HIDDEN if is_secret(name, value) and not _is_flag(value) else _shown(value),
        verdict=outcome.verdict,
        becomes=tuple(f"{path.removeprefix('stage.')}: {_shown(setting)}" for path, setting in outcome.sets.items()),
        why=outcome.why,
        line=source.lines.get(name),
        is_default=is_default,
    )


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return one_line(redacted(value) if "://" in value else value, 80)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return quoted(value, 80)
