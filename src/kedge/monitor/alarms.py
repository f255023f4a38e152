"""An alarm: one thing that went wrong in a run, once, with its evidence, its likely cause and what to try next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kedge.core.findings import Level


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """`code` is also the setting that switches its detector off (`detectors: {kl: {over_target: null}}`)."""

    level: Level
    code: str
    message: str
    step: int
    evidence: Mapping[str, float | str]
    cause: str
    advice: str

    def as_event(self) -> dict[str, Any]:
        """The alarm as an event for a tracker, with cause and advice in its evidence."""
        evidence = {**self.evidence, "cause": self.cause, "advice": self.advice}
        return {
            "level": self.level,
            "code": self.code,
            "message": self.message,
            "step": self.step,
            "evidence": evidence,
        }
