"""docs/detectors.md says what the code does: its tables are these rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from kedge.monitor.detectors import CATALOGUE, DetectorSettings
from kedge.monitor.detectors.watchdog import Detector
from kedge.monitor.doctor.ppo_causes import SUSPECTS, Suspect

PAGE = (Path(__file__).parents[3] / "docs/detectors.md").read_text(encoding="utf-8")


def detector_row(detector: Detector) -> str:
    level = "" if detector.level == "warning" else f" ({detector.level})"
    rule = detector.says.format(threshold=DetectorSettings().threshold(detector.code))
    reads = ", ".join(f"`{name}`" for name in detector.reads)
    return f"| `{detector.code}`{level} | {reads} | {rule} | {detector.source} | {detector.cause} | {detector.advice} |"


def suspect_row(suspect: Suspect) -> str:
    signs = ", ".join(f"`{code}` {weight:g}" for code, weight in suspect.signs.items())
    return f"| `{suspect.code}` | {suspect.title}: {suspect.explanation} | {signs} |"


@pytest.mark.parametrize("detector", CATALOGUE, ids=[detector.code for detector in CATALOGUE])
def test_every_detector_is_on_the_page(detector: Detector) -> None:
    assert detector_row(detector) in PAGE


@pytest.mark.parametrize("suspect", SUSPECTS, ids=[suspect.code for suspect in SUSPECTS])
def test_every_cause_is_on_the_page(suspect: Suspect) -> None:
    assert suspect_row(suspect) in PAGE


def test_the_page_has_no_other_rows() -> None:
    assert sum(line.startswith("| `") for line in PAGE.splitlines()) == len(CATALOGUE) + len(SUSPECTS)
