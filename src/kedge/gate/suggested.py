"""Rules for what was measured: margins that its items can decide, to begin with."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

from kedge.core.errors import ConfigError
from kedge.evaluate.judged import MAJORITY
from kedge.evaluate.paired import smallest_margin
from kedge.gate.evidence import EVALUATION, EXAM

DISCORDANT = 0.1
"""The share of items that two models of one lineage answer differently, as long as nobody knows."""
ALPHA = 0.05


def suggested_rules(folders: Sequence[Path]) -> str:
    """A file of rules for the exams and evaluations in these folders. A margin is the smallest with which equal models
    pass in 80 % of trials, if they differ in a tenth of their answers."""
    exams: dict[str, tuple[str, int]] = {}
    judges: list[str] = []
    for folder in folders:
        if (folder / EXAM).is_file():
            exams |= _exams(json.loads((folder / EXAM).read_bytes()))
        elif (folder / EVALUATION).is_file():
            judges += _judges(json.loads((folder / EVALUATION).read_bytes()))
        else:
            raise ConfigError(f"{folder}: neither {EXAM} nor {EVALUATION} is here; --from names what they are in")
    return "\n".join([*_improve(judges), *_keep(exams), "replay: {block: all, warn: 0.9}", f"alpha: {ALPHA}", ""])


def _exams(about: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """By exam, its main metric and how many independent items it has."""
    return {
        result["exam"]: (result["metric"], int(result["clusters"]))
        for result in about["results"]
        if not result.get("group") and about["exams"][result["exam"]]["main"] == result["metric"]
    }


def _judges(about: dict[str, Any]) -> list[str]:
    scores = [source for model in about["comparisons"].values() for source in model]
    return [*scores, *(judge for by_judge in (about.get("judges") or {}).values() for judge in by_judge)]


def _improve(judges: Sequence[str]) -> Iterator[str]:
    if judges:
        trusted = [judge for judge in ("gold", MAJORITY) if judge in judges]
        others = [judge for judge in judges if judge != "reward"]
        judge = next(iter([*trusted, *others, *judges]))
        yield "improve:"
        yield f"  win_rate: {{judge: {judge}, at_equal_length: true, over: 0.5}}"


def _keep(exams: dict[str, tuple[str, int]]) -> Iterator[str]:
    if exams:
        yield "keep:   # not worse than the baseline by more than this: the smallest margin that so many items decide"
    for exam, (metric, items) in exams.items():
        yield f"  {exam}: {margin_for(items):g}   # {metric}, {items:,} items"


def margin_for(items: int) -> float:
    """Rounded up to half a point, or to two figures where it is below one.

    >>> margin_for(14_042), margin_for(250), margin_for(40)
    (0.0067, 0.05, 0.125)
    """
    z2 = NormalDist().inv_cdf(1 - ALPHA) ** 2
    margin = max(smallest_margin(DISCORDANT, items, alpha=ALPHA), z2 / (items + z2))
    unit = 0.0001 if margin < 0.01 else 0.005
    return round(math.ceil(margin / unit - 1e-9) * unit, 6)
