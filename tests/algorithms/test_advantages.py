"""Advantages against numbers worked out by hand and a plain float64 double loop."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kedge.algorithms import gae, greedy_baseline, group_centred, leave_one_out, returns_to_go, scale, whiten

NAN, INF = math.nan, math.inf

seeds = st.integers(0, 2**32)
units = st.floats(0, 1)


def batch(seed: int, rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    first_BT, second_BT = torch.randn(2, rows, length, generator=rng, dtype=torch.float64)
    return first_BT, second_BT, torch.rand(rows, length, generator=rng) < 0.6


def garbage(x_BT: Tensor, mask_BT: Tensor, value: float) -> Tensor:
    return x_BT.masked_fill(~mask_BT, value)


def gae_by_loop(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float
) -> tuple[list[list[float]], list[list[float]]]:
    """The definition, token by token, in Python floats."""
    rewards, values, mask = rewards_BT.tolist(), values_BT.tolist(), mask_BT.tolist()
    advantages = [[0.0] * len(row) for row in mask]
    returns = [[0.0] * len(row) for row in mask]
    for b, row in enumerate(mask):
        later_value = later_advantage = 0.0
        for t in range(len(row) - 1, -1, -1):
            if row[t]:
                delta = rewards[b][t] + gamma * later_value - values[b][t]
                advantages[b][t] = later_advantage = delta + gamma * lam * later_advantage
                later_value = values[b][t]
                returns[b][t] = later_advantage + later_value
    return advantages, returns


def close(found: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype))


def test_gae_golden() -> None:
    # Row 0, no holes, gamma 1/2, lam 1/4, so gamma lam = 1/8:
    #   t=2: delta = 5 - 3 = 2,               A = 2
    #   t=1: delta = 2 + 3/2 - 4 = -1/2,      A = -1/2 + 2/8 = -1/4
    #   t=0: delta = 1 + 4/2 - 2 = 1,         A = 1 - 1/32 = 31/32
    # Row 1, a hole at t=1 (several turns) and the end cut: t=2 follows t=0.
    #   t=2: delta = 4 - 6 = -2,              A = -2
    #   t=0: delta = 3 + 6/2 - 1 = 5,         A = 5 - 2/8 = 4.75
    rewards_BT = torch.tensor([[1.0, 2.0, 5.0, NAN], [3.0, INF, 4.0, NAN]])
    values_BT = torch.tensor([[2.0, 4.0, 3.0, NAN], [1.0, -INF, 6.0, NAN]])
    mask_BT = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0]]).bool()
    advantages_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, gamma=0.5, lam=0.25)
    assert advantages_BT.tolist() == [[31 / 32, -0.25, 2.0, 0.0], [4.75, 0.0, -2.0, 0.0]]
    assert returns_BT.tolist() == [[2 + 31 / 32, 3.75, 5.0, 0.0], [5.75, 0.0, 4.0, 0.0]]


@given(seed=seeds, rows=st.integers(1, 4), length=st.integers(1, 19), gamma=units, lam=units)
@settings(max_examples=120)
def test_gae_equals_the_loop(seed: int, rows: int, length: int, gamma: float, lam: float) -> None:
    rewards_BT, values_BT, mask_BT = batch(seed, rows, length)
    expected = gae_by_loop(rewards_BT, values_BT, mask_BT, gamma, lam)
    for found_BT, expected_BT in zip(gae(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=lam), expected, strict=True):
        assert found_BT.dtype == torch.float64
        torch.testing.assert_close(found_BT, torch.tensor(expected_BT, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_gae_float32_is_close_to_the_loop_on_long_rows() -> None:
    rewards_BT, values_BT, mask_BT = batch(5, 3, 700)
    expected = gae_by_loop(rewards_BT, values_BT, mask_BT, 1.0, 0.95)
    for dtype in (torch.float32, torch.bfloat16):
        if dtype == torch.bfloat16:
            rewards_BT, values_BT = rewards_BT.bfloat16(), values_BT.bfloat16()
            expected = gae_by_loop(rewards_BT, values_BT, mask_BT, 1.0, 0.95)
        found = gae(rewards_BT.to(dtype), values_BT.to(dtype), mask_BT, gamma=1.0, lam=0.95)
        for found_BT, expected_BT in zip(found, expected, strict=True):
            assert found_BT.dtype == torch.float32
            torch.testing.assert_close(found_BT, torch.tensor(expected_BT), rtol=1e-4, atol=1e-4)


@given(seed=seeds, value=st.sampled_from([NAN, INF, -INF, 1e30]))
@settings(max_examples=30)
def test_gae_garbage_outside_the_mask_changes_neither_values_nor_gradients(seed: int, value: float) -> None:
    rewards_BT, values_BT, mask_BT = batch(seed, 3, 7)
    outcomes: list[list[Tensor]] = []
    for fill in (0.0, value):
        inputs = tuple(garbage(x_BT, mask_BT, fill).requires_grad_() for x_BT in (rewards_BT, values_BT))
        outputs = gae(inputs[0], inputs[1], mask_BT, gamma=0.9, lam=0.8)
        (outputs[0].square().sum() + outputs[1].sum()).backward()
        outcomes.append([x.detach() for x in outputs] + [x.grad for x in inputs if x.grad is not None])
    assert len(outcomes[1]) == 4
    for clean, dirty in zip(*outcomes, strict=True):
        assert torch.equal(clean, dirty)


@given(seed=seeds, gamma=units)
@settings(max_examples=25)
def test_gae_lambda_0_is_the_one_step_error(seed: int, gamma: float) -> None:
    rewards_BT, values_BT, _ = batch(seed, 2, 5)
    advantages_BT, _ = gae(rewards_BT, values_BT, torch.ones(2, 5).bool(), gamma=gamma, lam=0.0)
    for t in range(5):
        after_B = values_BT[:, t + 1] if t < 4 else torch.zeros(2)
        torch.testing.assert_close(advantages_BT[:, t], rewards_BT[:, t] + gamma * after_B - values_BT[:, t])


@given(seed=seeds, gamma=units)
@settings(max_examples=25)
def test_gae_lambda_1_is_the_return_minus_the_value(seed: int, gamma: float) -> None:
    rewards_BT, values_BT, _ = batch(seed, 2, 5)
    _, returns_BT = gae(rewards_BT, values_BT, torch.ones(2, 5).bool(), gamma=gamma, lam=1.0)
    for t in range(5):
        expected_B = sum((gamma**k * rewards_BT[:, t + k] for k in range(5 - t)), torch.zeros(2))
        torch.testing.assert_close(returns_BT[:, t], expected_B)


@given(seed=seeds)
@settings(max_examples=20)
def test_gae_rows_are_independent_and_padding_is_nothing(seed: int) -> None:
    rewards_BT, values_BT, mask_BT = batch(seed, 4, 6)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    whole = gae(rewards_BT, values_BT, mask_BT, gamma=0.9, lam=0.7)
    moved = gae(rewards_BT[order], values_BT[order], mask_BT[order], gamma=0.9, lam=0.7)
    longer_BT = torch.nn.functional.pad(torch.stack([rewards_BT, values_BT]), (3, 2), value=NAN)
    longer_mask_BT = torch.nn.functional.pad(mask_BT, (3, 2))
    padded = gae(longer_BT[0], longer_BT[1], longer_mask_BT, gamma=0.9, lam=0.7)
    for whole_BT, moved_BT, padded_BT in zip(whole, moved, padded, strict=True):
        assert torch.equal(moved_BT, whole_BT[order])
        torch.testing.assert_close(padded_BT[:, 3:-2], whole_BT)


def test_gae_gradcheck() -> None:
    rewards_BT, values_BT, mask_BT = batch(2, 2, 5)
    assert torch.autograd.gradcheck(
        lambda r, v: gae(r, v, mask_BT, gamma=0.9, lam=0.8),
        (rewards_BT.requires_grad_(), values_BT.requires_grad_()),
    )


def test_gae_nothing_counts() -> None:
    nothing_BT = torch.full((2, 3), NAN)
    advantages_BT, returns_BT = gae(nothing_BT, nothing_BT, torch.zeros(2, 3).bool(), gamma=1.0, lam=1.0)
    assert advantages_BT.tolist() == returns_BT.tolist() == [[0.0] * 3] * 2


def test_returns_to_go_golden() -> None:
    # t=3: 8; t=1: 2 + 8/4 = 4; t=0: 1 + 4/4 = 2; the hole at t=2 costs no discount
    found_BT = returns_to_go(
        torch.tensor([[1.0, 2.0, NAN, 8.0, INF]]), torch.tensor([[1, 1, 0, 1, 0]]).bool(), gamma=0.25
    )
    assert found_BT.tolist() == [[2.0, 4.0, 0.0, 8.0, 0.0]]


@given(seed=seeds, length=st.integers(1, 19), gamma=units)
@settings(max_examples=40)
def test_returns_to_go_is_gae_by_loop_without_a_critic(seed: int, length: int, gamma: float) -> None:
    rewards_BT, _, mask_BT = batch(seed, 3, length)
    expected, _ = gae_by_loop(rewards_BT, torch.zeros(3, length), mask_BT, gamma, 1.0)
    found_BT = returns_to_go(garbage(rewards_BT, mask_BT, NAN), mask_BT, gamma=gamma)
    assert found_BT.dtype == torch.float64
    torch.testing.assert_close(found_BT, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_returns_to_go_bfloat16_gives_float32() -> None:
    rewards_BT = torch.tensor([[1.0, 2.0**-12]], dtype=torch.bfloat16)
    found_BT = returns_to_go(rewards_BT, torch.ones(1, 2).bool(), gamma=1.0)
    assert found_BT.dtype == torch.float32
    assert found_BT.tolist() == [[1 + 2.0**-12, 2.0**-12]]


# On the mask: 1, 2, 6, so mean 3, variance (4 + 1 + 9) / 3 = 14/3
X_BT = torch.tensor([[1.0, NAN, 2.0], [INF, 6.0, -INF]])
MASK_BT = torch.tensor([[1, 0, 1], [0, 1, 0]]).bool()
STD = math.sqrt(14 / 3)


def test_whiten_golden() -> None:
    close(whiten(X_BT, MASK_BT), [[-2 / STD, 0, -1 / STD], [0, 3 / STD, 0]])


def test_scale_golden() -> None:
    close(scale(X_BT, MASK_BT), [[3 - 2 / STD, 0, 3 - 1 / STD], [0, 3 + 3 / STD, 0]])


def test_the_eps_of_whiten_and_scale_is_added_to_the_variance() -> None:
    x_BT, mask_BT = torch.tensor([[1.0, 5.0]], dtype=torch.float64), torch.ones(1, 2).bool()
    close(whiten(x_BT, mask_BT, eps=5.0), [[-2 / 3, 2 / 3]])  # sqrt(4 + 5) = 3
    close(scale(x_BT, mask_BT, eps=5.0), [[3 - 2 / 3, 3 + 2 / 3]])
    tiny_BT = torch.tensor([[0.0, 2e-4]], dtype=torch.float64)  # variance 1e-8, as the default eps
    close(whiten(tiny_BT, mask_BT), [[-1 / math.sqrt(2), 1 / math.sqrt(2)]])
    close(scale(tiny_BT, mask_BT), [[1e-4 - 1 / math.sqrt(2), 1e-4 + 1 / math.sqrt(2)]])


@given(seed=seeds, shift=st.floats(-5, 5), factor=st.floats(0.1, 10))
@settings(max_examples=40)
def test_whiten_and_scale_moments(seed: int, shift: float, factor: float) -> None:
    x_BT, _, mask_BT = batch(seed, 4, 6)
    mask_BT[0, :2] = True
    white = whiten(garbage(x_BT * factor + shift, mask_BT, NAN), mask_BT, eps=0.0)
    scaled = scale(garbage(x_BT * factor + shift, mask_BT, NAN), mask_BT, eps=0.0)
    torch.testing.assert_close(white, whiten(x_BT, mask_BT, eps=0.0))  # neither shift nor factor matters
    for found_BT, mean in ((white, 0.0), (scaled, float((x_BT[mask_BT] * factor + shift).mean()))):
        assert found_BT.dtype == torch.float64
        assert found_BT[mask_BT].mean().item() == pytest.approx(mean, abs=1e-9)
        assert found_BT[mask_BT].var(correction=0).item() == pytest.approx(1.0)
        assert (found_BT[~mask_BT] == 0).all()


@pytest.mark.parametrize("function", [whiten, scale])
def test_whiten_and_scale_of_nothing_or_one_entry(function: Callable[..., Tensor]) -> None:
    x_BT = torch.tensor([[7.0, NAN]])
    assert function(x_BT, torch.tensor([[False, False]])).tolist() == [[0.0, 0.0]]
    assert function(x_BT, torch.tensor([[True, False]])).tolist() == [[7.0 if function is scale else 0.0, 0.0]]


@pytest.mark.parametrize("function", [whiten, scale])
def test_whiten_and_scale_bfloat16_gives_float32(function: Callable[..., Tensor]) -> None:
    assert function(X_BT.bfloat16(), MASK_BT).dtype == torch.float32
    torch.testing.assert_close(function(X_BT.bfloat16(), MASK_BT), function(X_BT, MASK_BT), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("function", [whiten, scale])
def test_whiten_and_scale_gradient(function: Callable[..., Tensor]) -> None:
    x_BT, _, mask_BT = batch(4, 2, 4)
    assert torch.autograd.gradcheck(lambda x: function(x, mask_BT), x_BT.requires_grad_())
    dirty_BT = garbage(x_BT.detach(), mask_BT, NAN).requires_grad_()
    function(dirty_BT, mask_BT).square().sum().backward()
    assert dirty_BT.grad is not None
    assert dirty_BT.grad.isfinite().all()
    assert (dirty_BT.grad[~mask_BT] == 0).all()


# Group 7: 1, 2, 6 with mean 3, sample variance (4 + 1 + 9) / 2 = 7. Group -3: 5, 9 with mean 7, variance 8.
# Group 0: one answer.
SCORES_B = torch.tensor([1.0, 5.0, 2.0, 4.0, 9.0, 6.0])
GROUP_B = torch.tensor([7, -3, 7, 0, -3, 7])


def test_groups_centred_golden() -> None:
    assert group_centred(SCORES_B, GROUP_B, scale=False).tolist() == [-2.0, -2.0, -1.0, 0.0, 2.0, 3.0]


def test_groups_scaled_golden() -> None:
    seven, eight = math.sqrt(7) + 1e-6, math.sqrt(8) + 1e-6
    expected = [-2 / seven, -2 / eight, -1 / seven, 0.0, 2 / eight, 3 / seven]
    found_B = group_centred(SCORES_B.double(), GROUP_B, scale=True)
    torch.testing.assert_close(found_B, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_groups_eps_is_added_to_the_std() -> None:
    # deviations -1e-6 and 1e-6, sample std sqrt(2) 1e-6: 1 / (1 + sqrt(2))
    scores_B = torch.tensor([0.0, 2e-6], dtype=torch.float64)
    found_B = group_centred(scores_B, torch.tensor([1, 1]), scale=True)
    share = 1 / (1 + math.sqrt(2))
    torch.testing.assert_close(found_B, torch.tensor([-share, share], dtype=torch.float64), rtol=1e-9, atol=0)


def test_leave_one_out_golden() -> None:
    # group 7: 1 - 8/2, 2 - 7/2, 6 - 3/2; group -3: 5 - 9, 9 - 5
    assert leave_one_out(SCORES_B, GROUP_B).tolist() == [-3.0, -4.0, -1.5, 0.0, 4.0, 4.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_groups_equal_scores_give_zero_not_noise(dtype: torch.dtype) -> None:
    scores_B, group_B = torch.full((6,), 0.1, dtype=dtype), torch.tensor([0, 1, 0, 1, 0, 1])
    for found_B in (group_centred(scores_B, group_B, scale=True), leave_one_out(scores_B, group_B)):
        assert found_B.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert found_B.abs().max() < 1e-9


def test_groups_nan_stays_in_its_group() -> None:
    scores_B = SCORES_B.clone()
    scores_B[1] = NAN
    for found_B in (group_centred(scores_B, GROUP_B, scale=True), leave_one_out(scores_B, GROUP_B)):
        assert found_B.isnan().tolist() == [False, True, False, False, True, False]


@given(seed=seeds, rows=st.integers(1, 12))
@settings(max_examples=60)
def test_groups_against_the_definition_in_any_order(seed: int, rows: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    scores_B = torch.randn(rows, generator=rng, dtype=torch.float64)
    group_B = torch.randint(-2, 3, (rows,), generator=rng) * 1000
    others = {b: [scores_B[c].item() for c in range(rows) if group_B[c] == group_B[b] and c != b] for b in range(rows)}
    rloo = [scores_B[b].item() - sum(found) / len(found) if found else 0.0 for b, found in others.items()]
    centred = [scores_B[b].item() - (sum(found) + scores_B[b].item()) / (len(found) + 1) for b, found in others.items()]
    torch.testing.assert_close(leave_one_out(scores_B, group_B), torch.tensor(rloo, dtype=torch.float64))
    torch.testing.assert_close(
        group_centred(scores_B, group_B, scale=False), torch.tensor(centred, dtype=torch.float64)
    )
    order = torch.randperm(rows, generator=rng)
    torch.testing.assert_close(
        group_centred(scores_B[order], group_B[order], scale=True),
        group_centred(scores_B, group_B, scale=True)[order],
    )


def test_greedy_baseline_golden() -> None:
    mask_BT = torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()
    found_BT = greedy_baseline(torch.tensor([3.0, 1.0, NAN]), torch.tensor([1.0, 5.0, 2.0]), mask_BT)
    assert found_BT.tolist() == [[0.0, 2.0, 2.0], [-4.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_greedy_baseline_bfloat16_gives_float32() -> None:
    low_B = torch.tensor([2.0**-12], dtype=torch.bfloat16)
    found_BT = greedy_baseline(torch.ones(1, dtype=torch.bfloat16), low_B, torch.ones(1, 1).bool())
    assert found_BT.dtype == torch.float32
    assert found_BT.tolist() == [[1 - 2.0**-12]]
