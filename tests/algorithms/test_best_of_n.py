"""Which answer is the best of n, against counting all draws; and the ratio of BOND, against exact distributions."""

from __future__ import annotations

import math
from itertools import combinations, product

import pytest
import torch

from kedge.algorithms.best_of_n import best_of_log_ratio, best_of_weights
from kedge.core.errors import ShapeError
from kedge.core.stats import best_of_kl

NAN = math.nan


def by_counting(scores: list[float], n: int) -> list[float]:
    """Every draw of n different answers, its best ones sharing the draw."""
    weights = [0.0] * len(scores)
    there = [i for i, score in enumerate(scores) if not math.isnan(score)]
    draws = list(combinations(there, n))
    for draw in draws:
        top = max(scores[i] for i in draw)
        best = [i for i in draw if scores[i] == top]
        for i in best:
            weights[i] += 1 / len(best) / len(draws)
    return weights


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_weights_are_those_of_counting_every_draw(n: int) -> None:
    rows = [[0.5, -1.0, 3.0, 2.0, 0.0], [2.0, 1.0, 2.0, 2.0, -4.0], [1.0, 1.0, 1.0, 1.0, 1.0]]
    found = best_of_weights(torch.tensor(rows), n=n)
    torch.testing.assert_close(found, torch.tensor([by_counting(row, n) for row in rows], dtype=torch.float64))


def test_an_answer_without_a_score_was_not_drawn() -> None:
    rows = [[0.5, NAN, 3.0, 2.0], [4.0, 5.0, 3.0, 1.0]]
    found = best_of_weights(torch.tensor(rows), n=2)
    torch.testing.assert_close(found, torch.tensor([by_counting(row, 2) for row in rows], dtype=torch.float64))
    with pytest.raises(ShapeError, match="the best of 4 needs 4 scored answers to each prompt, found 3"):
        best_of_weights(torch.tensor(rows), n=4)


def best_distribution(probs: list[float], scores: list[float], n: int) -> list[float]:
    """Of one draw of n independent answers, by summing over all of them."""
    found = [0.0] * len(probs)
    for draw in product(range(len(probs)), repeat=n):
        chance = math.prod(probs[i] for i in draw)
        top = max(scores[i] for i in draw)
        best = [i for i in draw if scores[i] == top]
        for i in best:
            found[i] += chance / len(best)
    return found


@pytest.mark.parametrize("scores", [[3.0, 1.0, 0.0, 2.0], [3.0, 1.0, 1.0, 3.0]])
def test_the_ratio_is_that_of_the_best_of_n_to_one_answer(scores: list[float]) -> None:
    """With so many anchors that the answer itself does not count, the ratio is that of the exact distributions."""
    probs, n = [0.1, 0.4, 0.3, 0.2], 3
    anchors_M = torch.tensor([score for score, p in zip(scores, probs, strict=True) for _ in range(round(p * 40_000))])
    found = best_of_log_ratio(torch.tensor(scores), anchors_M.expand(4, -1), n=n).exp()
    exact = [q / p for q, p in zip(best_distribution(probs, scores, n), probs, strict=True)]
    torch.testing.assert_close(found, torch.tensor(exact, dtype=torch.float64), rtol=1e-3, atol=0)


def test_few_anchors_on_paper() -> None:
    # Scores 1, 1, 4 and NaN of the anchor. y = 1: of these three and y 3/4 are at most 1, none is below: (27/64)/(3/4).
    # y = 0: 1/4 and 0: (1/64)/(1/4). y = 9: 1 and 3/4: (1 - 27/64)/(1/4).
    anchors_BM = torch.tensor([1.0, 1.0, 4.0, NAN]).expand(4, -1)
    found = best_of_log_ratio(torch.tensor([1.0, 0.0, 9.0, NAN]), anchors_BM, n=3)
    expected = torch.tensor([9 / 16, 1 / 16, 37 / 16, NAN], dtype=torch.float64).log()
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("n", [2, 4, 16])
def test_the_formula_of_kl_is_a_bound_and_tight_without_ties(n: int) -> None:
    def kl(num_scores: int, num_answers: int) -> float:
        """Of uniformly likely answers that share so many scores: F^n − F₋^n, spread within ties."""
        size = num_answers // num_scores
        best = [((i + 1) / num_scores) ** n - (i / num_scores) ** n for i in range(num_scores)]
        return sum(p * math.log(p / size * num_answers) for p in best)

    assert kl(2, 4096) < kl(64, 4096) < kl(4096, 4096) < best_of_kl(n)
    assert kl(2, 4096) < 0.8 * best_of_kl(n)
    assert kl(4096, 4096) == pytest.approx(best_of_kl(n), rel=1e-3)
