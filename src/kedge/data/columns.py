"""Which column plays which part, where a user says so: `columns: {prompt: question, chosen: good, ignore: [score]}`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from kedge.core.errors import ConfigError, DataError
from kedge.core.suggest import did_you_mean

PARTS = (
    "prompt",
    "chosen",
    "rejected",
    "answers",
    "rank",
    "scores",
    "completion",
    "label",
    "score",
    "better",
    "messages",
    "text",
    "answer",
    "system",
    "history",
    "tools",
    "margin",
    "certainty",
)
"""Parts that a column can play. `score` ranks the answers to one prompt; `better` is the choice of a layout that has
several preferences."""


@dataclass(frozen=True, slots=True)
class Columns:
    """`parts` maps a part to the column that plays it (`reward_model.ground_truth` is a field inside a field)."""

    parts: Mapping[str, str] = field(default_factory=dict[str, str])
    ignore: tuple[str, ...] = ()

    @classmethod
    def parse(cls, value: Mapping[str, Any] | None) -> Columns:
        """
        >>> Columns.parse({"prompt": "question", "ignore": ["score"]})
        Columns(parts={'prompt': 'question'}, ignore=('score',))
        """
        parts = dict(value or {})
        ignored = parts.pop("ignore", [])
        names = [ignored] if isinstance(ignored, str) else ignored
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in _items(names)):
            raise ConfigError(f"columns.ignore: found {ignored!r}; give a list of columns")
        for part, name in parts.items():
            if part not in PARTS:
                known = ", ".join((*PARTS, "ignore"))
                raise ConfigError(f"columns.{part}: there is no such part{did_you_mean(part, PARTS)}; one of {known}")
            if not isinstance(name, str) or not name:
                raise ConfigError(f"columns.{part}: found {name!r}; give the name of a column")
        return cls(cast("dict[str, str]", parts), tuple(cast("Sequence[str]", names)))

    def without(self, parts: Iterable[str]) -> Columns:
        """The same without these parts, which a layout takes care of."""
        leave = set(parts)
        return Columns({part: name for part, name in self.parts.items() if part not in leave}, self.ignore)

    def applied(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """The row with its columns under the names of their parts, without those that do not count."""
        if not self.parts and not self.ignore:
            return fields
        moved = {part: value for part, name in self.parts.items() if (value := _value(fields, name)) is not None}
        gone = {*self.ignore, *self.parts.values()}
        rest = {name: value for name, value in fields.items() if name not in gone}
        hidden = {name: rest.pop(name) for name in list(rest) if name in self.parts}
        return {**rest, **({"extra": hidden} if hidden else {}), **moved}

    def refuse_missing(self, sample: Sequence[Mapping[str, Any]]) -> None:
        """A column that no row has is a misspelt one."""
        names = sorted({name for row in sample for name in row})
        wanted = [(f"columns.{part}", name) for part, name in self.parts.items()]
        for key, name in [*wanted, *(("columns.ignore", name) for name in self.ignore)]:
            if all(_value(row, name) is None for row in sample) and name not in names:
                hint = did_you_mean(name, names)
                raise DataError(f"{key}: no row has a column '{name}'{hint}; found: {', '.join(names)}")


NO_COLUMNS = Columns()


def _items(value: Iterable[Any]) -> Iterable[Any]:
    return value


def _value(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a field inside a field: `a.b` is `fields["a"]["b"]` where there is no `a.b`."""
    if name in fields or "." not in name:
        return fields.get(name)
    value: Any = fields
    for key in name.split("."):
        value = cast("Mapping[str, Any]", value).get(key) if isinstance(value, Mapping) else None
    return value
