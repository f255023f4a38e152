"""Watching a run on rollouts while it goes on: detectors over its metrics, and the predicted peak of the gold score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kedge.core.protocols import Metrics
from kedge.monitor.alarms import Alarm
from kedge.monitor.detectors.settings import DetectorSettings
from kedge.monitor.detectors.watchdog import Watchdog
from kedge.monitor.overoptimisation import Fit, fit, should_stop
from kedge.trainers.settings import KLSettings, ScoreSettings


class Lookout:
    """The detectors of a recipe. Their state is part of a checkpoint: a resumed run raises the same alarms."""

    def __init__(self, detectors: DetectorSettings, kl: KLSettings, scores: ScoreSettings) -> None:
        # The metric is of raw scores: normalised ones have a spread of about 1, whatever it says.
        std = None if scores.normalise == "none" else 1.0
        self._dog = Watchdog(detectors, kl_target=kl.target, kl_limit=kl.limit, score_std=std)

    def observe(self, step: int, metrics: Metrics) -> list[Alarm]:
        return self._dog.observe(step, metrics)

    def state(self) -> dict[str, Any]:
        return self._dog.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self._dog.load(state)


def peak_passed(metrics: Sequence[Mapping[str, Any]]) -> Fit | None:
    """The fit that says that the gold score is at or past its predicted peak; None while nothing says so."""
    seen = [one for one in metrics if "gold/mean" in one]
    if not seen:
        return None
    kl = [float(one["kl/mean"]) for one in seen]
    found = fit(kl, [float(one["gold/mean"]) for one in seen], kind="rl")
    return found if isinstance(found, Fit) and should_stop(found, kl[-1]) else None
