"""The page about all rounds: every round has its dots, inside of the frame."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kedge.report.charts.svg import CARD
from kedge.report.rounds.page import render_rounds
from kedge.report.rounds.records import RoundRecord, RoundsRecord
from kedge.runs.manifest import Manifest, new_manifest


def manifest(kind: str, **changes: Any) -> Manifest:
    made = new_manifest(name="shop", kind=kind, seed=1, settings={"rounds": {"count": 3}})
    return replace(made, **changes)


def round_of(number: int) -> RoundRecord:
    rate = {"value": 0.5 + number / 10, "low": 0.4, "high": 0.9}
    gold = {"mean": float(number), "low": number - 0.5, "high": number + 0.5}
    figures = {"policy": {"win_rate": rate, "proxy_rate": rate, "gold": gold, "previous_gold": gold}}
    folder = Path(f"round-{number}")
    return RoundRecord(folder=folder, manifest=manifest("pipeline", round=number), status="done", figures=figures)


@pytest.mark.parametrize(("count", "dots"), [(1, 2 + 2), (3, 6 + 4)])
def test_every_round_has_its_dots_inside_of_the_frame(count: int, dots: int) -> None:
    rounds = tuple(round_of(number + 1) for number in range(count))
    run = RoundsRecord(folder=Path("shop"), manifest=manifest("rounds"), status="done", rounds=rounds, best={})
    page = render_rounds(run)
    places = [float(x) for x in re.findall(r'<circle[^>]* cx="([-\d.]+)"', page)]
    assert len(places) == dots
    assert [x for x in places if not CARD.left < x < CARD.right] == []
    assert '<div class="charts"' in page
