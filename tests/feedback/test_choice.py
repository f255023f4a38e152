"""Which pairs are asked: worth, rank-one updates, random shares, held-out pairs, near-duplicates, propensities."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.core.errors import DataError
from kedge.feedback.choice import AtRandom, Chosen, DOptimal, Ensemble, Uncertain, choose, laplace_covariance, projected


def d_optimal(seed: int, *, pairs: int = 60, features: int = 5) -> DOptimal:
    rng = np.random.default_rng(seed)
    x_ND = rng.normal(size=(pairs, features))
    half = rng.normal(size=(features, features))
    return DOptimal(
        features_ND=x_ND, covariance_DD=half @ half.T + 0.1 * np.eye(features), p_N=rng.uniform(0.05, 0.95, size=pairs)
    )


def indices(chosen: list[Chosen]) -> list[int]:
    return [pair.index for pair in chosen]


@pytest.mark.parametrize("seed", range(5))
def test_rank_one_updates_choose_as_whole_inverses_do(seed: int) -> None:
    """After each pair, Σ is the inverse of its precision plus p (1 − p) x xᵀ."""
    pool = d_optimal(seed)
    precision_DD, left, expected = np.linalg.inv(pool.covariance_DD), set(range(pool.pairs)), list[int]()
    for _ in range(20):
        covariance_DD = np.linalg.inv(precision_DD)
        worth = {
            i: pool.p_N[i] * (1 - pool.p_N[i]) * float(pool.features_ND[i] @ covariance_DD @ pool.features_ND[i])
            for i in left
        }
        best = max(worth, key=lambda i: worth[i])
        x_D = pool.features_ND[best]
        precision_DD = precision_DD + pool.p_N[best] * (1 - pool.p_N[best]) * np.outer(x_D, x_D)
        left.remove(best)
        expected.append(best)
    assert indices(choose(pool, count=20, seed=0, random_share=0)) == expected


def test_d_optimal_does_not_ask_the_same_direction_twice() -> None:
    features_ND = np.array([[3.0, 0.0], [2.9, 0.0], [2.8, 0.0], [0.0, 1.0]])
    pool = DOptimal(features_ND=features_ND, covariance_DD=4 * np.eye(2), p_N=np.full(4, 0.5))
    assert indices(choose(pool, count=2, seed=0, random_share=0)) == [0, 3]


def test_ensemble_and_uncertain_by_hand() -> None:
    p_MN = np.array([[0.9, 0.5, 0.2, 0.6], [0.1, 0.5, 0.3, 0.4]])
    assert indices(choose(Ensemble(p_MN=p_MN), count=3, seed=0, random_share=0)) == [0, 3, 2]
    assert indices(choose(Uncertain(p_N=p_MN[1]), count=3, seed=0, random_share=0)) == [1, 3, 2]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1_000), st.integers(0, 40), st.integers(0, 15), st.floats(0, 1), st.integers(1, 30))
def test_what_is_chosen_is_different_and_shares_no_group(
    seed: int, count: int, heldout: int, share: float, groups: int
) -> None:
    pool = d_optimal(seed)
    names = [number % groups for number in range(pool.pairs)]
    chosen = choose(pool, count=count, seed=seed, random_share=share, heldout=heldout, near_duplicates=names)
    own = [names[pair.index] for pair in chosen]
    assert len(set(own)) == len(own) == min(groups, count + heldout)
    assert all(0 < pair.propensity <= 1 for pair in chosen)
    reasons = Counter(pair.reason for pair in chosen)
    assert reasons["heldout"] == min(heldout, groups)
    assert reasons["random"] <= round(share * count)
    assert choose(pool, count=count, seed=seed, random_share=share, heldout=heldout, near_duplicates=names) == chosen


def test_a_fifth_is_random_by_default() -> None:
    reasons = Counter(pair.reason for pair in choose(d_optimal(0), count=20, seed=0))
    assert reasons == {"d_optimal": 16, "random": 4}
    assert {pair.reason for pair in choose(AtRandom(pairs=30), count=20, seed=0)} == {"random"}


def test_held_out_pairs_do_not_depend_on_the_model() -> None:
    """Drawn before the model is asked: whatever it says, the same ones."""
    first = [pair for pair in choose(d_optimal(0), count=10, seed=5, heldout=8) if pair.reason == "heldout"]
    other = [pair for pair in choose(d_optimal(1), count=30, seed=5, heldout=8) if pair.reason == "heldout"]
    assert first == other
    assert {pair.propensity for pair in first} == {8 / 60}


def test_propensities_are_the_shares_of_many_draws() -> None:
    """Each pair is drawn as often as it says, and what is counted by 1 / propensity has the size of the pool."""
    pool, names = Uncertain(p_N=np.linspace(0.5, 1, 12)), [0, 0, 0, 1, 1, 2, 2, 4, 5, 6, 7, 8]
    times, said, draws = Counter[int](), dict[int, float](), 1_500
    weighed = 0.0
    for seed in range(draws):
        for pair in choose(pool, count=5, seed=seed, random_share=0.6, near_duplicates=names):
            times[pair.index] += 1
            said[pair.index] = pair.propensity
            weighed += 1 / pair.propensity / draws
    assert set(times) == {0, 3, *range(5, 12)}  # 0 and 3 are the best of their groups and shut out 1, 2 and 4
    assert times[0] == times[3] == draws
    for index, propensity in said.items():
        assert times[index] / draws == pytest.approx(propensity, abs=0.05)
    assert weighed == pytest.approx(9, rel=0.03)  # 12 less the near-duplicates of the certain ones


def test_laplace_covariance_and_projection() -> None:
    rng = np.random.default_rng(0)
    x_ND, p_N = rng.normal(size=(40, 3)), rng.uniform(0.1, 0.9, size=40)
    covariance_DD = laplace_covariance(x_ND, p_N, precision=2.0)
    precision_DD = sum(p * (1 - p) * np.outer(x, x) for x, p in zip(x_ND, p_N, strict=True)) + 2 * np.eye(3)
    assert covariance_DD @ precision_DD == pytest.approx(np.eye(3), abs=1e-9)
    wide_ND = rng.normal(size=(20, 3_000))
    ratio = np.linalg.norm(projected(wide_ND, seed=1), axis=1) / np.linalg.norm(wide_ND, axis=1)
    assert ratio == pytest.approx(np.ones(20), abs=0.2)
    assert projected(x_ND, seed=1) is x_ND


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "fewer than none": ({"count": -1}, "found count -1"),
    "held-out fewer than none": ({"count": 1, "heldout": -2}, "heldout -2"),
    "share above 1": ({"count": 1, "random_share": 1.5}, r"from 0 to 1: found 1\.5"),
    "groups missing": ({"count": 1, "near_duplicates": [1]}, "found 1 for 60 pairs"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_refused(case: str) -> None:
    options, message = CASES[case]
    with pytest.raises(DataError, match=message):
        choose(d_optimal(0), seed=0, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["active_choice", "simulated_people"])
def test_the_benchmarks_hold(name: str) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    assert __import__(name).main() == 0
