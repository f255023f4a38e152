"""What a diagnosis reads and says. A `Change` names a setting of the stage by its dotted path in the recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kedge.core.findings import Level

Area = Literal["generation", "reward scale", "kl", "learning rate", "length", "evaluation"]
"""What a change is about, in the order in which to tune: each one is worth looking at when those before it hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All that a stage's folder says of it: its journals, the settings of its manifest, and how it ended."""

    kind: str
    metrics: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    status: str
    reward_report: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What a reward stage measured of its model; empty for other stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One thing that happened; without a step, before the first or after the last."""

    step: int | None
    level: Level
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What most likely went wrong. `weight` orders causes: how much of the evidence speaks for this one."""

    code: str
    title: str
    explanation: str
    evidence: tuple[str, ...]
    weight: float
    since: int | None
    """The step of the first sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    key: str
    old: Any
    new: Any
    why: str
    area: Area


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """`causes` are ranked, the likeliest first; `changes` come in the order in which to try them."""

    is_healthy: bool
    verdict: str
    timeline: tuple[Moment, ...]
    causes: tuple[Cause, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    """What is worth knowing and no fault: where gold peaks, what a recipe cannot change."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
