"""Several sources into one score: by hand, in any order of members, and with sources that failed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kedge.algorithms import ensemble_mean, gated, uncertainty_weighted, weighted_sum_of, worst_case
from kedge.core.errors import ShapeError

NAN = math.nan

# Answer 0: 1, 2, 6: mean 3, variance 14/3. Answer 1: 5, 5, 5. Answer 2: the second source failed.
SCORES_KB = torch.tensor([[1.0, 5.0, 2.0], [2.0, 5.0, NAN], [6.0, 5.0, 4.0]])


def check(found_B: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found_B, torch.tensor(expected), equal_nan=True)


def test_ensembles() -> None:
    check(ensemble_mean(SCORES_KB), [3.0, 5.0, NAN])
    check(worst_case(SCORES_KB), [1.0, 5.0, NAN])
    check(uncertainty_weighted(SCORES_KB, coef=0.5), [3 - 7 / 3, 5.0, NAN])
    check(uncertainty_weighted(SCORES_KB, coef=0.0), [3.0, 5.0, NAN])


def test_weighted_sum() -> None:
    check(weighted_sum_of(SCORES_KB, torch.tensor([2.0, -1.0, 0.5])), [2 - 2 + 3, 10 - 5 + 2.5, NAN])
    check(weighted_sum_of(SCORES_KB, torch.tensor([1.0, 0.0, 0.0])), [1.0, 5.0, NAN])


@pytest.mark.parametrize("weights_K", [torch.ones(1), torch.ones(2), torch.ones(3, 1)])
def test_weights_that_do_not_fit_are_refused(weights_K: Tensor) -> None:
    with pytest.raises(ShapeError) as error:
        weighted_sum_of(SCORES_KB, weights_K)
    assert str(error.value) == f"weights_K has shape {tuple(weights_K.shape)}, expected (3,)"


@given(seed=st.integers(0, 2**32), members=st.integers(1, 5), coef=st.floats(0, 3))
@settings(max_examples=40)
def test_order_of_members_and_bounds(seed: int, members: int, coef: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    scores_KB = torch.randn(members, 4, generator=rng, dtype=torch.float64)
    order = torch.randperm(members, generator=rng)
    mean_B, worst_B = ensemble_mean(scores_KB), worst_case(scores_KB)
    careful_B = uncertainty_weighted(scores_KB, coef=coef)
    torch.testing.assert_close(ensemble_mean(scores_KB[order]), mean_B)
    torch.testing.assert_close(worst_case(scores_KB[order]), worst_B)
    torch.testing.assert_close(uncertainty_weighted(scores_KB[order], coef=coef), careful_B)
    torch.testing.assert_close(weighted_sum_of(scores_KB, torch.full((members,), 1 / members).double()), mean_B)
    assert (worst_B <= mean_B + 1e-12).all()
    assert (careful_B <= mean_B + 1e-12).all()
    if members == 1:
        assert torch.equal(careful_B, scores_KB[0])


@pytest.mark.parametrize(
    "function",
    [
        ensemble_mean,
        worst_case,
        lambda scores_KB: uncertainty_weighted(scores_KB, coef=1.0),
        lambda scores_KB: weighted_sum_of(scores_KB, torch.tensor([0.5, 0.5]).bfloat16()),
        lambda scores_KB: gated(scores_KB[0], scores_KB[1], threshold=2.0),
    ],
)
def test_low_precision_is_widened(function: Callable[[Tensor], Tensor]) -> None:
    # the variance of two scores 2^-6 apart is 2^-14: nothing of it would be left of 1 in bfloat16
    scores_KB = torch.tensor([[1.0], [1 + 2.0**-6]], dtype=torch.bfloat16)
    found_B = function(scores_KB)
    assert found_B.dtype == torch.float32
    assert function(scores_KB.double()).dtype == torch.float64
    torch.testing.assert_close(found_B.double(), function(scores_KB.double()), rtol=1e-7, atol=0)


def test_gate() -> None:
    helpful_B = torch.tensor([0.9, 0.8, 0.7, NAN, 0.5, NAN])
    safe_B = torch.tensor([0.1, 0.25, 0.4, 0.2, NAN, 0.6])
    # below: safety; at the threshold: passes; above: passes; below, so a failed first source is not read; NaN gate;
    # passes on to a source that failed
    check(gated(helpful_B, safe_B, threshold=0.25), [0.1, 0.8, 0.7, 0.2, NAN, NAN])


def test_risky_prompts_go_by_safety_alone() -> None:
    helpful_B, safe_B = torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([0.1, 0.5, 0.4, NAN])
    is_risky_B = torch.tensor([False, True, False, True])
    check(gated(helpful_B, safe_B, threshold=0.25, is_risky_B=is_risky_B), [0.1, 0.5, 0.7, NAN])
