"""Settings by dotted path, and the next value to try. A change is only proposed where the recipe has such a setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast, get_args

from kedge.monitor.doctor.records import Area, Change

_ORDER: tuple[Area, ...] = get_args(Area)


def value_at(settings: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted path; None where there is none.

    >>> value_at({"kl": {"start": 0.05}}, "kl.start"), value_at({"kl": {}}, "kl.target.x")
    (0.05, None)
    """
    found: Any = settings
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = cast("Mapping[str, Any]", found)[part]
    return found


def has(settings: Mapping[str, Any], key: str) -> bool:
    *parents, last = key.split(".")
    above = value_at(settings, ".".join(parents)) if parents else settings
    return isinstance(above, Mapping) and last in above


def number_at(settings: Mapping[str, Any], key: str) -> float | None:
    found = value_at(settings, key)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


def changed(settings: Mapping[str, Any], key: str, new: Any, why: str, *, area: Area) -> list[Change]:
    """One change, or none where there is no such setting or it has this value already."""
    if not has(settings, key) or value_at(settings, key) == new:
        return []
    return [Change(key=key, old=value_at(settings, key), new=new, why=why, area=area)]


def scaled(
    settings: Mapping[str, Any], key: str, factor: float, why: str, *, area: Area, make: Callable[[float], Any] = float
) -> list[Change]:
    """The number at `key` times `factor`, as a round number; none where there is no number, or it is 0."""
    old = number_at(settings, key)
    return changed(settings, key, make(rounded(old * factor)), why, area=area) if old else []


def rounded(value: float) -> float:
    """To one digit, so that a recipe stays readable.

    >>> rounded(1e-4 / 3), rounded(0.0523), rounded(384.0)
    (3e-05, 0.05, 400.0)
    """
    return float(f"{value:.1g}") if math.isfinite(value) else value


def in_tuning_order(changes: list[Change]) -> tuple[Change, ...]:
    """Each setting once (the first proposal counts: it comes from the likelier cause), in the order to tune in."""
    once: dict[str, Change] = {}
    for change in changes:
        once.setdefault(change.key, change)
    return tuple(sorted(once.values(), key=lambda change: _ORDER.index(change.area)))
