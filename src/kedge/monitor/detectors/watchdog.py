"""Runs every detector that is switched on over the metrics, step by step, and raises one alarm at each onset.

A detector that has raised an alarm is silent until its rule has been quiet for `REARM` steps. Left out: any decision;
what to do about an alarm is up to its reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kedge.monitor.alarms import Alarm
from kedge.monitor.detectors.policy_rules import ANSWER_DETECTORS, UPDATE_DETECTORS
from kedge.monitor.detectors.reward_rules import KL_DETECTORS, REWARD_DETECTORS
from kedge.monitor.detectors.settings import DetectorSettings
from kedge.monitor.detectors.window import RECENT, START, Detector, Window

CATALOGUE: tuple[Detector, ...] = (
    *KL_DETECTORS,
    *REWARD_DETECTORS,
    *ANSWER_DETECTORS,
    *UPDATE_DETECTORS,
)

REARM = 10
"""Quiet steps after which a detector may raise its alarm again: the steps of the old one have then left an average over
ten."""

READ = frozenset(name for detector in CATALOGUE for name in detector.reads)
"""The metrics that any detector reads."""


class Watchdog:
    """`observe` each step in order. `state` is plain JSON types, so that a resumed run raises the same alarms."""

    def __init__(
        self,
        settings: DetectorSettings,
        *,
        kl_target: float | None,
        kl_limit: float | None,
        score_std: float | None = None,
    ) -> None:
        """`score_std` is the spread that scores are normalised to; None where they are not."""
        self._thresholds = {
            detector: threshold
            for detector in CATALOGUE
            if (threshold := settings.threshold(detector.code)) is not None
        }
        self._kl_target, self._kl_limit, self._score_std = kl_target, kl_limit, score_std
        self._start: list[dict[str, float]] = []
        self._recent: list[dict[str, float]] = []
        self._num_steps = 0
        self._quiet_for: dict[str, int] = {}

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Take in the metrics of one step; the alarms that begin with it."""
        row = {name: float(value) for name, value in metrics.items() if name in READ}
        self._num_steps += 1
        if len(self._start) < START:
            self._start.append(row)
        self._recent = [*self._recent, row][-RECENT:]
        window = Window(
            start=self._start,
            recent=self._recent,
            num_steps=self._num_steps,
            kl_target=self._kl_target,
            kl_limit=self._kl_limit,
            score_std=self._score_std,
        )
        alarms = (self._apply(detector, threshold, window, step) for detector, threshold in self._thresholds.items())
        return [alarm for alarm in alarms if alarm is not None]

    def state(self) -> dict[str, Any]:
        return {
            "start": [dict(row) for row in self._start],
            "recent": [dict(row) for row in self._recent],
            "num_steps": self._num_steps,
            "quiet_for": dict(self._quiet_for),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._start = [dict(row) for row in state["start"]]
        self._recent = [dict(row) for row in state["recent"]]
        self._num_steps = state["num_steps"]
        self._quiet_for = dict(state["quiet_for"])

    def _apply(self, detector: Detector, threshold: float, window: Window, step: int) -> Alarm | None:
        """The alarm of one detector where its rule sees a sign and it is armed."""
        sign = detector.rule(window, threshold)
        is_armed = detector.code not in self._quiet_for
        if sign is None:
            if not is_armed:
                self._count_quiet_step(detector.code)
            return None
        self._quiet_for[detector.code] = 0
        if not is_armed:
            return None
        return Alarm(
            level=detector.level,
            code=detector.code,
            message=sign.message,
            step=step,
            evidence=sign.evidence,
            cause=detector.cause,
            advice=detector.advice,
        )

    def _count_quiet_step(self, code: str) -> None:
        """After `REARM` quiet steps the detector is armed again."""
        self._quiet_for[code] += 1
        if self._quiet_for[code] >= REARM:
            del self._quiet_for[code]
