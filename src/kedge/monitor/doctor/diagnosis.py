"""The records of a diagnosis: the history that it reads, and its timeline, causes and changes.

A `Change` names a setting of the stage by its dotted path in the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kedge.core.findings import Level

Area = Literal["generation", "reward scale", "kl", "learning rate", "length", "evaluation"]
"""What a change is about, in the order in which to tune: an area is worth a change once those before it are right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What the folder of a stage holds: its journals, the settings of its manifest, and its status."""

    kind: str
    metrics: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    status: str
    reward_report: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`reward-report.json` of a reward stage; empty for other stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One entry of the timeline; without a step, before the first step or after the last."""

    step: int | None
    level: Level
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What may have gone wrong. `weight` ranks causes: how much of the evidence speaks for this one."""

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
