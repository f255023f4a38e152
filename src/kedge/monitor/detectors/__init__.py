"""Detectors over the stream of metrics: one pure rule each (`*_rules`), watched step by step by a `Watchdog`."""

from kedge.monitor.detectors.settings import DetectorSettings
from kedge.monitor.detectors.watchdog import CATALOGUE, Watchdog

__all__ = ["CATALOGUE", "DetectorSettings", "Watchdog"]
