"""PPO's rewards and losses: every branch of the clip worked out by hand, every position checked."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kedge.algorithms import policy_loss, shape_rewards, value_loss
from kedge.core.errors import ConfigError
from kedge.core.loss import ItemLoss

NAN = math.nan

seeds = st.integers(0, 2**32)


def at_ratio(*ratios: float) -> tuple[Tensor, Tensor]:
    """New and old log-probs with these ratios, and old ones that are not 0."""
    old_logp_BT = torch.linspace(-1, -3, len(ratios), dtype=torch.float64)[None]
    return old_logp_BT + torch.tensor([ratios], dtype=torch.float64).log(), old_logp_BT


def values_of(item: ItemLoss, name: str) -> list[float]:
    return item.stats_BT[name][0].tolist()


def close(found_BT: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found_BT[0], torch.tensor(expected, dtype=found_BT.dtype), rtol=1e-6, atol=1e-9)


def test_shape_rewards_golden() -> None:
    kl_BT = torch.tensor([[NAN, 1.0, -2.0, 4.0, NAN], [3.0, NAN, 5.0, NAN, NAN], [NAN] * 5])
    mask_BT = torch.tensor([[0, 1, 1, 1, 0], [1, 0, 1, 0, 0], [0] * 5]).bool()
    found_BT = shape_rewards(torch.tensor([10.0, -7.0, 99.0]), kl_BT, mask_BT, coef=0.5)
    assert found_BT.tolist() == [[0, -0.5, 1, 8, 0], [-1.5, 0, -9.5, 0, 0], [0] * 5]


def test_shape_rewards_last_column_may_be_a_response_token() -> None:
    found_BT = shape_rewards(torch.tensor([3.0]), torch.tensor([[1.0, 1.0]]), torch.ones(1, 2).bool(), coef=2.0)
    assert found_BT.tolist() == [[-2.0, 1.0]]


def test_shape_rewards_a_failed_score_of_an_empty_row_is_not_read() -> None:
    mask_BT = torch.zeros(1, 2).bool()
    assert shape_rewards(torch.tensor([NAN]), torch.zeros(1, 2), mask_BT, coef=0.1).tolist() == [[0.0, 0.0]]


@given(seed=seeds, coef=st.floats(0, 2))
@settings(max_examples=40)
def test_shape_rewards_a_row_sums_to_its_score_minus_its_kl(seed: int, coef: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    kl_BT, scores_B = torch.randn(3, 5, generator=rng).double(), torch.randn(3, generator=rng).double()
    mask_BT = torch.rand(3, 5, generator=rng) < 0.6
    mask_BT[:, 2] = True
    found_BT = shape_rewards(scores_B, kl_BT.masked_fill(~mask_BT, NAN), mask_BT, coef=coef)
    expected_B = scores_B - coef * (kl_BT * mask_BT).sum(dim=1)
    torch.testing.assert_close(found_BT.sum(dim=1), expected_B)
    assert (found_BT[~mask_BT] == 0).all()
    assert found_BT.dtype == torch.float64


def test_shape_rewards_bfloat16_gives_float32() -> None:
    kl_BT = torch.tensor([[2.0**-12]], dtype=torch.bfloat16)
    found_BT = shape_rewards(torch.ones(1, dtype=torch.bfloat16), kl_BT, torch.ones(1, 1).bool(), coef=1.0)
    assert found_BT.dtype == torch.float32
    assert found_BT.tolist() == [[1 - 2.0**-12]]


# ratio, advantage, loss and 1 where the clip is active, for clip 0.2 and clip_high 0.3
POLICY_CASES = (
    (1.0, 2.0, -2.0, 0),  # nothing moved
    (1.25, 2.0, -2.5, 0),  # within
    (1.4, 2.0, -2.6, 1),  # 1.3 * 2: no more gain for going further
    (0.9, 2.0, -1.8, 0),
    (0.5, 2.0, -1.0, 0),  # below, but the advantage pulls it back: free
    (0.5, -3.0, 2.4, 1),  # 0.8 * 3: no more gain for going further down
    (0.9, -3.0, 2.7, 0),
    (1.4, -3.0, 4.2, 0),  # above, but the advantage pulls it back: free
    (5.0, -3.0, 15.0, 0),
    (1.4, 0.0, 0.0, 0),
)


def test_policy_loss_golden() -> None:
    ratios, advantages, losses, clipped = zip(*POLICY_CASES, strict=True)
    logp_BT, old_logp_BT = at_ratio(*ratios)
    item = policy_loss(logp_BT, old_logp_BT, torch.tensor([advantages]).double(), clip=0.2, clip_high=0.3)
    close(item.loss_BT, list(losses))
    assert values_of(item, "clip_fraction") == list(clipped)
    close(item.stats_BT["ratio"], list(ratios))
    close(item.stats_BT["approx_kl"], [ratio - 1 - math.log(ratio) for ratio in ratios])
    assert set(item.stats_BT) == {"ratio", "clip_fraction", "approx_kl"}


def test_policy_loss_the_upper_clip_is_the_lower_one_when_not_given() -> None:
    logp_BT, old_logp_BT = at_ratio(1.4, 0.5)
    item = policy_loss(logp_BT, old_logp_BT, torch.tensor([[2.0, -2.0]]).double(), clip=0.25)
    close(item.loss_BT, [-2.5, 1.5])


def test_policy_loss_an_upper_clip_of_zero_is_not_none() -> None:
    logp_BT, old_logp_BT = at_ratio(1.4)
    close(policy_loss(logp_BT, old_logp_BT, torch.tensor([[2.0]]), clip=0.2, clip_high=0.0).loss_BT, [-2.0])


def test_policy_loss_dual_clip_golden() -> None:
    # c = 3: where A < 0 the loss is at most 3 |A|
    logp_BT, old_logp_BT = at_ratio(5.0, 2.5, 0.5, 5.0, 5.0)
    advantages_BT = torch.tensor([[-2.0, -2.0, -2.0, 2.0, 0.0]]).double()
    item = policy_loss(logp_BT, old_logp_BT, advantages_BT, clip=0.2, dual_clip=3.0)
    close(item.loss_BT, [6.0, 5.0, 1.6, -2.4, 0.0])
    assert values_of(item, "clip_fraction") == [1, 0, 1, 1, 0]


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, -2.0])
def test_policy_loss_a_dual_clip_of_one_or_less_is_refused(dual_clip: float) -> None:
    with pytest.raises(ConfigError) as error:
        policy_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), clip=0.2, dual_clip=dual_clip)
    assert str(error.value) == (
        f"dual_clip: found {dual_clip}, expected more than 1 (3 is usual), or None for no bound"
    )


def test_policy_loss_negative_clips_are_refused() -> None:
    zero_BT = torch.zeros(1, 1)
    with pytest.raises(ConfigError) as error:
        policy_loss(zero_BT, zero_BT, zero_BT, clip=-0.1)
    assert str(error.value) == "clip: found -0.1, expected 0 or more"
    with pytest.raises(ConfigError) as error:
        policy_loss(zero_BT, zero_BT, zero_BT, clip=0.1, clip_high=-0.2)
    assert str(error.value) == "clip_high: found -0.2, expected 0 or more"


def test_policy_loss_gradient_of_every_branch() -> None:
    # d loss / d logp = -ratio A where free, 0 where a clip is active
    logp_BT, old_logp_BT = at_ratio(1.1, 1.4, 0.5, 0.5, 1.4, 5.0)
    advantages_BT = torch.tensor([[2.0, 2.0, 2.0, -3.0, -3.0, -3.0]]).double()
    logp_BT.requires_grad_()
    item = policy_loss(logp_BT, old_logp_BT, advantages_BT, clip=0.2, dual_clip=3.0)
    item.loss_BT.sum().backward()
    assert logp_BT.grad is not None
    close(logp_BT.grad, [-2.2, 0.0, -1.0, 0.0, 4.2, 0.0])
    assert torch.autograd.gradcheck(
        lambda p: policy_loss(p, old_logp_BT, advantages_BT, clip=0.2, dual_clip=3.0).loss_BT, logp_BT
    )


def test_policy_loss_facts_carry_no_gradient() -> None:
    logp_BT, old_logp_BT = at_ratio(1.1)
    item = policy_loss(logp_BT.requires_grad_(), old_logp_BT, torch.ones(1, 1), clip=0.2)
    assert item.loss_BT.requires_grad
    assert not any(stat_BT.requires_grad for stat_BT in item.stats_BT.values())


@given(seed=seeds, clip=st.floats(0.01, 0.9), extra=st.floats(0, 2))
@settings(max_examples=60)
def test_policy_loss_a_clip_only_lowers_the_gain_and_a_wider_one_lowers_it_less(
    seed: int, clip: float, extra: float
) -> None:
    rng = torch.Generator().manual_seed(seed)
    logp_BT, old_logp_BT, advantages_BT = torch.randn(3, 2, 6, generator=rng, dtype=torch.float64)
    tight_BT = policy_loss(logp_BT, old_logp_BT, advantages_BT, clip=clip).loss_BT
    wide_BT = policy_loss(logp_BT, old_logp_BT, advantages_BT, clip=clip, clip_high=clip + extra).loss_BT
    free_BT = -(logp_BT - old_logp_BT).exp() * advantages_BT
    assert (tight_BT >= wide_BT).all()
    assert (wide_BT >= free_BT).all()
    torch.testing.assert_close(
        policy_loss(logp_BT, old_logp_BT, advantages_BT, clip=1.0, clip_high=math.inf).loss_BT, free_BT
    )


@given(seed=seeds, weight=st.floats(0.1, 10))
@settings(max_examples=30)
def test_policy_loss_proportional_to_positive_weights(seed: int, weight: float) -> None:
    logp_BT, old_logp_BT, advantages_BT = torch.randn(
        3, 2, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    plain, weighted = (
        policy_loss(logp_BT, old_logp_BT, advantages_BT * factor, clip=0.2, dual_clip=1.5) for factor in (1.0, weight)
    )
    torch.testing.assert_close(weighted.loss_BT, plain.loss_BT * weight)


def test_policy_loss_low_precision_is_widened_before_the_difference() -> None:
    # -1 + 2^-7 against -1 - 2^-7: the difference 2^-6 is exact; the ratio is not a bfloat16 number
    logp_BT = torch.tensor([[-1 + 2.0**-8]], dtype=torch.bfloat16)
    old_logp_BT = torch.tensor([[-1 - 2.0**-7]], dtype=torch.bfloat16)
    item = policy_loss(logp_BT, old_logp_BT, torch.ones(1, 1), clip=0.2)
    assert item.loss_BT.dtype == torch.float32
    assert item.loss_BT.item() == pytest.approx(-math.exp(2.0**-8 + 2.0**-7), rel=1e-6)
    assert {stat_BT.dtype for stat_BT in item.stats_BT.values()} == {torch.float32}


# value, old value, return, loss without clip, loss with clip 0.5, 1 where the clip is active
VALUE_CASES = (
    (2.0, 0.0, 4.0, 2.0, 6.125, 1),  # clipped to 0.5: 3.5^2 / 2
    (0.25, 0.0, 4.0, 7.03125, 7.03125, 0),  # within
    (2.0, 0.0, 0.5, 1.125, 1.125, 0),  # clipped onto the return: the free error is the larger
    (-2.0, 0.0, -3.0, 0.5, 3.125, 1),  # clipped to -0.5
    (3.0, 2.5, 1.0, 2.0, 2.0, 0),  # exactly at the bound
)


def test_value_loss_golden() -> None:
    values, old, returns, free, clipped, active = (torch.tensor([column]) for column in zip(*VALUE_CASES, strict=True))
    plain = value_loss(values, old, returns)
    assert plain.loss_BT.tolist() == free.tolist()
    assert plain.stats_BT["clip_fraction"].tolist() == [[0.0] * 5]
    item = value_loss(values, old, returns, clip=0.5)
    assert item.loss_BT.tolist() == clipped.tolist()
    assert item.stats_BT["clip_fraction"].tolist() == active.float().tolist()
    assert set(item.stats_BT) == {"clip_fraction"}


def test_value_loss_gradient_of_every_branch() -> None:
    values, old, returns, *_ = (torch.tensor([column]).double() for column in zip(*VALUE_CASES[:4], strict=True))
    values.requires_grad_()
    item = value_loss(values, old, returns, clip=0.5)
    item.loss_BT.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[0.0, 0.25 - 4.0, 2.0 - 0.5, 0.0]]  # v - R where free, 0 where clipped
    assert not item.stats_BT["clip_fraction"].requires_grad
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, clip=0.5).loss_BT, values)


@given(seed=seeds, clip=st.floats(0, 2))
@settings(max_examples=40)
def test_value_loss_a_clip_only_raises_the_loss(seed: int, clip: float) -> None:
    values, old, returns = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    free_BT = value_loss(values, old, returns).loss_BT
    assert (value_loss(values, old, returns, clip=clip).loss_BT >= free_BT).all()
    torch.testing.assert_close(value_loss(values, old, returns, clip=math.inf).loss_BT, free_BT)
    torch.testing.assert_close(free_BT, (values - returns).square() / 2)


def test_value_loss_a_clip_of_zero_holds_the_old_value() -> None:
    one_BT = torch.ones(1, 1)
    assert value_loss(one_BT * 2, one_BT, one_BT * 4, clip=0.0).loss_BT.item() == 4.5
    with pytest.raises(ConfigError) as error:
        value_loss(one_BT, one_BT, one_BT, clip=-1.0)
    assert str(error.value) == "clip: found -1.0, expected 0 or more"


def test_value_loss_low_precision_is_widened_before_the_difference() -> None:
    low = [torch.tensor([[x]], dtype=torch.bfloat16) for x in (1.0, 1.0, 2.0**-12)]
    for clip in (None, 0.5):
        found_BT = value_loss(*low, clip=clip).loss_BT
        assert found_BT.dtype == torch.float32
        assert found_BT.item() == pytest.approx((1 - 2.0**-12) ** 2 / 2, rel=1e-7)
    moved = value_loss(torch.tensor([[3.0]]).bfloat16(), torch.tensor([[2.0**-12]]).bfloat16(), low[2], clip=4.0)
    assert moved.loss_BT.item() == pytest.approx((3 - 2.0**-12) ** 2 / 2, rel=1e-7)
