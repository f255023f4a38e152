"""GSPO, CISPO, REINFORCE, and weights for rollouts that other weights sampled, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kedge.algorithms import (
    cispo_loss,
    gspo_loss,
    mean_ratio,
    reinforce_loss,
    sequence_importance,
    truncated_importance,
)
from kedge.core.errors import ConfigError
from kedge.core.loss import mean

NAN, INF = math.nan, math.inf

seeds = st.integers(0, 2**32)


def double(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# Mean log-ratios: row 0 (ln 2 + ln 8) / 2 = ln 4; row 1 ln 1/2 over one token; row 2 ln 1.1; row 3 has no token.
LOG_RATIO = double(
    [
        [math.log(2), NAN, math.log(8)],
        [INF, math.log(1 / 2), NAN],
        [math.log(1.1), math.log(1.1), math.log(1.1)],
        [NAN, NAN, NAN],
    ]
)
MASK_BT = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 0, 0]]).bool()
OLD_BT = double([[-1, -2, -3], [-4, -5, -6], [-0.5, -1.5, -2.5], [-1, -1, -1]])
ADVANTAGES_BT = double([[2, NAN, 2], [NAN, -3, NAN], [5, 5, 5], [NAN, NAN, NAN]])


def test_gspo_golden() -> None:
    item = gspo_loss(OLD_BT + LOG_RATIO, OLD_BT, ADVANTAGES_BT, MASK_BT, clip=0.25, clip_high=0.5)
    # Row 0: 4 clipped to 1.5, times 2. Row 1: 1/2 clipped to 3/4, times -3. Row 2: 1.1 * 5 is free.
    torch.testing.assert_close(item.loss_BT, double([[-3, 0, -3], [0, 2.25, 0], [-5.5, -5.5, -5.5], [0, 0, 0]]))
    torch.testing.assert_close(item.stats_BT["ratio"], double([[4.0] * 3, [0.5] * 3, [1.1] * 3, [1.0] * 3]))
    assert item.stats_BT["clip_fraction"].tolist() == [[1, 0, 1], [0, 1, 0], [0, 0, 0], [0, 0, 0]]
    one_step = 1.1 - 1 - math.log(1.1)
    torch.testing.assert_close(
        item.stats_BT["approx_kl"],
        double(
            [
                [2 - 1 - math.log(2), 0, 8 - 1 - math.log(8)],
                [0, 0.5 - 1 + math.log(2), 0],
                [one_step] * 3,
                [0, 0, 0],
            ]
        ),
    )
    assert set(item.stats_BT) == {"ratio", "clip_fraction", "approx_kl"}


def test_gspo_per_sequence_it_is_the_objective_of_the_paper() -> None:
    item = gspo_loss(OLD_BT + LOG_RATIO, OLD_BT, ADVANTAGES_BT, MASK_BT, clip=0.25)
    # the upper clip is the lower one: min(4, 1.25) * 2, 3/4 * -3, 1.1 * 5; mean over the three rows that count
    expected = -(2.5 - 2.25 + 5.5) / 3
    assert mean(item, MASK_BT, per="sequence").item() == pytest.approx(expected)


def test_gspo_gradient_reaches_every_token_through_the_ratio() -> None:
    logp_BT = (OLD_BT + LOG_RATIO).requires_grad_()
    item = gspo_loss(logp_BT, OLD_BT, ADVANTAGES_BT, MASK_BT, clip=0.2)
    mean(item, MASK_BT, per="sequence").backward()
    assert logp_BT.grad is not None
    # rows 0 and 1 are clipped; row 2: -s A / |y| / 3 rows = -1.1 * 5 / 3 / 3
    torch.testing.assert_close(logp_BT.grad, double([[0] * 3, [0] * 3, [-5.5 / 9] * 3, [0] * 3]))
    assert not any(stat_BT.requires_grad for stat_BT in item.stats_BT.values())


@given(seed=seeds)
@settings(max_examples=25)
def test_gspo_one_token_a_row_is_ppo_on_that_token(seed: int) -> None:
    logp_BT, old_BT, advantages_BT = torch.randn(
        3, 4, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    item = gspo_loss(logp_BT, old_BT, advantages_BT, torch.ones(4, 1).bool(), clip=0.2, clip_high=0.3)
    for row in range(4):
        ratio, advantage = math.exp((logp_BT - old_BT)[row].item()), advantages_BT[row].item()
        gain = min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
        assert item.loss_BT[row].item() == pytest.approx(-gain)


@given(seed=seeds)
@settings(max_examples=25)
def test_gspo_padding_changes_nothing(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logp_BT, old_BT, advantages_BT = torch.randn(3, 2, 4, generator=rng, dtype=torch.float64)
    mask_BT = torch.rand(2, 4, generator=rng) < 0.7

    def pad(x_BT: Tensor, value: float = NAN) -> Tensor:
        return torch.nn.functional.pad(x_BT, (2, 3), value=value)

    plain = gspo_loss(logp_BT, old_BT, advantages_BT, mask_BT, clip=0.5)
    padded = gspo_loss(pad(logp_BT), pad(old_BT), pad(advantages_BT), pad(mask_BT, 0), clip=0.5)
    torch.testing.assert_close(padded.loss_BT[:, 2:-3], plain.loss_BT)
    assert (padded.loss_BT[:, :2] == 0).all()


def test_gspo_gradcheck() -> None:
    rng = torch.Generator().manual_seed(1)
    logp_BT, old_BT, advantages_BT = torch.randn(3, 3, 4, generator=rng, dtype=torch.float64) / 4
    mask_BT = torch.rand(3, 4, generator=rng) < 0.7
    assert torch.autograd.gradcheck(
        lambda p: gspo_loss(p, old_BT, advantages_BT, mask_BT, clip=0.1).loss_BT, logp_BT.requires_grad_()
    )


def test_gspo_low_precision_is_widened() -> None:
    logp_BT = torch.tensor([[-1 + 2.0**-8]]).bfloat16()
    old_BT = torch.tensor([[-1 - 2.0**-7]]).bfloat16()
    item = gspo_loss(logp_BT, old_BT, torch.ones(1, 1), torch.ones(1, 1).bool(), clip=0.2)
    assert item.loss_BT.dtype == torch.float32
    assert item.loss_BT.item() == pytest.approx(-math.exp(2.0**-8 + 2.0**-7), rel=1e-6)


def test_gspo_negative_clips_are_refused() -> None:
    zero_BT, mask_BT = torch.zeros(1, 1), torch.ones(1, 1).bool()
    with pytest.raises(ConfigError, match="clip_high: found -1"):
        gspo_loss(zero_BT, zero_BT, zero_BT, mask_BT, clip=0.1, clip_high=-1.0)


def test_cispo_golden() -> None:
    # ratios 2, 0.9, 0.25, 2; clip 0.5 below, 0.6 above: weights 1.6, 0.9, 0.5, 1.6
    old_BT = double([[-2.0, -1.0, -0.5, -3.0]])
    logp_BT = (old_BT + double([[2, 0.9, 0.25, 2]]).log()).requires_grad_()
    advantages_BT = double([[3, 3, -2, -1]])
    item = cispo_loss(logp_BT, old_BT, advantages_BT, clip=0.5, clip_high=0.6)
    p = logp_BT.tolist()[0]
    torch.testing.assert_close(item.loss_BT, double([[-1.6 * 3 * p[0], -0.9 * 3 * p[1], 0.5 * 2 * p[2], 1.6 * p[3]]]))
    torch.testing.assert_close(item.stats_BT["ratio"], double([[2, 0.9, 0.25, 2]]))
    assert item.stats_BT["clip_fraction"].tolist() == [[1, 0, 1, 1]]
    torch.testing.assert_close(item.stats_BT["approx_kl"], double([[r - 1 - math.log(r) for r in (2, 0.9, 0.25, 2)]]))
    assert set(item.stats_BT) == {"ratio", "clip_fraction", "approx_kl"}
    item.loss_BT.sum().backward()
    torch.testing.assert_close(logp_BT.grad, double([[-4.8, -2.7, 1.0, 1.6]]))  # -weight A: no token is dropped
    assert not any(stat_BT.requires_grad for stat_BT in item.stats_BT.values())


def test_cispo_a_clip_of_one_or_more_is_no_lower_bound() -> None:
    logp_BT, old_BT = torch.tensor([[-9.0]]), torch.tensor([[0.0]])
    for clip in (1.0, 10.0):
        item = cispo_loss(logp_BT, old_BT, torch.ones(1, 1), clip=clip, clip_high=5.0)
        assert item.stats_BT["clip_fraction"].item() == 0
        assert item.loss_BT.item() == pytest.approx(9 * math.exp(-9), rel=1e-6)


def test_cispo_low_precision_is_widened() -> None:
    logp_BT, old_BT = torch.tensor([[-1 + 2.0**-8]]).bfloat16(), torch.tensor([[-1 - 2.0**-7]]).bfloat16()
    item = cispo_loss(logp_BT, old_BT, torch.ones(1, 1), clip=0.2, clip_high=0.2)
    assert item.loss_BT.dtype == torch.float32
    expected = math.exp(2.0**-8 + 2.0**-7) * (1 - 2.0**-8)
    assert item.loss_BT.item() == pytest.approx(expected, rel=1e-6)


def test_cispo_negative_clips_are_refused() -> None:
    zero_BT = torch.zeros(1, 1)
    with pytest.raises(ConfigError, match="clip: found -1"):
        cispo_loss(zero_BT, zero_BT, zero_BT, clip=-1.0, clip_high=0.1)


def test_reinforce_golden() -> None:
    logp_BT = torch.tensor([[-0.5, -2.0]], requires_grad=True)
    item = reinforce_loss(logp_BT, torch.tensor([[3.0, -1.5]]))
    assert item.loss_BT.tolist() == [[1.5, -3.0]]
    assert item.stats_BT == {}
    item.loss_BT.sum().backward()
    assert logp_BT.grad is not None
    assert logp_BT.grad.tolist() == [[-3.0, 1.5]]


def test_reinforce_low_precision_is_widened() -> None:
    logp_BT, advantages_BT = torch.tensor([[-(1 + 2.0**-7)]]).bfloat16(), torch.tensor([[1 + 2.0**-7]]).bfloat16()
    loss_BT = reinforce_loss(logp_BT, advantages_BT).loss_BT
    assert loss_BT.dtype == torch.float32
    assert loss_BT.item() == (1 + 2.0**-7) ** 2


def test_truncated_importance_golden() -> None:
    old_BT, behaviour_BT = double([[0.6, 0.2, 0.3]]).log(), double([[0.1, 0.4, 0.2]]).log()
    weights_BT = truncated_importance(old_BT.requires_grad_(), behaviour_BT, cap=2.0)
    torch.testing.assert_close(weights_BT, double([[2.0, 0.5, 1.5]]))
    assert not weights_BT.requires_grad


def test_truncated_importance_weights_below_one_are_not_raised_and_a_low_cap_holds() -> None:
    gap_BT = double([[-5.0, 0.0, 5.0]])
    torch.testing.assert_close(truncated_importance(gap_BT, gap_BT * 0, cap=0.5), double([[math.exp(-5), 0.5, 0.5]]))


def test_truncated_importance_low_precision_is_widened() -> None:
    old_BT, behaviour_BT = torch.tensor([[-1 + 2.0**-8]]).bfloat16(), torch.tensor([[-1 - 2.0**-7]]).bfloat16()
    weights_BT = truncated_importance(old_BT, behaviour_BT, cap=2.0)
    assert weights_BT.dtype == torch.float32
    assert weights_BT.item() == pytest.approx(math.exp(2.0**-8 + 2.0**-7), rel=1e-6)


@pytest.mark.parametrize("cap", [0.0, -1.0])
def test_truncated_importance_a_cap_of_nothing_is_refused(cap: float) -> None:
    with pytest.raises(ConfigError) as error:
        truncated_importance(torch.zeros(1, 1), torch.zeros(1, 1), cap=cap)
    assert str(error.value) == f"cap: found {cap}, expected more than 0 (2 is usual)"


def test_sequence_importance_golden() -> None:
    """Products of ratios: 2 * 8 = 16, capped at 3; 1/2; 1.1 ** 3 = 1.331; none is 1."""
    weights_BT = sequence_importance((OLD_BT + LOG_RATIO).requires_grad_(), OLD_BT, MASK_BT, cap=3.0)
    torch.testing.assert_close(weights_BT, double([[3.0] * 3, [0.5] * 3, [1.331] * 3, [1.0] * 3]))
    assert not weights_BT.requires_grad


def test_mean_ratio_golden() -> None:
    """Geometric means: sqrt(2 * 8) = 4; 1/2 of one token; 1.1; 1 where there is no token."""
    ratio_B = mean_ratio((OLD_BT + LOG_RATIO).requires_grad_(), OLD_BT, MASK_BT)
    torch.testing.assert_close(ratio_B, torch.tensor([4.0, 0.5, 1.1, 1.0], dtype=torch.float64))
    assert not ratio_B.requires_grad


@pytest.mark.parametrize("cap", [0.0, -1.0])
def test_sequence_importance_a_cap_of_nothing_is_refused(cap: float) -> None:
    with pytest.raises(ConfigError, match="cap: found"):
        sequence_importance(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1).bool(), cap=cap)


def test_low_precision_is_widened_before_ratios_are_taken() -> None:
    old_BT, behaviour_BT = torch.tensor([[-1 + 2.0**-8]]).bfloat16(), torch.tensor([[-1 - 2.0**-7]]).bfloat16()
    expected, yes_BT = math.exp(2.0**-8 + 2.0**-7), torch.ones(1, 1).bool()
    assert mean_ratio(old_BT, behaviour_BT, yes_BT).item() == pytest.approx(expected, rel=1e-6)
    weights_BT = sequence_importance(old_BT, behaviour_BT, yes_BT, cap=2.0)
    assert weights_BT.dtype == torch.float32
    assert weights_BT.item() == pytest.approx(expected, rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(seed=seeds, rows=st.integers(1, 4), width=st.integers(1, 6), cap=st.floats(0.1, 10))
def test_weights_of_tokens_and_of_answers(seed: int, rows: int, width: int, cap: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    old_BT, behaviour_BT = torch.randn(2, rows, width, dtype=torch.float64, generator=rng)
    mask_BT = torch.rand(rows, width, generator=rng) < 0.7
    token_BT = truncated_importance(old_BT, behaviour_BT, cap=cap)
    answer_BT = sequence_importance(old_BT, behaviour_BT, mask_BT, cap=cap)
    ratio_B = mean_ratio(old_BT, behaviour_BT, mask_BT)
    for weights_BT in (token_BT, answer_BT):
        assert bool(((weights_BT > 0) & (weights_BT <= cap)).all())
        assert bool(weights_BT.isfinite().all())
    # The weight of an answer is that of its tokens multiplied: the mean ratio to the power of its length.
    length_B = mask_BT.sum(dim=1)
    torch.testing.assert_close(answer_BT[:, 0], (ratio_B**length_B).clamp(max=cap))
    # The other way round every ratio is its inverse, and of the same policy it is 1.
    torch.testing.assert_close(mean_ratio(behaviour_BT, old_BT, mask_BT), 1 / ratio_B)
    torch.testing.assert_close(mean_ratio(old_BT, old_BT, mask_BT), torch.ones_like(ratio_B))


def test_without_a_cap_weights_turn_means_under_the_sampler_into_means_under_the_policy() -> None:
    """Over all tokens, by hand: sum of mu (pi / mu) f = sum of pi f. A cap of 2 takes what is above it."""
    policy_V, sampler_V = double([[0.6, 0.3, 0.1]]), double([[0.2, 0.5, 0.3]])  # ratios 3, 0.6, 1/3
    payoff_V = double([[1.0, 2.0, 5.0]])

    def earned(cap: float) -> float:
        return (sampler_V * truncated_importance(policy_V.log(), sampler_V.log(), cap=cap) * payoff_V).sum().item()

    assert earned(cap=10.0) == pytest.approx(0.6 + 0.6 + 0.5)
    assert earned(cap=2.0) == pytest.approx(0.4 + 0.6 + 0.5)
