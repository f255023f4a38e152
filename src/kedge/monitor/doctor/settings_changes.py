"""Settings by dotted path, and changes to the next value to try.

A change is only proposed where the recipe has such a setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast, get_args

from kedge.monitor.doctor.diagnosis import Area, Change

_ORDER: tuple[Area, ...] = get_args(Area)


def value_at(settings: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted path; None where there is none.

    >>> value_at({"kl": {"start": 0.05}}, "kl.start"), value_at({"kl": {}}, "kl.target.x")
    (0.05, None)
    """
    value: Any = settings
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = cast("Mapping[str, Any]", value)[part]
    return value


def has_setting(settings: Mapping[str, Any], key: str) -> bool:
    *parents, last = key.split(".")
    section = value_at(settings, ".".join(parents)) if parents else settings
    return isinstance(section, Mapping) and last in section


def number_at(settings: Mapping[str, Any], key: str) -> float | None:
    """The number at a dotted path; None where there is none, or something else."""
    value = value_at(settings, key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def changed(settings: Mapping[str, Any], key: str, new: Any, why: str, *, area: Area) -> list[Change]:
    """One change to `new`; none where there is no such setting, or it has this value already."""
    if not has_setting(settings, key) or value_at(settings, key) == new:
        return []
    return [Change(key=key, old=value_at(settings, key), new=new, why=why, area=area)]


def scaled(
    settings: Mapping[str, Any], key: str, factor: float, why: str, *, area: Area, make: Callable[[float], Any] = float
) -> list[Change]:
    """One change to `factor` times the number at `key`, rounded; none where there is no number, or it is 0."""
    old = number_at(settings, key)
    return changed(settings, key, make(rounded(old * factor)), why, area=area) if old else []


def rounded(value: float) -> float:
    """To one significant digit, so that a recipe stays readable.

    >>> rounded(1e-4 / 3), rounded(0.0523), rounded(384.0)
    (3e-05, 0.05, 400.0)
    """
    return float(f"{value:.1g}") if math.isfinite(value) else value


def in_tuning_order(changes: list[Change]) -> tuple[Change, ...]:
    """Each setting once, in the order to tune in. Of two changes the first counts: it comes from the likelier cause."""
    first_changes: dict[str, Change] = {}
    for change in changes:
        first_changes.setdefault(change.key, change)
    return tuple(sorted(first_changes.values(), key=lambda change: _ORDER.index(change.area)))
