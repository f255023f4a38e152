"""The learning rate of every step against closed forms."""

from __future__ import annotations

import math

import pytest

from kedge.core.optimiser import OptimiserSettings
from kedge.models.training.train_step import learning_rate


def rates(total: int, **settings: object) -> list[float]:
    optimiser = OptimiserSettings.model_validate({"lr": 3.0, **settings})
    return [learning_rate(optimiser, step, total) for step in range(1, total + 1)]


def test_constant_after_a_straight_rise() -> None:
    assert rates(8, schedule="constant", warmup=0.5) == [0.75, 1.5, 2.25, 3.0, 3.0, 3.0, 3.0, 3.0]


def test_linear_falls_by_equal_parts_and_the_last_step_still_learns() -> None:
    # 2 steps up, then 3 · (1 - k/6) for k = 0 … 5.
    assert rates(8, schedule="linear", warmup=0.25) == pytest.approx([1.5, 3.0, 3.0, 2.5, 2.0, 1.5, 1.0, 0.5])


def test_cosine_is_half_way_at_half_time() -> None:
    # 3 · (1 + cos(π k/4)) / 2 for k = 0 … 3: √2/2 at the odd ones.
    high, low = 1.5 * (1 + math.sqrt(0.5)), 1.5 * (1 - math.sqrt(0.5))
    assert rates(4, schedule="cosine", warmup=0.0) == pytest.approx([3.0, high, 1.5, low])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0.0, 0.03, 0.5, 0.99])
@pytest.mark.parametrize("total", [1, 2, 7, 100])
def test_every_schedule_peaks_at_lr_never_passes_it_and_never_stands_still(
    schedule: str, warmup: float, total: int
) -> None:
    schedule_rates = rates(total, schedule=schedule, warmup=warmup)
    assert max(schedule_rates) == 3.0
    assert min(schedule_rates) > 0.0


@pytest.mark.parametrize(
    ("warmup", "total", "rising"),
    [
        (0.0, 10, 0),
        (0.01, 10, 1),  # a share of a step is a step
        (0.3, 10, 3),
        (0.07, 100, 7),  # 7.000000000000001 in floating point
        (0.55, 100, 55),  # 55.00000000000001
        (0.95, 10, 10),  # all of it
    ],
)
def test_the_rise_takes_its_share_of_the_steps(warmup: float, total: int, rising: int) -> None:
    schedule_rates = rates(total, schedule="constant", warmup=warmup)
    assert schedule_rates == pytest.approx([3.0 * min(1.0, step / max(rising, 1)) for step in range(1, total + 1)])
    assert sum(rate < 3.0 for rate in schedule_rates) == max(rising - 1, 0)
