"""Score shaping: breakpoints of every penalty, and moments that do not depend on how scores came in."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kedge.algorithms import (
    RunningMoments,
    clip_scores,
    length_penalty,
    length_price,
    missing_eos_penalty,
    missing_eos_score,
    overlong_penalty,
)
from kedge.core.errors import CheckpointError, ConfigError, NumericsError

NAN, INF = math.nan, math.inf

scores = st.lists(st.floats(-1e3, 1e3), min_size=0, max_size=8)


def test_clip_scores() -> None:
    found_B = clip_scores(torch.tensor([-7.0, -2.5, 0.5, 2.5, 9.0, INF]), limit=2.5)
    assert found_B.tolist() == [-2.5, -2.5, 0.5, 2.5, 2.5, 2.5]
    assert clip_scores(torch.tensor([NAN]), limit=1.0).isnan().all()
    assert clip_scores(torch.tensor([0.5], dtype=torch.bfloat16), limit=1.0).dtype == torch.float32


@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_clip_scores_refuses_no_room(limit: float) -> None:
    with pytest.raises(ConfigError) as error:
        clip_scores(torch.zeros(1), limit=limit)
    assert str(error.value) == f"limit: found {limit}, expected more than 0"


def test_length_penalty() -> None:
    # 3 (1 - length / 8)
    found_B = length_penalty(torch.tensor([0, 4, 8, 16]), coef=3.0, target=8)
    assert found_B.tolist() == [3.0, 1.5, 0.0, -3.0]
    assert found_B.dtype == torch.float32
    with pytest.raises(ConfigError) as error:
        length_penalty(torch.tensor([1]), coef=1.0, target=0)
    assert str(error.value) == "target: found 0, expected more than 0"


def test_length_price() -> None:
    found_B = length_price(torch.tensor([0, 9, 10, 15, 20, 21, 24]), price=0.25, least=10, most=20)
    assert found_B.tolist() == [-2.5, -0.25, 0, 0, 0, -0.25, -1.0]
    assert length_price(torch.tensor([3, 5]), price=2.0, least=4, most=4).tolist() == [-2.0, -2.0]
    with pytest.raises(ConfigError, match="least 5 and most 4"):
        length_price(torch.tensor([1]), price=1.0, least=5, most=4)


def test_overlong_penalty() -> None:
    # free up to 12, then (12 - length) / 8 down to -1 at 20
    found_B = overlong_penalty(torch.tensor([0, 11, 12, 13, 16, 19, 20, 21, 99]), max_length=20, buffer=8)
    assert found_B.tolist() == [0, 0, 0, -0.125, -0.5, -0.875, -1, -1, -1]
    assert found_B.dtype == torch.float32


def test_overlong_penalty_of_the_whole_length() -> None:
    assert overlong_penalty(torch.tensor([0, 1, 4]), max_length=4, buffer=4).tolist() == [0, -0.25, -1]
    assert overlong_penalty(torch.tensor([3, 4]), max_length=4, buffer=1).tolist() == [0, -1]


@pytest.mark.parametrize("buffer", [0, -1, 21])
def test_overlong_penalty_refuses_a_buffer_that_does_not_fit(buffer: int) -> None:
    with pytest.raises(ConfigError) as error:
        overlong_penalty(torch.tensor([1]), max_length=20, buffer=buffer)
    assert str(error.value) == f"buffer: found {buffer}, expected 1 to 20 tokens, the max_length"


def test_missing_ends() -> None:
    scores_B, finished_B = torch.tensor([3.0, 4.0, NAN, NAN]), torch.tensor([True, False, True, False])
    subtracted = missing_eos_penalty(scores_B, finished_B, penalty=1.5).tolist()
    replaced = missing_eos_score(scores_B, finished_B, score=-0.25).tolist()
    assert subtracted[:2] == [3.0, 2.5]
    assert [math.isnan(score) for score in subtracted[2:]] == [True, True]
    assert [replaced[0], replaced[1], replaced[3]] == [3.0, -0.25, -0.25]
    assert math.isnan(replaced[2])


def test_missing_ends_are_float32_at_least() -> None:
    finished_B = torch.tensor([False])
    low_B = torch.tensor([1.0], dtype=torch.bfloat16)
    assert missing_eos_penalty(low_B, finished_B, penalty=2.0**-12).tolist() == [1 - 2.0**-12]
    assert missing_eos_score(low_B, finished_B, score=1 + 2.0**-12).tolist() == [1 + 2.0**-12]


def test_moments_golden() -> None:
    moments = RunningMoments()
    assert (moments.count, moments.mean, moments.variance, moments.std) == (0, 0.0, 0.0, 0.0)
    moments.update(torch.tensor([[1.0, 2.0], [6.0, 3.0]]))  # mean 3, squares 4 + 1 + 9 + 0 = 14
    assert moments.state() == {"count": 4, "mean": 3.0, "squares": 14.0}
    moments.update(torch.tensor([8.0]))  # mean 4, squares 9 + 4 + 4 + 1 + 16 = 34
    assert moments.state() == {"count": 5, "mean": 4.0, "squares": 34.0}
    assert moments.variance == pytest.approx(6.8)
    assert moments.std == pytest.approx(math.sqrt(6.8))


@given(st.lists(scores, min_size=1, max_size=5))
@settings(max_examples=80)
def test_moments_shards_give_what_one_pass_gives(parts: list[list[float]]) -> None:
    everything = torch.tensor([score for part in parts for score in part], dtype=torch.float64)
    in_turn, merged = RunningMoments(), RunningMoments()
    for part in reversed(parts):
        in_turn.update(torch.tensor(part, dtype=torch.float64))
    for part in parts:
        other = RunningMoments()
        other.update(torch.tensor(part, dtype=torch.float64))
        merged.merge(other)
    for moments in (in_turn, merged):
        assert moments.count == len(everything)
        if len(everything):
            assert moments.mean == pytest.approx(everything.mean().item(), abs=1e-9)
            assert moments.variance == pytest.approx(everything.var(correction=0).item(), rel=1e-6, abs=1e-9)


def test_moments_small_differences_around_a_large_mean_survive() -> None:
    moments = RunningMoments()
    for shift in (0.0, 2.0, 4.0):
        moments.update(torch.tensor([1e8 + shift, 1e8 + shift + 1], dtype=torch.float64))
    # 0, 1, 2, 3, 4, 5 have the variance 35/12
    assert moments.variance == pytest.approx(35 / 12, rel=1e-6)


def test_moments_merging_leaves_the_other_alone() -> None:
    moments, other = RunningMoments(), RunningMoments(count=2, mean=3.0, squares=8.0)
    moments.merge(other)
    moments.update(torch.tensor([9.0]))
    assert other == RunningMoments(count=2, mean=3.0, squares=8.0)


def test_moments_nothing_changes_nothing() -> None:
    moments = RunningMoments(count=2, mean=3.0, squares=8.0)
    moments.update(torch.tensor([]))
    moments.merge(RunningMoments())
    assert moments == RunningMoments(count=2, mean=3.0, squares=8.0)
    empty = RunningMoments()
    empty.merge(RunningMoments())
    assert empty == RunningMoments()


def test_moments_scores_that_are_not_finite_are_refused() -> None:
    moments = RunningMoments(count=2, mean=3.0, squares=8.0)
    with pytest.raises(NumericsError) as error:
        moments.update(torch.tensor([1.0, NAN, INF, 2.0]))
    assert str(error.value) == (
        "2 of 4 scores are not finite; the running moments were not changed. "
        "Drop the rows whose reward source failed before this"
    )
    assert moments == RunningMoments(count=2, mean=3.0, squares=8.0)


def test_moments_normalise() -> None:
    moments = RunningMoments(count=2, mean=3.0, squares=32.0)  # std 4
    scores_B = torch.tensor([5.0, -1.0, NAN])
    assert moments.normalise(scores_B, centre=True)[:2].tolist() == [0.5, -1.0]
    assert moments.normalise(scores_B, centre=False)[:2].tolist() == [1.25, -0.25]
    assert moments.normalise(scores_B, centre=False)[2].isnan()


@pytest.mark.parametrize(("squares", "divisor"), [(0.0, 1.0), (2e-12, 1.0), (2.42e-12, 1.1e-6)])
def test_moments_hardly_any_difference_is_not_blown_up(squares: float, divisor: float) -> None:
    moments = RunningMoments(count=2, mean=3.0, squares=squares)  # std 0, 1e-6, 1.1e-6
    scores_B = torch.tensor([5.0], dtype=torch.float64)
    assert moments.normalise(scores_B, centre=True).item() == pytest.approx(2 / divisor)
    assert moments.normalise(scores_B, centre=False, eps=0.0).item() == pytest.approx(
        5 / math.sqrt(squares / 2) if squares else 5.0
    )


def test_moments_normalise_is_float32_at_least() -> None:
    moments = RunningMoments(count=1, mean=2.0**-12, squares=1.0)
    found_B = moments.normalise(torch.ones(1, dtype=torch.bfloat16), centre=True)
    assert found_B.dtype == torch.float32
    assert found_B.item() == 1 - 2.0**-12


def test_moments_are_float64_whatever_comes_in() -> None:
    moments = RunningMoments()
    values_B: Tensor = torch.tensor([1.0, 1 + 2.0**-7], dtype=torch.bfloat16, requires_grad=True)
    moments.update(values_B)
    assert moments.mean == 1 + 2.0**-8
    assert moments.squares == 2.0**-15  # 2 (2^-8)^2


def test_moments_state_survives_json_and_goes_on_to_the_last_bit() -> None:
    first, second = RunningMoments(), RunningMoments()
    first.update(torch.tensor([0.1, 0.7, -3.3]))
    second.load(json.loads(json.dumps(first.state())))
    assert second == first
    for moments in (first, second):
        moments.update(torch.tensor([2.2]))
    assert second == first


@pytest.mark.parametrize("state", [{}, {"count": 1, "mean": 2.0}, {"count": 1.5, "mean": 2.0, "squares": 0.0}])
def test_moments_a_broken_state_is_refused(state: dict[str, float]) -> None:
    moments = RunningMoments(count=2, mean=3.0, squares=8.0)
    with pytest.raises(CheckpointError) as error:
        moments.load(state)
    assert str(error.value) == f"running moments: found {state}, expected count, mean and squares"
    assert moments == RunningMoments(count=2, mean=3.0, squares=8.0)
