"""The numbers rows make for themselves, the tokens that are allowed, and how often each is drawn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.rollout.steps import allowed, draw, folded, log_waits, row_keys


def test_the_numbers_of_a_key_are_the_published_ones_of_splitmix64() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]  # seed 1234567
    expected = [math.log(-math.log1p(-(number >> 11) / 2**53)) for number in published]
    waits = log_waits(torch.tensor([1234567]), 4)[0].tolist()
    assert waits == pytest.approx(expected, rel=1e-5)


def test_keys_are_those_of_the_slow_reference(slow_key: Callable[..., int]) -> None:
    for seed in (0, 7, -3, 2**63 - 1, 2**63 + 5):
        keys = row_keys(seed, torch.tensor([4, 0, -9]), torch.tensor([0, 2, 1])).tolist()
        expected = [slow_key(seed, 4, 0), slow_key(seed, 0, 2), slow_key(seed, -9, 1)]
        assert [key % 2**64 for key in keys] == expected


def test_no_two_places_share_a_key() -> None:
    places = torch.cartesian_prod(torch.arange(40), torch.arange(10), torch.arange(30))
    keys = [folded(row_keys(seed, places[:, 0], places[:, 1]), places[:, 2]) for seed in range(3)]
    assert len(torch.cat(keys).unique()) == 3 * 40 * 10 * 30


def test_a_rows_numbers_do_not_depend_on_its_neighbours() -> None:
    keys_B = torch.tensor([11, -5, 2**40])
    together_BV = log_waits(keys_B, 50)
    assert torch.equal(together_BV[1:2], log_waits(keys_B[1:2], 50))
    assert torch.equal(together_BV[:, :20], log_waits(keys_B, 20))


@given(
    logits=st.lists(st.integers(-6, 6), min_size=1, max_size=12),
    top_k=st.none() | st.integers(1, 13),
    top_p=st.sampled_from([0.05, 0.3, 0.5, 0.77, 0.9, 0.999, 1.0]),
)
def test_allowed_tokens_are_those_of_the_slow_reference(
    slow_allowed: Callable[..., set[int]], logits: list[int], top_k: int | None, top_p: float
) -> None:
    # Halves make many ties; the second row has none and must not be touched by the first.
    rows = [[logit / 2 for logit in logits], [logit * 0.37 + token * 0.011 for token, logit in enumerate(logits)]]
    kept_BV = allowed(torch.tensor(rows), top_k=top_k, top_p=top_p)
    for row, kept_V in zip(rows, kept_BV, strict=True):
        exact = torch.tensor(row).tolist()
        assert set(kept_V.nonzero()[:, 0].tolist()) == slow_allowed(exact, top_k, top_p)


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (None, 0.25, [0]),  # four equal tokens: one is exactly a quarter
        (None, 0.26, [0, 1]),
        (None, 0.5, [0, 1]),
        (None, 0.75, [0, 1, 2]),
        (None, 0.76, [0, 1, 2, 3]),
        (3, 1.0, [0, 1, 2]),
        (2, 0.5, [0]),  # half of what top_k left, not of everything
    ],
)
def test_mass_at_the_boundary_is_enough_and_lower_ids_win_ties(
    top_k: int | None, top_p: float, expected: list[int]
) -> None:
    kept_BV = allowed(torch.full((1, 4), -2.5), top_k=top_k, top_p=top_p)
    assert kept_BV[0].nonzero()[:, 0].tolist() == expected


def test_a_forbidden_token_is_never_drawn() -> None:
    scaled_BV = torch.tensor([[-torch.inf, 0.0, -torch.inf, -4.0]]).expand(3000, 4)
    tokens = draw(scaled_BV, torch.arange(3000), top_k=None, top_p=1.0)
    assert set(tokens.tolist()) == {1, 3}


def _chi_square(drawn: Counter[int], probabilities: dict[int, float], draws: int) -> float:
    assert set(drawn) <= set(probabilities)
    return sum((drawn[token] - draws * p) ** 2 / (draws * p) for token, p in probabilities.items())


@pytest.mark.parametrize(
    ("top_k", "top_p", "probabilities", "limit"),
    [  # the limit is the 99.9th percentile of chi-square with one degree less than there are tokens
        (None, 1.0, {0: 0.1, 1: 0.4, 2: 0.05, 3: 0.25, 4: 0.2}, 18.47),
        (3, 1.0, {1: 0.4 / 0.85, 3: 0.25 / 0.85, 4: 0.2 / 0.85}, 13.82),
        (None, 0.6, {1: 0.4 / 0.65, 3: 0.25 / 0.65}, 10.83),
    ],
)
def test_tokens_are_drawn_as_often_as_they_are_likely(
    top_k: int | None, top_p: float, probabilities: dict[int, float], limit: float
) -> None:
    draws = 20_000
    scaled_BV = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2]).log().expand(draws, 5) + 3.0
    key_B = folded(row_keys(5, torch.arange(draws) // 100, torch.arange(draws) % 10), torch.arange(draws) % 100 // 10)
    drawn = Counter(draw(scaled_BV, key_B, top_k=top_k, top_p=top_p).tolist())
    assert _chi_square(drawn, probabilities, draws) < limit


def test_neighbouring_places_are_independent() -> None:
    draws, chance = 20_000, {0: 0.2, 1: 0.3, 2: 0.5}
    scaled_BV = torch.tensor(list(chance.values())).log().expand(draws, 3)
    key_B = row_keys(1, torch.arange(draws), torch.zeros(draws, dtype=torch.int64))
    first, second = (
        draw(scaled_BV, folded(key_B, torch.full_like(key_B, place)), top_k=None, top_p=1.0) for place in (4, 5)
    )
    pairs = Counter((first * 3 + second).tolist())
    expected = {a * 3 + b: p * q for a, p in chance.items() for b, q in chance.items()}
    assert _chi_square(pairs, expected, draws) < 26.12  # 8 degrees of freedom
