"""A run in which nothing happens, to plant faults in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kedge.monitor.detectors import CATALOGUE, DetectorSettings

sys.path.insert(0, str(Path(__file__).parent))  # for the collections of cases beside the tests

Plant = Callable[[int], Mapping[str, float]]
Steady = Callable[..., list[dict[str, float]]]

STEADY: dict[str, float] = {
    "reward/mean": 1.0,
    "reward/std": 1.0,
    "reward/at_limit": 0.05,
    "reward/gold_correlation": 0.6,
    "reward/length_correlation": 0.1,
    "reward/disagreement": 0.2,
    "reward/out_of_range": 0.02,
    "reward/unscored": 0.0,
    "gold/mean": 1.0,
    "kl/mean": 4.0,
    "kl/coef": 0.1,
    "length/mean": 50.0,
    "length/truncated": 0.1,
    "entropy/mean": 2.0,
    "repetition/mean": 0.02,
    "distinct/mean": 0.5,
    "similarity/mean": 0.1,
    "policy/loss": 0.1,
    "policy/clip_fraction": 0.05,
    "policy/approx_kl": 0.005,
    "policy/grad_norm": 1.0,
    "policy/mismatch": 1e-6,
    "value/loss": 0.5,
    "value/grad_norm": 1.0,
    "value/explained_variance": 0.5,
    "prompts/repeated": 0.0,
}


@pytest.fixture
def steady() -> Steady:
    """`steps` rows; from step 21 on, or where `plant` says so, some metrics have other values."""

    def make(steps: int, plant: Plant | None = None, **later: float) -> list[dict[str, float]]:
        changed = {name.replace("__", "/"): value for name, value in later.items()}
        rows = [STEADY | (changed if step > 20 else {}) for step in range(1, steps + 1)]
        rows = [row | dict(plant(step)) for step, row in enumerate(rows, start=1)] if plant else rows
        rows[0]["kl/mean"] = 0.0  # policy and reference begin as one
        return rows

    return make


@pytest.fixture
def only() -> Callable[[str], DetectorSettings]:
    """Settings with one detector on and all others off."""

    def make(code: str) -> DetectorSettings:
        values: dict[str, object] = {"not_finite": code == "not_finite"}
        for detector in CATALOGUE:
            area, _, name = detector.code.partition(".")
            if name and detector.code != code:
                group = values.setdefault(area, {})
                assert isinstance(group, dict)
                group[name] = None
        return DetectorSettings.model_validate(values)

    return make
