"""What is said of synthetic curves: of noise, collapses, rises, flat ones; and that units and order change nothing."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
from gold_curves import CASES, PARAMETERS, PEAKS, attempt, points, shape_of, wrong_collapse, wrong_peak
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.monitor.gold_law import Kind, fit_law
from kedge.monitor.gold_peak import observed_peak
from kedge.monitor.overoptimisation import Fit, NoFit, fit

KINDS = st.sampled_from(sorted(PARAMETERS))


@pytest.mark.parametrize("case", CASES)
def test_what_is_said_of_a_curve_is_right(case: str) -> None:
    assert attempt(case) is None


@pytest.mark.parametrize("kind", sorted(PARAMETERS))
@pytest.mark.parametrize("shape", ["drops", "slides", "rises and crashes"])
def test_a_collapse_is_never_called_not_bent(kind: Kind, shape: str) -> None:
    """Also where half of the points are there, and much noise: whatever is said, gold went down."""
    said = Counter(fit(*points(kind, shape, 0.25, seed, size=30), kind=kind).outcome for seed in range(40))
    assert set(said) <= {"collapsed", "fallen", "peak"}, said
    assert shape == "slides" or said["collapsed"] >= 38, said


@settings(max_examples=25, deadline=None, derandomize=True)
@given(kind=KINDS, scale=st.floats(0.01, 100), shift=st.floats(-50, 50), seed=st.integers(0, 99))
def test_units_of_gold_do_not_matter(kind: Kind, scale: float, shift: float, seed: int) -> None:
    kl, gold = points(kind, "drops", 0.1, seed)
    plain, other = fit(kl, gold, kind=kind), fit(kl, [shift + scale * score for score in gold], kind=kind)
    assert isinstance(plain, Fit)
    assert isinstance(other, Fit)
    assert other.outcome == plain.outcome
    assert other.law.r2 == pytest.approx(plain.law.r2, rel=1e-6)
    assert other.peak_kl == pytest.approx(plain.peak_kl, rel=1e-6)
    assert other.peak_kl_interval == pytest.approx(plain.peak_kl_interval, rel=1e-5)
    assert other.collapse_kl == plain.collapse_kl


@settings(max_examples=25, deadline=None, derandomize=True)
@given(kind=KINDS, peak=st.floats(1.2, 3.5), beta=st.floats(0.3, 2.0), seed=st.integers(0, 99))
def test_a_curve_of_the_law_has_its_peak_where_the_law_has_it(kind: Kind, peak: float, beta: float, seed: int) -> None:
    rng = random.Random(seed)
    alpha = beta * (math.log(peak) + 1) if kind == "rl" else 2 * beta * peak
    d = [0.1 * step for step in range(1, 71)]
    gold = [x * (alpha - beta * (math.log(x) if kind == "rl" else x)) + rng.gauss(0, 0.05) for x in d]
    curve = fit([x * x for x in d], gold, kind=kind)
    assert isinstance(curve, Fit), curve
    assert curve.outcome == "peak", curve.in_words()
    assert wrong_peak(curve, peak) is None


@pytest.mark.parametrize("kind", sorted(PARAMETERS))
def test_r2_and_the_range_are_those_of_the_points_that_were_fitted(kind: Kind) -> None:
    kl, gold = points(kind, "drops", 0.1, 5)
    curve = fit(kl, gold, kind=kind)
    assert isinstance(curve, Fit)
    law = curve.law
    used = [(nats, score) for nats, score in zip(kl, gold, strict=True) if nats <= law.d_range[1] ** 2 + 1e-9]
    assert law.num_points == len(used)
    assert curve.holds_until == pytest.approx(law.d_range[1] ** 2)
    scores = np.array([score for _, score in used])
    residuals = scores - np.array([law.predicted(math.sqrt(nats)) for nats, _ in used])
    assert law.r2 == pytest.approx(1 - float(residuals @ residuals) / float(np.square(scores - scores.mean()).sum()))
    assert wrong_collapse(curve) is None


def test_a_curve_without_noise_but_of_another_form_is_fitted_as_far_as_it_goes() -> None:
    """Points of best-of-N are smooth: what is left over goes together, and is small."""
    d = [0.1 * step for step in range(1, 41)]
    gold = [1.2 * x - 0.25 * x * x + 0.01 * math.sin(3 * x) for x in d]
    curve = fit([x * x for x in d], gold, kind="best_of_n")
    assert isinstance(curve, Fit)
    assert curve.holds_until is None
    assert curve.law.r2 > 0.98
    assert curve.peak_kl == pytest.approx(2.4**2, rel=0.05)


def test_resampled_prompts_make_the_intervals() -> None:
    """Prompts differ in their level and in their bend: the interval of the peak is that of resampled prompts."""
    rng = np.random.default_rng(0)
    d_N = np.linspace(0.0, 4.0, 24)
    bends_P = rng.normal(0.25, 0.05, size=60)
    gold_PN = rng.normal(0, 3, size=(60, 1)) + 1.2 * d_N - bends_P[:, None] * d_N**2
    resampled = [gold_PN[rng.integers(0, 60, 60)].mean(axis=0).tolist() for _ in range(400)]
    curve = fit((d_N**2).tolist(), gold_PN.mean(axis=0).tolist(), kind="best_of_n", resampled=resampled)
    assert isinstance(curve, Fit)
    low, high = (math.sqrt(kl) for kl in curve.peak_kl_interval)
    error = 0.05 / math.sqrt(60) / 0.25  # of β, as a share: that of the peak's d = α / 2β
    assert high / low == pytest.approx(math.exp(2 * 1.96 * error), rel=0.03)
    assert curve.beta_interval[1] - curve.beta_interval[0] == pytest.approx(2 * 1.96 * 0.05 / math.sqrt(60), rel=0.25)


@pytest.mark.parametrize(("most", "words"), [(61, "a peak predicted at d = "), (400, "a peak of the law at d = ")])
def test_a_levelled_curve_has_not_fallen_and_is_not_said_to_have(most: int, words: str) -> None:
    kl = [0.1 * step for step in range(1, most)]
    curve = fit(kl, [1 - math.exp(-math.sqrt(nats)) for nats in kl], kind="rl")
    assert isinstance(curve, Fit)
    assert curve.in_words().startswith(f"gold bends, with {words}")
    assert (curve.peak_kl > kl[-1]) == (most == 61)


def test_the_peak_that_was_measured_is_told_where_the_law_has_none() -> None:
    kl, gold = points("rl", "rises and crashes", 0.05, 3)
    curve = fit(kl, gold, kind="rl")
    assert isinstance(curve, NoFit)
    assert curve.observed is not None
    best = math.sqrt(curve.observed.kl)
    assert f"after a peak at d = {best:.3g} [" in curve.in_words()
    assert 3.5 < best < 4.1


def test_residuals_redrawn_spread_as_the_covariance_says() -> None:
    rng = random.Random(1)
    d_N = np.linspace(0.1, 6, 80)
    truth = shape_of("rl", "bends")
    curve = fit_law(d_N, np.array([truth(float(d)) + rng.gauss(0, 0.1) for d in d_N]), "rl")
    spread = curve.redrawn().std(axis=0)
    widths = np.array([high - low for low, high in curve.intervals])
    assert spread * 2 * 1.96 == pytest.approx(widths, rel=0.1)
    assert PEAKS["rl"] == pytest.approx(math.exp(curve.law.alpha / curve.law.beta - 1), rel=0.1)


@pytest.mark.parametrize("lasting", [0.0, 0.5])
def test_what_lasts_from_point_to_point_is_not_underestimated_because_a_law_was_fitted(lasting: float) -> None:
    rng = np.random.default_rng(2)
    d_N = np.linspace(0.0, 6.0, 50)
    seen: list[float] = []
    for _ in range(300):
        noise_N = rng.normal(size=50)
        for at in range(1, 50):
            noise_N[at] = lasting * noise_N[at - 1] + math.sqrt(1 - lasting**2) * noise_N[at]
        widening = fit_law(d_N, noise_N, "rl").widening
        seen.append((widening - 1) / (widening + 1))
    # Without lasting noise, what is below 0 counts as 0: the mean of half a normal of 0.13 to 0.15 is left.
    assert np.mean(seen) == pytest.approx(lasting or 0.06, abs=0.04)


def test_the_measured_peak_of_a_cliff_is_at_its_edge() -> None:
    kl = np.arange(40, dtype=np.float64)
    gold = np.where(kl <= 25, kl, 0.0) + np.random.default_rng(0).normal(0, 0.1, 40)
    found = observed_peak(kl, gold)
    assert found is not None
    assert found.has_fallen
    assert found.kl_interval == (21.0, 25.0)
