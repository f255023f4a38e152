"""Preference losses against scalar formulas written out with `math`, and the statements that hold for all inputs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kedge.algorithms.preference import DPO_KINDS, cpo, dpo, implicit_rewards, kto, orpo_odds, simpo, tdpo
from kedge.core.errors import ConfigError

BETA = 0.3
SORTING = ("aot", "aot_pair")
SEPARABLE = tuple(kind for kind in DPO_KINDS if kind not in SORTING)
READS_SMOOTHING = ("sigmoid", "robust", "exo_pair", "aot", "aot_pair")

# chosen, rejected, ref_chosen, ref_rejected; log-ratios (0.7, -0.9), (-1.1, 2.0), (1.9, 1.2); margins 1.6, -3.1, 0.7
ROWS = ((-3.1, -5.4, -3.8, -4.5), (-6.2, -2.5, -5.1, -4.5), (-2.0, -8.1, -3.9, -9.3))


def columns(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.tensor(column, dtype=dtype) for column in zip(*ROWS, strict=True)]


def sig(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def nls(x: float) -> float:
    """-log sigmoid"""
    return math.log(1 + math.exp(-x))


def kl_of_two(q: float, p: float) -> float:
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def log_ratios(row: tuple[float, ...]) -> tuple[float, float]:
    chosen, rejected, ref_chosen, ref_rejected = row
    return chosen - ref_chosen, rejected - ref_rejected


def blend(z: float) -> float:
    weight = sig(z / 0.05)
    return (1 - weight) * nls(z) + weight * math.exp(-z)


# From the log-ratios c, r and the smoothing e of one pair.
BY_HAND: dict[str, Callable[[float, float, float], float]] = {
    "sigmoid": lambda c, r, e: (1 - e) * nls(BETA * (c - r)) + e * nls(BETA * (r - c)),
    "robust": lambda c, r, e: ((1 - e) * nls(BETA * (c - r)) - e * nls(BETA * (r - c))) / (1 - 2 * e),
    "exo_pair": lambda c, r, e: kl_of_two(sig(BETA * (c - r)), 1 - e),
    "ipo": lambda c, r, e: (c - r - 1 / (2 * BETA)) ** 2,
    "hinge": lambda c, r, e: max(0.0, 1 - BETA * (c - r)),
    "nca_pair": lambda c, r, e: nls(BETA * c) + nls(-BETA * c) / 2 + nls(-BETA * r) / 2,
    "sppo_hard": lambda c, r, e: (c - 1 / (2 * BETA)) ** 2 + (r + 1 / (2 * BETA)) ** 2,
    "apo_zero": lambda c, r, e: 1 - sig(BETA * c) + sig(BETA * r),
    "apo_down": lambda c, r, e: sig(BETA * c) + 1 - sig(BETA * (c - r)),
    "discopop": lambda c, r, e: blend(BETA * (c - r)),
}


def test_the_kinds_are_the_documented_twelve() -> None:
    assert set(DPO_KINDS) == {*BY_HAND, *SORTING}
    assert len(DPO_KINDS) == 12


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", SEPARABLE)
def test_each_pair_by_hand(kind: str, smoothing: float) -> None:
    if smoothing and kind not in READS_SMOOTHING:
        with pytest.raises(ConfigError, match=rf"label_smoothing is 0.1, but kind '{kind}' does not read it"):
            dpo(*columns(), beta=BETA, kind=kind, label_smoothing=smoothing)
        return
    expected = [BY_HAND[kind](*log_ratios(row), smoothing or (1e-3 if kind == "exo_pair" else 0.0)) for row in ROWS]
    loss_B = dpo(*columns(), beta=BETA, kind=kind, label_smoothing=smoothing)
    assert loss_B.tolist() == pytest.approx(expected, rel=1e-12)


def test_numbers_on_paper() -> None:
    """β 0.3, first row: c 0.7, r -0.9, margin 1.6, β·m 0.48."""
    chosen_B, rejected_B, ref_chosen_B, ref_rejected_B = (column[:1] for column in columns())
    for kind, expected in {
        "sigmoid": math.log(1 + math.exp(-0.48)),
        "hinge": 0.52,
        "ipo": (1.6 - 5 / 3) ** 2,
        "sppo_hard": (0.7 - 5 / 3) ** 2 + (-0.9 + 5 / 3) ** 2,
        "apo_zero": 1 / (1 + math.exp(0.21)) + 1 / (1 + math.exp(0.27)),
        "apo_down": 1 / (1 + math.exp(-0.21)) + 1 / (1 + math.exp(0.48)),
    }.items():
        loss_B = dpo(chosen_B, rejected_B, ref_chosen_B, ref_rejected_B, beta=0.3, kind=kind)
        assert loss_B.item() == pytest.approx(expected, rel=1e-12), kind


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_aot_compares_sorted_policy_gaps_with_sorted_reference_gaps(smoothing: float) -> None:
    # policy gaps 2.3, -3.7, 6.1; reference gaps 0.7, -0.6, 5.4; sorted differences -3.1, 1.6, 0.7
    expected = [(1 - smoothing) * nls(BETA * d) + smoothing * nls(-BETA * d) for d in (-3.1, 1.6, 0.7)]
    loss_B = dpo(*columns(), beta=BETA, kind="aot", label_smoothing=smoothing)
    assert loss_B.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_aot_pair_compares_sorted_chosen_with_sorted_rejected_log_ratios(smoothing: float) -> None:
    # chosen -1.1, 0.7, 1.9; rejected -0.9, 1.2, 2.0; differences -0.2, -0.5, -0.1
    expected = [(1 - smoothing) * nls(BETA * d) + smoothing * nls(-BETA * d) for d in (-0.2, -0.5, -0.1)]
    loss_B = dpo(*columns(), beta=BETA, kind="aot_pair", label_smoothing=smoothing)
    assert loss_B.tolist() == pytest.approx(expected, rel=1e-12)


def test_aot_is_not_the_sum_of_its_parts() -> None:
    crossed = [torch.tensor(column) for column in ([1.0, 5.0], [0.0, 0.0], [7.0, 2.0], [0.0, 0.0])]
    whole = dpo(*crossed, beta=1.0, kind="aot").sum().item()
    parts = sum(dpo(*(x[i : i + 1] for x in crossed), beta=1.0, kind="aot").item() for i in range(2))
    assert whole == pytest.approx(nls(-1) + nls(-2), rel=1e-6)  # sorted: 1-2, 5-7
    assert parts == pytest.approx(nls(-6) + nls(3), rel=1e-6)  # pair by pair: 1-7, 5-2


def test_default_kind_is_sigmoid_without_smoothing() -> None:
    expected = [nls(BETA * m) for m in (1.6, -3.1, 0.7)]
    assert dpo(*columns(), beta=BETA).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["sigmoid", "robust", "aot", "aot_pair"])
def test_zero_difference_is_log_two(kind: str) -> None:
    logp_B = torch.tensor([-1.2, -1.6])
    loss_B = dpo(logp_B, logp_B, logp_B, logp_B, beta=0.05, kind=kind)
    assert loss_B.tolist() == pytest.approx([math.log(2)] * 2, rel=1e-6)


def test_implicit_reward_of_the_textbook() -> None:
    logp_B = torch.tensor([-1.6, -1.2], requires_grad=True)
    reward_B = implicit_rewards(logp_B, torch.tensor([-1.2, -1.6]), beta=0.05)
    assert reward_B.tolist() == pytest.approx([-0.02, 0.02], rel=1e-5)
    assert not reward_B.requires_grad


# --- what is refused ---------------------------------------------------------


def test_unknown_kind_names_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError) as caught:
        dpo(*columns(), beta=BETA, kind="sigmoyd")
    assert str(caught.value) == (
        "no DPO loss of kind 'sigmoyd' (did you mean 'sigmoid'?); kinds: sigmoid, robust, exo_pair, aot, aot_pair, "
        "ipo, hinge, nca_pair, sppo_hard, apo_zero, apo_down, discopop"
    )


def test_smoothing_of_a_kind_without_it_says_which_kinds_have_it() -> None:
    with pytest.raises(ConfigError) as caught:
        dpo(*columns(), beta=BETA, kind="ipo", label_smoothing=0.1)
    assert str(caught.value) == (
        "label_smoothing is 0.1, but kind 'ipo' does not read it: leave it at 0, or take one of "
        "sigmoid, robust, exo_pair, aot, aot_pair"
    )


@pytest.mark.parametrize(
    ("kind", "smoothing", "message"),
    [
        ("sigmoid", -0.01, "label_smoothing must be between 0 and 0.5 for kind 'sigmoid', found -0.01"),
        ("sigmoid", 0.51, "label_smoothing must be between 0 and 0.5 for kind 'sigmoid', found 0.51"),
        ("exo_pair", math.nan, "label_smoothing must be between 0 and 0.5 for kind 'exo_pair', found nan"),
        ("robust", 0.5, "label_smoothing must be at least 0 and below 0.5 for kind 'robust', found 0.5"),
    ],
)
def test_smoothing_out_of_range(kind: str, smoothing: float, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dpo(*columns(), beta=BETA, kind=kind, label_smoothing=smoothing)
    assert str(caught.value) == message


# --- the other losses by hand ------------------------------------------------


def test_tdpo1_by_hand() -> None:
    # margins 1.6, -3.1, 0.7; δ = kl_r - kl_c = 0.5-0.2, 0.1-0.9, 1.5-0.4 = 0.3, -0.8, 1.1; m-δ = 1.3, -2.3, -0.4
    chosen_kl_B, rejected_kl_B = torch.tensor([[0.2, 0.9, 0.4], [0.5, 0.1, 1.5]], dtype=torch.float64)
    loss_B = tdpo(*columns(), chosen_kl_B, rejected_kl_B, beta=BETA, alpha=None)
    assert loss_B.tolist() == pytest.approx([nls(BETA * x) for x in (1.3, -2.3, -0.4)], rel=1e-12)


def test_tdpo2_by_hand() -> None:
    # α 0.5: δ = 0.15, -0.4, 0.55; m-δ = 1.45, -2.7, 0.15
    chosen_kl_B, rejected_kl_B = torch.tensor([[0.2, 0.9, 0.4], [0.5, 0.1, 1.5]], dtype=torch.float64)
    loss_B = tdpo(*columns(), chosen_kl_B, rejected_kl_B, beta=BETA, alpha=0.5)
    assert loss_B.tolist() == pytest.approx([nls(BETA * x) for x in (1.45, -2.7, 0.15)], rel=1e-12)


def test_tdpo2_stops_the_gradient_of_the_chosen_kl_and_tdpo1_does_not() -> None:
    grads = {}
    for alpha in (None, 1.0):
        kl_2 = [torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (0.2, 0.5)]
        loss_B = tdpo(*(column[:1] for column in columns()), *kl_2, beta=BETA, alpha=alpha)
        grads[alpha] = torch.autograd.grad(loss_B.sum(), kl_2, materialize_grads=True)
    slope = BETA * sig(-BETA * 1.3)  # d/dkl_rejected of -log σ(β (m - kl_r + kl_c)), with m - δ = 1.3
    assert [x.item() for x in grads[None]] == pytest.approx([-slope, slope], rel=1e-12)
    assert [x.item() for x in grads[1.0]] == pytest.approx([0, slope], rel=1e-12)


def test_cpo_and_simpo_by_hand() -> None:
    chosen_B, rejected_B = torch.tensor([[-1.2, -2.5], [-1.6, -0.5]], dtype=torch.float64)
    assert cpo(chosen_B, rejected_B, beta=0.5).tolist() == pytest.approx([nls(0.2), nls(-1.0)], rel=1e-12)
    loss_B = simpo(chosen_B, rejected_B, beta=2.0, gamma=0.3)
    assert loss_B.tolist() == pytest.approx([nls(0.5), nls(-4.3)], rel=1e-12)


def test_orpo_by_hand() -> None:
    # odds 0.8/0.2 = 4 against 0.25/0.75 = 1/3: log 12; odds 1/9 against 1: -log 9
    chosen_B, rejected_B = torch.tensor([[0.8, 0.1], [0.25, 0.5]], dtype=torch.float64).log()
    loss_B = orpo_odds(chosen_B, rejected_B, beta=0.2)
    assert loss_B.tolist() == pytest.approx([0.2 * math.log(13 / 12), 0.2 * math.log(10)], rel=1e-12)


def test_orpo_near_probability_one_keeps_its_precision() -> None:
    # 1 - p = 1e-6 in float32: log-odds log((1 - 1e-6) / 1e-6)
    chosen_B, rejected_B = torch.tensor([math.log1p(-1e-6)]), torch.tensor([math.log(0.5)])
    expected = 0.1 * nls(-math.log((1 - 1e-6) / 1e-6))
    assert orpo_odds(rejected_B, chosen_B, beta=0.1).item() == pytest.approx(expected, rel=1e-5)


def test_kto_by_hand() -> None:
    # log-ratios 0.7, -1.1, 1.9; kl 0.4; above it 0.3, -1.5, 1.5
    chosen_B, _, ref_chosen_B, _ = columns()
    desirable_B = torch.tensor([True, True, False])
    kl = torch.tensor(0.4, dtype=torch.float64)
    loss_B = kto(chosen_B, ref_chosen_B, desirable_B, kl, beta=BETA, desirable_weight=1.5, undesirable_weight=0.7)
    expected = [1.5 * (1 - sig(0.09)), 1.5 * (1 - sig(-0.45)), 0.7 * (1 - sig(-0.45))]
    assert loss_B.tolist() == pytest.approx(expected, rel=1e-12)


def test_kto_weights_are_one_by_default() -> None:
    zero_B = torch.zeros(2)
    loss_B = kto(zero_B, zero_B, torch.tensor([True, False]), torch.tensor(2.0), beta=0.5)
    assert loss_B.tolist() == pytest.approx([1 - sig(-1.0), 1 - sig(1.0)], rel=1e-6)


def test_kto_reference_point_has_no_gradient_and_is_never_negative() -> None:
    kl = torch.tensor(-0.4, requires_grad=True)
    logp_B = torch.tensor([0.7], requires_grad=True)
    loss_B = kto(logp_B, torch.zeros(1), torch.tensor([True]), kl, beta=1.0)
    assert loss_B.item() == pytest.approx(1 - sig(0.7), rel=1e-6)
    grad_kl, grad_logp_B = torch.autograd.grad(loss_B.sum(), [kl, logp_B], allow_unused=True)
    assert grad_kl is None
    assert grad_logp_B.item() == pytest.approx(-sig(0.7) * sig(-0.7), rel=1e-6)


# --- statements for all inputs -----------------------------------------------

numbers = st.floats(-20, 20, allow_nan=False, width=32)
quadruples = st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=2, max_size=6)


def as_columns(rows: list[tuple[float, ...]]) -> list[Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]


@given(rows=quadruples, data=st.data())
def test_order_of_rows_permutes_the_losses(rows: list[tuple[float, ...]], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(rows))))
    x = as_columns(rows)
    for kind in SEPARABLE:
        loss_B = dpo(*x, beta=0.2, kind=kind)
        torch.testing.assert_close(dpo(*(c[order] for c in x), beta=0.2, kind=kind), loss_B[order])
    for kind in SORTING:  # sorted already: the same whatever the order
        loss_B = dpo(*x, beta=0.2, kind=kind)
        torch.testing.assert_close(dpo(*(c[order] for c in x), beta=0.2, kind=kind), loss_B)


@given(rows=quadruples)
def test_swapping_chosen_and_rejected_is_smoothing_the_other_way(rows: list[tuple[float, ...]]) -> None:
    chosen_B, rejected_B, ref_chosen_B, ref_rejected_B = as_columns(rows)
    plain_B = dpo(chosen_B, rejected_B, ref_chosen_B, ref_rejected_B, beta=0.2)
    swapped_B = dpo(rejected_B, chosen_B, ref_rejected_B, ref_chosen_B, beta=0.2)
    margin_B = (chosen_B - rejected_B) - (ref_chosen_B - ref_rejected_B)
    torch.testing.assert_close(swapped_B - plain_B, 0.2 * margin_B)  # log σ(x) - log σ(-x) = x
    smoothed_B = dpo(chosen_B, rejected_B, ref_chosen_B, ref_rejected_B, beta=0.2, label_smoothing=0.3)
    torch.testing.assert_close(smoothed_B, 0.7 * plain_B + 0.3 * swapped_B)


@given(rows=quadruples)
def test_half_smoothing_forgets_who_was_chosen(rows: list[tuple[float, ...]]) -> None:
    chosen_B, rejected_B, ref_chosen_B, ref_rejected_B = as_columns(rows)
    for kind in ("sigmoid", "exo_pair"):
        plain_B = dpo(chosen_B, rejected_B, ref_chosen_B, ref_rejected_B, beta=0.2, kind=kind, label_smoothing=0.5)
        swapped_B = dpo(rejected_B, chosen_B, ref_rejected_B, ref_chosen_B, beta=0.2, kind=kind, label_smoothing=0.5)
        torch.testing.assert_close(plain_B, swapped_B)


@given(rows=quadruples, flip_rate=st.floats(0.01, 0.45))
def test_robust_is_unbiased_under_its_flip_rate(rows: list[tuple[float, ...]], flip_rate: float) -> None:
    chosen_B, rejected_B, ref_chosen_B, ref_rejected_B = as_columns(rows)
    right_B = dpo(
        chosen_B, rejected_B, ref_chosen_B, ref_rejected_B, beta=0.2, kind="robust", label_smoothing=flip_rate
    )
    wrong_B = dpo(
        rejected_B, chosen_B, ref_rejected_B, ref_chosen_B, beta=0.2, kind="robust", label_smoothing=flip_rate
    )
    clean_B = dpo(chosen_B, rejected_B, ref_chosen_B, ref_rejected_B, beta=0.2)
    torch.testing.assert_close((1 - flip_rate) * right_B + flip_rate * wrong_B, clean_B, rtol=1e-5, atol=1e-9)


@given(margin=st.floats(-30, 30), step=st.floats(0.1, 10))
def test_a_larger_margin_costs_less(margin: float, step: float) -> None:
    pair_B = torch.tensor([margin, margin + step], dtype=torch.float64)
    zero_B = torch.zeros_like(pair_B)
    for loss_B in (
        dpo(pair_B, zero_B, zero_B, zero_B, beta=0.2),
        dpo(zero_B, -pair_B, zero_B, zero_B, beta=0.2, kind="apo_down"),
        dpo(pair_B, zero_B, zero_B, zero_B, beta=0.2, kind="apo_zero"),
        cpo(pair_B, zero_B, beta=0.2),
        simpo(pair_B, zero_B, beta=0.2, gamma=0.5),
        kto(pair_B, zero_B, torch.tensor([True, True]), torch.tensor(0.3), beta=0.2),
        -kto(pair_B, zero_B, torch.tensor([False, False]), torch.tensor(0.3), beta=0.2),
        orpo_odds(-(-pair_B).exp().clamp(1e-9, 1e3), zero_B - 1, beta=0.2),
    ):
        assert loss_B[1] <= loss_B[0]


@given(rows=quadruples)
def test_a_uniform_reference_makes_dpo_cpo_and_no_kl_makes_tdpo_dpo(rows: list[tuple[float, ...]]) -> None:
    chosen_B, rejected_B, ref_chosen_B, ref_rejected_B = as_columns(rows)
    constant_B = torch.full_like(chosen_B, -3.0)
    torch.testing.assert_close(
        dpo(chosen_B, rejected_B, constant_B, constant_B, beta=0.2), cpo(chosen_B, rejected_B, beta=0.2)
    )
    plain_B = dpo(chosen_B, rejected_B, ref_chosen_B, ref_rejected_B, beta=0.2)
    for alpha in (None, 0.7):
        token_B = tdpo(
            chosen_B, rejected_B, ref_chosen_B, ref_rejected_B, constant_B * 0, constant_B * 0, beta=0.2, alpha=alpha
        )
        torch.testing.assert_close(token_B, plain_B)


# --- numerics ----------------------------------------------------------------


def losses_of(chosen_B: Tensor, rejected_B: Tensor) -> dict[str, Tensor]:
    """Every loss of this module; the log-probs of the reference and the KLs are fixed."""
    zero_B = torch.zeros_like(chosen_B)
    kinds = {kind: dpo(chosen_B, rejected_B, zero_B, zero_B, beta=0.1, kind=kind) for kind in DPO_KINDS}
    return kinds | {
        "smoothed": dpo(chosen_B, rejected_B, zero_B, zero_B, beta=0.1, label_smoothing=0.1),
        "tdpo1": tdpo(chosen_B, rejected_B, zero_B, zero_B, zero_B + 0.25, zero_B + 0.125, beta=0.1, alpha=None),
        "tdpo2": tdpo(chosen_B, rejected_B, zero_B, zero_B, zero_B + 0.25, zero_B + 0.125, beta=0.1, alpha=0.5),
        "cpo": cpo(chosen_B, rejected_B, beta=0.1),
        "simpo": simpo(chosen_B, rejected_B, beta=2.0, gamma=0.5),
        "orpo": orpo_odds(-chosen_B.abs(), -rejected_B.abs(), beta=0.1),
        "kto": kto(chosen_B, rejected_B, zero_B == 0, torch.tensor(0.2), beta=0.1),
        "kto_bad": kto(chosen_B, rejected_B, zero_B != 0, torch.tensor(0.2), beta=0.1),
    }


EVERY_LOSS = tuple(losses_of(torch.zeros(1), torch.zeros(1)))


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_extreme_log_probs_give_finite_losses_and_gradients(name: str) -> None:
    chosen_B = torch.tensor([1e4, -1e4, 0.0, -1e4, -1e-12], requires_grad=True)
    rejected_B = torch.tensor([-1e4, 1e4, 0.0, 0.0, -1e-12], requires_grad=True)
    loss_B = losses_of(chosen_B, rejected_B)[name]
    assert loss_B.isfinite().all(), loss_B
    for grad_B in torch.autograd.grad(loss_B.sum(), [chosen_B, rejected_B]):
        assert grad_B.isfinite().all(), grad_B


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    chosen_B = (torch.randn(4, generator=generator, dtype=torch.float64) - 1).requires_grad_()
    rejected_B = (torch.randn(4, generator=generator, dtype=torch.float64) - 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda c, r: losses_of(c, r)[name], (chosen_B, rejected_B))


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_float32_agrees_with_float64_and_bfloat16_is_widened(name: str) -> None:
    chosen_B, rejected_B = torch.tensor([[-3.5, -60.0, -0.25], [-4.75, -10.0, -8.0]])  # exact in bfloat16
    wide_B = losses_of(chosen_B.double(), rejected_B.double())[name]
    narrow_B = losses_of(chosen_B, rejected_B)[name]
    assert narrow_B.dtype == torch.float32
    torch.testing.assert_close(narrow_B.double(), wide_B, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses_of(chosen_B.bfloat16(), rejected_B.bfloat16())[name], narrow_B)
