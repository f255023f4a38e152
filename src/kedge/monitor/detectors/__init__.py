"""Detectors over the stream of metrics: one pure rule each (`*_rules`), applied step by step by a `Watchdog`."""

from kedge.monitor.detectors.exam_rules import EXAM_DETECTORS
from kedge.monitor.detectors.kl_rules import KL_DETECTORS
from kedge.monitor.detectors.policy_rules import ANSWER_DETECTORS, UPDATE_DETECTORS
from kedge.monitor.detectors.reward_rules import REWARD_DETECTORS
from kedge.monitor.detectors.settings import DetectorSettings
from kedge.monitor.detectors.watchdog import Detector, MetricNames, Watchdog

CATALOGUE: tuple[Detector, ...] = (
    *KL_DETECTORS,
    *REWARD_DETECTORS,
    *ANSWER_DETECTORS,
    *UPDATE_DETECTORS,
    *EXAM_DETECTORS,
)

READ = MetricNames.of(CATALOGUE)
"""The metrics that any detector reads."""

__all__ = ["CATALOGUE", "READ", "DetectorSettings", "Watchdog"]
