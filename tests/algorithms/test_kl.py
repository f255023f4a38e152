"""KL estimates against closed forms, and the controllers against arithmetic on paper."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.algorithms import AdaptiveKL, FixedKL, estimate
from kedge.algorithms.kl import Kind
from kedge.core.errors import CheckpointError, ConfigError, NumericsError

LN2, LN3 = math.log(2), math.log(3)

# p = 1/2 against 1/4: gap ln 2. p = 1/6 against 1/2: gap -ln 3.
LOGP_BT = torch.tensor([[1 / 2, 1 / 6]], dtype=torch.float64).log()
REF_BT = torch.tensor([[1 / 4, 1 / 2]], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [LN2, -LN3]),
        ("k2", [LN2**2 / 2, LN3**2 / 2]),
        ("k3", [1 / 2 - 1 + LN2, 3 - 1 - LN3]),  # e^(ref - p) - (ref - p) - 1
        ("abs", [LN2, LN3]),
    ],
)
def test_golden(kind: Kind, expected: list[float]) -> None:
    found_BT = estimate(LOGP_BT, REF_BT, kind=kind)
    torch.testing.assert_close(found_BT, torch.tensor([expected], dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", [1.0, 1.0]), ("k2", [LN2, -LN3]), ("k3", [1 - 1 / 2, 1 - 3.0]), ("abs", [1.0, -1.0])],
)
def test_gradient_in_the_policy(kind: Kind, expected: list[float]) -> None:
    logp_BT = LOGP_BT.clone().requires_grad_()
    estimate(logp_BT, REF_BT, kind=kind).sum().backward()
    torch.testing.assert_close(logp_BT.grad, torch.tensor([expected], dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda p: estimate(p, REF_BT, kind=kind), logp_BT)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_low_precision_is_widened_before_the_difference(kind: Kind) -> None:
    logp_BT, ref_BT = torch.tensor([[-4.0]], dtype=torch.bfloat16), torch.tensor([[-0.0078125]], dtype=torch.bfloat16)
    found_BT = estimate(logp_BT, ref_BT, kind=kind)  # in bfloat16 the gap -3.9921875 would round to -4
    gap = -3.9921875
    expected = {"k1": gap, "k2": gap * gap / 2, "k3": math.exp(-gap) + gap - 1, "abs": -gap}[kind]
    assert found_BT.dtype == torch.float32
    assert found_BT.item() == pytest.approx(expected, rel=1e-6)


def test_k3_keeps_its_digits_for_small_gaps() -> None:
    # k3 of a gap g is g^2 / 2 - g^3 / 6 + ...; e^x - x - 1 in float32 would give 0 or 1.2e-7
    found_BT = estimate(torch.tensor([[1e-4]]), torch.tensor([[0.0]]), kind="k3")
    assert found_BT.item() == pytest.approx(5e-9, rel=1e-3)


@given(st.lists(st.floats(-8, 8), min_size=1, max_size=8), st.floats(-8, 0))
@settings(max_examples=60)
def test_signs(gaps: list[float], ref: float) -> None:
    ref_BT = torch.full((1, len(gaps)), ref, dtype=torch.float64)
    logp_BT = ref_BT + torch.tensor([gaps], dtype=torch.float64)
    assert (estimate(logp_BT, ref_BT, kind="k3") >= 0).all()
    assert (estimate(logp_BT, ref_BT, kind="k2") >= 0).all()
    assert torch.equal(estimate(logp_BT, ref_BT, kind="k1"), -estimate(ref_BT, logp_BT, kind="k1"))
    assert torch.equal(estimate(logp_BT, ref_BT, kind="k1").abs(), estimate(logp_BT, ref_BT, kind="abs"))
    for kind in ("k1", "k2", "k3", "abs"):
        assert (estimate(ref_BT, ref_BT, kind=kind) == 0).all()


@given(st.lists(st.floats(-3, 3), min_size=3, max_size=5), st.lists(st.floats(-3, 3), min_size=5, max_size=5))
@settings(max_examples=40)
def test_k1_and_k3_are_unbiased(logits: list[float], ref_logits: list[float]) -> None:
    logp_BT = torch.tensor([logits], dtype=torch.float64).log_softmax(dim=1)
    ref_BT = torch.tensor([ref_logits[: len(logits)]], dtype=torch.float64).log_softmax(dim=1)
    exact = torch.nn.functional.kl_div(ref_BT, logp_BT, reduction="sum", log_target=True)
    for kind in ("k1", "k3"):
        expected = (logp_BT.exp() * estimate(logp_BT, ref_BT, kind=kind)).sum()
        torch.testing.assert_close(expected, exact)


def test_an_unknown_kind_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as error:
        estimate(LOGP_BT, REF_BT, kind="k33")  # pyright: ignore[reportArgumentType]
    assert str(error.value) == "kind: found 'k33' (did you mean 'k3'?), expected k1, k2, k3, abs"


def test_fixed_stays() -> None:
    controller = FixedKL(0.05)
    controller.update(1e6, 512)
    assert controller.coef == 0.05
    assert controller.state() == {"coef": 0.05}


@pytest.mark.parametrize(
    ("observed", "n", "expected"),
    [
        (12.0, 50, 0.3 * 1.1),  # error 1 clipped to 0.2; 1 + 0.2 * 50 / 100
        (0.0, 50, 0.3 * 0.9),  # error -1 clipped to -0.2
        (6.6, 50, 0.3 * 1.05),  # error 0.1
        (5.4, 200, 0.3 * 0.8),  # error -0.1; 1 - 0.1 * 2
        (-3.0, 100, 0.3 * 0.8),  # a negative estimate counts as far below
        (6.0, 50, 0.3),
        (12.0, 0, 0.3),
    ],
)
def test_adaptive_golden(observed: float, n: int, expected: float) -> None:
    controller = AdaptiveKL(0.3, target=6.0, horizon=100)
    controller.update(observed, n)
    assert controller.coef == pytest.approx(expected, rel=1e-12)


def test_adaptive_compounds() -> None:
    controller = AdaptiveKL(0.5, target=2.0, horizon=10)
    controller.update(9.0, 5)  # 1 + 0.2 / 2 = 1.1
    controller.update(1.9, 10)  # error -0.05, 1 - 0.05 = 0.95
    assert controller.coef == pytest.approx(0.5 * 1.1 * 0.95, rel=1e-12)


@given(st.floats(-100, 100), st.integers(1, 49), st.floats(0.001, 10))
@settings(max_examples=60)
def test_adaptive_moves_towards_the_target(observed: float, n: int, coef: float) -> None:
    controller = AdaptiveKL(coef, target=5.0, horizon=10.0)
    controller.update(observed, n)
    assert controller.coef > 0
    if observed > 5.01:
        assert controller.coef > coef
    if observed < 4.99:
        assert controller.coef < coef


def test_a_horizon_that_would_turn_the_sign_is_refused() -> None:
    controller = AdaptiveKL(0.5, target=6.0, horizon=10)
    controller.update(0.0, 49)
    assert controller.coef == pytest.approx(0.5 * 0.02)
    controller.coef = 0.5
    with pytest.raises(ConfigError) as error:
        controller.update(0.0, 60)  # 1 - 0.2 * 6 = -0.2
    assert str(error.value) == (
        "horizon: found 10 with 60 sequences an update, which would turn the KL coefficient to -0.1; "
        "use a horizon above 12, the usual is 10000"
    )
    assert controller.coef == 0.5
    with pytest.raises(ConfigError):
        controller.update(0.0, 50)  # exactly 0 would never come back
    controller.update(1e9, 60)
    assert controller.coef == pytest.approx(0.5 * 2.2)


@pytest.mark.parametrize("controller", [FixedKL(0.2), AdaptiveKL(0.2, target=6.0, horizon=100)])
@pytest.mark.parametrize("observed", [math.nan, math.inf, -math.inf])
def test_a_kl_that_is_not_finite_changes_nothing(controller: FixedKL | AdaptiveKL, observed: float) -> None:
    with pytest.raises(NumericsError) as error:
        controller.update(observed, 10)
    assert str(error.value) == (
        f"the observed KL is {observed}; the coefficient was not changed. Look for log-probs that are not finite"
    )
    assert controller.coef == 0.2


@pytest.mark.parametrize("controller", [FixedKL(0.2), AdaptiveKL(0.2, target=6.0, horizon=100)])
def test_state_survives_json(controller: FixedKL | AdaptiveKL) -> None:
    controller.load(json.loads(json.dumps({"coef": 0.1 + 0.2})))
    assert controller.coef == 0.1 + 0.2
    assert json.loads(json.dumps(controller.state())) == {"coef": 0.1 + 0.2}
    controller.load({"coef": 0})
    assert controller.coef == 0.0
    for bad in (math.nan, math.inf, -0.1, "0.1", None):
        with pytest.raises(CheckpointError) as error:
            controller.load({"coef": bad})
        assert str(error.value) == (
            f"KL state: found coef {bad!r} in {{'coef': {bad!r}}}, expected a finite number, 0 or more"
        )
    with pytest.raises(CheckpointError):
        controller.load({})
    assert controller.coef == 0.0


def test_a_resumed_controller_goes_on_to_the_last_bit() -> None:
    whole, first, second = (AdaptiveKL(0.3, target=6.0, horizon=77) for _ in range(3))
    for observed in (1.0, 7.3, 6.1, 90.0):
        whole.update(observed, 13)
    for observed in (1.0, 7.3):
        first.update(observed, 13)
    second.load(json.loads(json.dumps(first.state())))
    for observed in (6.1, 90.0):
        second.update(observed, 13)
    assert second.coef == whole.coef


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("coef", -0.1, "0 or more"),
        ("coef", math.inf, "0 or more"),
        ("coef", math.nan, "0 or more"),
        ("target", 0.0, "more than 0"),
        ("target", -1.0, "more than 0"),
        ("target", math.inf, "more than 0"),
        ("horizon", 0, "more than 0"),
        ("horizon", -5, "more than 0"),
        ("horizon", math.nan, "more than 0"),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: float, allowed: str) -> None:
    good = {"coef": 0.1, "target": 6.0, "horizon": 100.0} | {name: value}
    message = f"{name}: found {value}, expected a finite number, {allowed}"
    with pytest.raises(ConfigError) as error:
        AdaptiveKL(good["coef"], target=good["target"], horizon=good["horizon"])
    assert str(error.value) == message
    if name == "coef":
        with pytest.raises(ConfigError) as error:
            FixedKL(value)
        assert str(error.value) == message


def test_a_coefficient_of_zero_is_allowed() -> None:
    assert FixedKL(0.0).coef == 0.0
    assert AdaptiveKL(0.0, target=0.5, horizon=0.5).coef == 0.0
