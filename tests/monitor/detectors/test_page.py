"""docs/detectors.md says what the code does: its tables are these rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from kedge.monitor.detectors import CATALOGUE, DetectorSettings
from kedge.monitor.detectors.window import Detector
from kedge.monitor.doctor.ppo_causes import SUSPECTS, Suspect

PAGE = (Path(__file__).parents[3] / "docs/detectors.md").read_text(encoding="utf-8")


def detector_row(one: Detector) -> str:
    level = "" if one.level == "warning" else f" ({one.level})"
    rule = one.says.format(threshold=DetectorSettings().threshold(one.code))
    reads = ", ".join(f"`{name}`" for name in one.reads)
    return f"| `{one.code}`{level} | {reads} | {rule} | {one.source} | {one.cause} | {one.advice} |"


def suspect_row(one: Suspect) -> str:
    signs = ", ".join(f"`{code}` {weight:g}" for code, weight in one.signs.items())
    return f"| `{one.code}` | {one.title}: {one.explanation} | {signs} |"


@pytest.mark.parametrize("one", CATALOGUE, ids=[one.code for one in CATALOGUE])
def test_every_detector_is_on_the_page(one: Detector) -> None:
    assert detector_row(one) in PAGE


@pytest.mark.parametrize("one", SUSPECTS, ids=[one.code for one in SUSPECTS])
def test_every_cause_is_on_the_page(one: Suspect) -> None:
    assert suspect_row(one) in PAGE


def test_the_page_has_no_other_rows() -> None:
    assert sum(line.startswith("| `") for line in PAGE.splitlines()) == len(CATALOGUE) + len(SUSPECTS)
