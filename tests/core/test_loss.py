"""The one mean: golden numbers, masks that hide anything, and splits that change nothing."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kedge.core.errors import ConfigError, ShapeError
from kedge.core.loss import ItemLoss, masked, mean, stat_means, stat_sums, weight_of, weighted_sum, widen
from kedge.core.optimiser import Per

PERS: tuple[Per, ...] = get_args(Per)
NAN, INF = math.nan, math.inf

# Row 0: 1 + 2 + 6 = 9 over 3 tokens; row 1: 10 over 1 token; row 2: nothing counts. T = 4.
X_BT = torch.tensor([[1.0, 2.0, NAN, 6.0], [INF, 10.0, -INF, NAN], [NAN, NAN, INF, NAN]])
MASK_BT = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()


def batch(seed: int, rows: int, length: int, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x_BT = torch.randn(rows, length, generator=rng, dtype=torch.float64).to(dtype)
    return x_BT, torch.rand(rows, length, generator=rng) < 0.6


@pytest.mark.parametrize(
    ("per", "numerator", "denominator"),
    [
        ("token", 19.0, 4),  # 9 + 10 over 3 + 1 tokens
        ("sequence", 13.0, 2),  # 9/3 + 10/1 over two rows that count
        ("sequence_sum", 19.0, 2),
        ("constant", 19.0, 12),  # 3 rows of 4 positions
    ],
)
def test_golden(per: Per, numerator: float, denominator: int) -> None:
    weight = weight_of(MASK_BT, per)
    assert weighted_sum(X_BT, MASK_BT, per).item() == numerator
    assert weight.item() == denominator
    assert weight.dtype == torch.int64
    assert mean(X_BT, MASK_BT, per=per).item() == pytest.approx(numerator / denominator, rel=1e-6)


@pytest.mark.parametrize("per", PERS)
def test_an_item_loss_is_averaged_by_its_loss(per: Per) -> None:
    item = ItemLoss(loss_BT=X_BT, stats_BT={"other": X_BT * 3})
    assert mean(item, MASK_BT, per=per).item() == mean(X_BT, MASK_BT, per=per).item()


def test_only_constant_reads_the_length_of_the_step() -> None:
    assert weight_of(MASK_BT, "constant", max_length=7).item() == 21
    assert [weight_of(MASK_BT, per, max_length=7).item() for per in PERS[:3]] == [4, 2, 2]


@pytest.mark.parametrize(
    ("per", "expected"),
    [
        ("token", [[1 / 4, 1 / 4, 0, 1 / 4], [0, 1 / 4, 0, 0], [0, 0, 0, 0]]),
        ("sequence", [[1 / 6, 1 / 6, 0, 1 / 6], [0, 1 / 2, 0, 0], [0, 0, 0, 0]]),
        ("sequence_sum", [[1 / 2, 1 / 2, 0, 1 / 2], [0, 1 / 2, 0, 0], [0, 0, 0, 0]]),
        ("constant", [[1 / 12, 1 / 12, 0, 1 / 12], [0, 1 / 12, 0, 0], [0, 0, 0, 0]]),
    ],
)
def test_gradient_of_every_position(per: Per, expected: list[list[float]]) -> None:
    x_BT = X_BT.clone().requires_grad_()
    mean(x_BT, MASK_BT, per=per).backward()
    torch.testing.assert_close(x_BT.grad, torch.tensor(expected))


@pytest.mark.parametrize("per", PERS)
def test_nothing_counts(per: Per) -> None:
    x_BT = torch.full((2, 3), NAN, requires_grad=True)
    value = mean(x_BT, torch.zeros(2, 3, dtype=torch.bool), per=per)
    value.backward()
    assert value.item() == 0.0
    assert x_BT.grad is not None
    assert x_BT.grad.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("per", PERS)
def test_no_rows_at_all(per: Per) -> None:
    assert mean(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool), per=per).item() == 0.0


@given(seed=st.integers(0, 2**32), rows=st.integers(1, 6), length=st.integers(1, 6), cut=st.integers(0, 6))
@settings(max_examples=40)
@pytest.mark.parametrize("per", PERS)
def test_any_split_gives_the_mean_of_the_whole(per: Per, seed: int, rows: int, length: int, cut: int) -> None:
    x_BT, mask_BT = batch(seed, rows, length)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    parts = [part for part in (order[:cut], order[cut:]) if len(part)]
    total = torch.stack([weight_of(mask_BT[part], per) for part in parts]).sum().clamp(min=1)
    split = torch.stack([weighted_sum(x_BT[part], mask_BT[part], per) / total for part in parts]).sum()
    torch.testing.assert_close(split, mean(x_BT, mask_BT, per=per))


@given(seed=st.integers(0, 2**32), pad=st.integers(1, 4))
@settings(max_examples=25)
@pytest.mark.parametrize("per", PERS)
def test_padding_changes_nothing_once_the_length_is_said(per: Per, seed: int, pad: int) -> None:
    x_BT, mask_BT = batch(seed, 3, 4)
    longer_x_BT = torch.cat([x_BT, torch.full((3, pad), NAN)], dim=1)
    longer_mask_BT = torch.cat([mask_BT, torch.zeros(3, pad, dtype=torch.bool)], dim=1)
    weight = weight_of(mask_BT, per, max_length=4 + pad)
    assert weight == weight_of(longer_mask_BT, per)
    torch.testing.assert_close(weighted_sum(longer_x_BT, longer_mask_BT, per), weighted_sum(x_BT, mask_BT, per))


@pytest.mark.parametrize("per", PERS)
def test_gradcheck(per: Per) -> None:
    x_BT, mask_BT = batch(3, 3, 4)
    assert torch.autograd.gradcheck(lambda x: mean(x, mask_BT, per=per), x_BT.requires_grad_())


@pytest.mark.parametrize("per", PERS)
def test_sums_are_float32_at_least(per: Per) -> None:
    # 1 + 4096 * 2^-12 = 2 exactly, but in bfloat16 every further 2^-12 would be lost
    x_BT = torch.full((1, 4097), 2.0**-12, dtype=torch.bfloat16)
    x_BT[0, 0] = 1.0
    mask_BT = torch.ones(1, 4097, dtype=torch.bool)
    total = weighted_sum(x_BT, mask_BT, per)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(2 / 4097 if per == "sequence" else 2.0, rel=1e-6)
    assert mean(x_BT.double(), mask_BT, per=per).dtype == torch.float64


@pytest.mark.parametrize(
    ("given_dtype", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.float32),
    ],
)
def test_widen(given_dtype: torch.dtype, expected: torch.dtype) -> None:
    wide = widen(torch.tensor([3], dtype=given_dtype))
    assert wide.dtype == expected
    assert wide.item() == 3


def test_masked_keeps_type_and_hides_everything() -> None:
    out_BT = masked(X_BT, MASK_BT)
    assert out_BT.tolist() == [[1.0, 2.0, 0.0, 6.0], [0.0, 10.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    assert masked(X_BT.bfloat16(), MASK_BT).dtype == torch.bfloat16
    assert masked(torch.tensor([[4, 5]]), torch.tensor([[False, True]])).tolist() == [[0, 5]]


def test_masked_before_a_loss_keeps_nan_out_of_the_gradient() -> None:
    x_BT = torch.tensor([[0.5, NAN]], requires_grad=True)
    mean(masked(x_BT, torch.tensor([[True, False]])).exp(), torch.tensor([[True, False]]), per="token").backward()
    torch.testing.assert_close(x_BT.grad, torch.tensor([[math.exp(0.5), 0.0]]))


@pytest.mark.parametrize("mask_BT", [torch.ones(2, 1, dtype=torch.bool), torch.ones(2, 3), torch.ones(2, 3).long()])
def test_a_mask_that_does_not_fit_is_refused(mask_BT: Tensor) -> None:
    with pytest.raises(ShapeError) as error:
        weighted_sum(torch.zeros(2, 3), mask_BT, "token")
    assert str(error.value) == (
        f"mask_BT is {mask_BT.dtype} of shape {tuple(mask_BT.shape)}, "
        "expected torch.bool of shape (2, 3), the shape of what it masks"
    )


def test_an_unknown_mean_is_refused_with_the_nearest_name() -> None:
    message = "per: found 'tokens' (did you mean 'token'?), expected token, sequence, sequence_sum, constant"
    for call in (
        lambda: weight_of(MASK_BT, "tokens"),  # pyright: ignore[reportArgumentType]
        lambda: weighted_sum(X_BT, MASK_BT, "tokens"),  # pyright: ignore[reportArgumentType]
        lambda: mean(X_BT, MASK_BT, per="tokens"),  # pyright: ignore[reportArgumentType]
    ):
        with pytest.raises(ConfigError) as error:
            call()
        assert str(error.value) == message


def test_facts_are_token_means_without_gradient() -> None:
    ratio_BT = X_BT.clone().requires_grad_()
    item = ItemLoss(loss_BT=torch.zeros(3, 4), stats_BT={"ratio": ratio_BT, "twice": 2 * ratio_BT})
    sums, means = stat_sums(item, MASK_BT), stat_means(item, MASK_BT)
    assert {name: value.item() for name, value in sums.items()} == {"ratio": 19.0, "twice": 38.0}
    assert {name: value.item() for name, value in means.items()} == {"ratio": 4.75, "twice": 9.5}
    assert not any(value.requires_grad for value in (*sums.values(), *means.values()))


def test_facts_of_nothing_are_zero_and_of_one_token_are_its_own() -> None:
    item = ItemLoss(loss_BT=X_BT, stats_BT={"ratio": X_BT})
    mask_BT = torch.zeros_like(MASK_BT)
    assert stat_means(item, mask_BT)["ratio"].item() == 0.0
    mask_BT[0, 3] = True
    assert stat_means(item, mask_BT)["ratio"].item() == 6.0


def test_a_fact_of_another_shape_is_refused() -> None:
    with pytest.raises(ShapeError) as error:
        ItemLoss(loss_BT=torch.zeros(2, 3), stats_BT={"fine": torch.zeros(2, 3), "kl": torch.zeros(2)})
    assert str(error.value) == "ItemLoss: stats_BT['kl'] has shape (2,), expected (2, 3), the shape of loss_BT"
