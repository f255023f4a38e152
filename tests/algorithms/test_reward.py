"""Reward-model losses by hand, on paper-sized rankings, with ties, absent answers and garbage in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kedge.algorithms.reward import all_pairs, bradley_terry, plackett_luce

RankingLoss = Callable[[Tensor, Tensor], Tensor]


def nls(x: float) -> float:
    """-log sigmoid"""
    return math.log(1 + math.exp(-x))


def f64(rows: list[list[float]] | list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# --- pairs -------------------------------------------------------------------


def test_bradley_terry_by_hand() -> None:
    loss_B = bradley_terry(f64([1.5, -0.2]), f64([0.3, 0.9]))
    assert loss_B.tolist() == pytest.approx([nls(1.2), nls(-1.1)], rel=1e-12)


def test_margin_and_centre_by_hand() -> None:
    # gaps 1.2 - 0.5 and -1.1 - 2; sums 1.8 and 0.7
    loss_B = bradley_terry(f64([1.5, -0.2]), f64([0.3, 0.9]), margin_B=f64([0.5, 2.0]), centre=0.1)
    assert loss_B.tolist() == pytest.approx([nls(0.7) + 0.1 * 3.24, nls(-3.1) + 0.1 * 0.49], rel=1e-12)


@given(chosen=st.floats(-30, 30), rejected=st.floats(-30, 30), shift=st.floats(-5, 5))
def test_pairs_fix_scores_up_to_a_constant(chosen: float, rejected: float, shift: float) -> None:
    loss_B = bradley_terry(f64([chosen, rejected]), f64([rejected, chosen]))
    torch.testing.assert_close(bradley_terry(f64([chosen + shift]), f64([rejected + shift])), loss_B[:1])
    torch.testing.assert_close(loss_B[1] - loss_B[0], f64([chosen])[0] - rejected)  # log σ(x) - log σ(-x) = x


@given(gap=st.floats(-30, 30), step=st.floats(0.1, 5))
def test_a_margin_raises_the_loss_and_a_gap_lowers_it(gap: float, step: float) -> None:
    zero_B = f64([0.0])
    plain_B = bradley_terry(f64([gap]), zero_B)
    assert bradley_terry(f64([gap]), zero_B, margin_B=f64([step])) > plain_B
    assert bradley_terry(f64([gap + step]), zero_B) < plain_B


def test_certainty_by_hand() -> None:
    # gaps 1.2 and -1.1, margins 0.5 and 2
    chosen_B, rejected_B, margin_B = f64([1.5, -0.2]), f64([0.3, 0.9]), f64([0.5, 2.0])
    loss_B = bradley_terry(chosen_B, rejected_B, margin_B=margin_B, certainty_B=f64([0.75, 0.1]))
    expected = [0.75 * nls(0.7) + 0.25 * nls(-1.7), 0.1 * nls(-3.1) + 0.9 * nls(-0.9)]
    assert loss_B.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_full_certainty_is_the_plain_loss_to_the_last_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    chosen_B, rejected_B, margin_B = (30 * torch.randn(3, 500, generator=generator, dtype=torch.float64)).to(dtype)
    leaves = [x.clone().requires_grad_() for x in (chosen_B, rejected_B, chosen_B, rejected_B)]
    plain_B = bradley_terry(leaves[0], leaves[1], margin_B=margin_B, centre=0.01)
    soft_B = bradley_terry(leaves[2], leaves[3], margin_B=margin_B, certainty_B=torch.ones_like(margin_B), centre=0.01)
    plain_B.sum().backward()
    soft_B.sum().backward()
    assert torch.equal(plain_B, soft_B)
    for plain, soft in zip(leaves[:2], leaves[2:], strict=True):
        assert plain.grad is not None
        assert soft.grad is not None
        assert torch.equal(plain.grad, soft.grad)


@given(gap=st.floats(-30, 30), certainty=st.floats(0, 1), margin=st.floats(-2, 2))
def test_certainty_of_the_one_is_doubt_of_the_other(gap: float, certainty: float, margin: float) -> None:
    zero_B, margin_B = f64([0.0]), f64([margin])
    loss_B = bradley_terry(f64([gap]), zero_B, margin_B=margin_B, certainty_B=f64([certainty]))
    turned_B = bradley_terry(zero_B, f64([gap]), margin_B=margin_B, certainty_B=f64([1 - certainty]))
    torch.testing.assert_close(loss_B, turned_B, rtol=1e-9, atol=1e-9)


@given(certainty=st.floats(0.02, 0.98))
def test_a_certain_pair_is_best_at_its_log_odds(certainty: float) -> None:
    """Without a margin the loss is smallest where σ(gap) is the certainty: a soft label is not pushed to infinity."""
    gap_B = f64([math.log(certainty / (1 - certainty))]).requires_grad_()
    bradley_terry(gap_B, f64([0.0]), certainty_B=f64([certainty])).sum().backward()
    assert gap_B.grad is not None
    assert gap_B.grad.item() == pytest.approx(0.0, abs=1e-12)


# --- rankings ----------------------------------------------------------------

SCORES = [[0.5, -1.0, 2.0, 0.1]]


def test_plackett_luce_by_hand() -> None:
    # order: item 2, item 0, item 3, item 1
    e = [math.exp(x) for x in SCORES[0]]
    expected = -math.log(e[2] / sum(e)) - math.log(e[0] / (e[0] + e[1] + e[3])) - math.log(e[3] / (e[1] + e[3]))
    assert plackett_luce(f64(SCORES), torch.tensor([[2, 4, 1, 3]])).item() == pytest.approx(expected, rel=1e-12)


def test_plackett_luce_sums_to_one_over_all_orders() -> None:
    orders = torch.tensor(list(permutations([1, 2, 3, 4])))
    likelihood = (-plackett_luce(f64(SCORES).expand(len(orders), 4), orders)).exp()
    assert likelihood.sum().item() == pytest.approx(1, rel=1e-12)


def test_breslow_ties_by_hand() -> None:
    # item 2 first, then items 0 and 3 together, then item 1: both tied are chosen from {0, 1, 3}
    e = [math.exp(x) for x in SCORES[0]]
    left = e[0] + e[1] + e[3]
    expected = -math.log(e[2] / sum(e)) - math.log(e[0] / left) - math.log(e[3] / left)
    assert plackett_luce(f64(SCORES), torch.tensor([[2, 3, 1, 2]])).item() == pytest.approx(expected, rel=1e-12)


def test_all_pairs_by_hand() -> None:
    # better - worse: (2,0) 1.5, (2,3) 1.9, (2,1) 3.0, (0,3) 0.4, (0,1) 1.5, (3,1) 1.1
    expected = sum(nls(x) for x in (1.5, 1.9, 3.0, 0.4, 1.5, 1.1)) / 6
    assert all_pairs(f64(SCORES), torch.tensor([[2, 4, 1, 3]])).item() == pytest.approx(expected, rel=1e-12)


def test_all_pairs_leaves_ties_out() -> None:
    # item 2 best, items 0 and 3 tied, item 1 last: five pairs
    expected = sum(nls(x) for x in (1.5, 1.9, 3.0, 1.5, 1.1)) / 5
    assert all_pairs(f64(SCORES), torch.tensor([[2, 3, 1, 2]])).item() == pytest.approx(expected, rel=1e-12)


def test_rows_without_a_pair() -> None:
    ranks = torch.tensor([[1, 1, 1], [0, 0, 1], [0, 0, 0]])
    scores = f64([[0.3, -2.0, 1.0]] * 3).requires_grad_()
    for loss in (all_pairs, plackett_luce):
        loss_B = loss(scores, ranks)
        everyone = 3 * math.log(math.exp(0.3) + math.exp(-2.0) + math.exp(1.0)) - (0.3 - 2.0 + 1.0)
        assert loss_B.tolist() == pytest.approx([everyone if loss is plackett_luce else 0, 0, 0], rel=1e-12)
        (grad_BK,) = torch.autograd.grad(loss_B[1:].sum(), scores)
        assert grad_BK.tolist() == [[0.0] * 3] * 3


@pytest.mark.parametrize("loss", [plackett_luce, all_pairs])
@pytest.mark.parametrize("rank", [[1, 2], [2, 1]])
def test_two_answers_are_bradley_terry(loss: RankingLoss, rank: list[int]) -> None:
    scores = [0.7, -0.4]
    chosen, rejected = scores[rank.index(1)], scores[rank.index(2)]
    assert loss(f64([scores]), torch.tensor([rank])).item() == pytest.approx(nls(chosen - rejected), rel=1e-12)


@pytest.mark.parametrize("loss", [plackett_luce, all_pairs])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_absent_answers_change_neither_value_nor_gradient(loss: RankingLoss, garbage: float) -> None:
    clean = f64([[0.5, 2.0, -1.0]]).requires_grad_()
    padded = f64([[0.5, garbage, 2.0, -1.0, garbage]]).requires_grad_()
    clean_B, padded_B = loss(clean, torch.tensor([[2, 3, 1]])), loss(padded, torch.tensor([[2, 0, 3, 1, 0]]))
    assert padded_B.item() == pytest.approx(clean_B.item(), rel=1e-12)
    (clean_BK,), (padded_BK,) = torch.autograd.grad(clean_B, clean), torch.autograd.grad(padded_B, padded)
    torch.testing.assert_close(padded_BK[:, [0, 2, 3]], clean_BK)
    assert padded_BK[:, [1, 4]].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("loss", [plackett_luce, all_pairs])
@given(data=st.data())
def test_order_of_answers_and_gaps_in_ranks_do_not_matter(loss: RankingLoss, data: st.DataObject) -> None:
    scores = data.draw(st.lists(st.floats(-9, 9), min_size=3, max_size=5))
    ranks = data.draw(st.lists(st.integers(0, 4), min_size=len(scores), max_size=len(scores)))
    order = data.draw(st.permutations(range(len(scores))))
    loss_B = loss(f64([scores]), torch.tensor([ranks]))
    moved_B = loss(f64([[scores[i] for i in order]]), torch.tensor([[7 * ranks[i] for i in order]]))
    torch.testing.assert_close(moved_B, loss_B)
    shifted_B = loss(f64([scores]) + 3, torch.tensor([ranks]))
    torch.testing.assert_close(shifted_B, loss_B)


@pytest.mark.parametrize("loss", [plackett_luce, all_pairs])
def test_rows_are_independent(loss: RankingLoss) -> None:
    scores, ranks = f64([[0.5, -1.0, 2.0], [3.0, 0.2, 0.1]]), torch.tensor([[1, 2, 3], [3, 0, 1]])
    rows = [loss(scores[i : i + 1], ranks[i : i + 1]).item() for i in range(2)]
    assert loss(scores, ranks).tolist() == pytest.approx(rows, rel=1e-12)


# --- numerics ----------------------------------------------------------------

RANKS = torch.tensor([[2, 4, 1, 3], [1, 1, 2, 0], [3, 1, 1, 2]])


def losses_of(scores_BK: Tensor) -> dict[str, Tensor]:
    chosen_B, rejected_B = scores_BK[:, 0], scores_BK[:, 1]
    margin_B = torch.tensor([0.5, 0.0, 2.0], dtype=scores_BK.dtype)
    return {
        "bradley_terry": bradley_terry(chosen_B, rejected_B, margin_B=margin_B, centre=0.01),
        "plackett_luce": plackett_luce(scores_BK, RANKS),
        "all_pairs": all_pairs(scores_BK, RANKS),
    }


EVERY_LOSS = ("bradley_terry", "plackett_luce", "all_pairs")


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    scores_BK = torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda scores: losses_of(scores)[name], scores_BK)


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_extreme_scores_give_finite_losses_and_gradients(name: str) -> None:
    scores_BK = torch.tensor([[1e4, -1e4, 0.0, 1e4]] * 3, requires_grad=True)
    loss_B = losses_of(scores_BK)[name]
    assert loss_B.isfinite().all()
    (grad_BK,) = torch.autograd.grad(loss_B.sum(), scores_BK)
    assert grad_BK.isfinite().all()


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_float32_agrees_with_float64_and_bfloat16_is_widened(name: str) -> None:
    scores_BK = torch.tensor([[0.5, -1.25, 3.0, 8.0], [-4.0, 2.5, 0.125, 1.0], [9.0, 7.0, -6.0, 0.75]])
    narrow_B = losses_of(scores_BK)[name]
    assert narrow_B.dtype == torch.float32
    torch.testing.assert_close(narrow_B.double(), losses_of(scores_BK.double())[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses_of(scores_BK.bfloat16())[name], narrow_B)
