"""Best-of-N: which of some answers is the best of n, and how much likelier that makes an answer.

A score of NaN (a source failed) is never the best, and is counted as if the answer had not been drawn. Answers with
equal scores share their weight. Shape letters: G prompts, N answers to each, B sequences, M answers of the anchor.
"""

from __future__ import annotations

from functools import cache
from math import comb

import torch
from torch import Tensor

from kedge.core.errors import ShapeError


def best_of_weights(scores_GN: Tensor, *, n: int) -> Tensor:
    """Probability that each answer is the best of n drawn from its row (Nakano et al. 2021, appendix I), as float64.

    With k answers up to score s, the best of n is no better than s with probability C(k, n) / C(N, n). The mean of any
    number under these weights is an unbiased estimate of what it is for the best of n, from N >= n answers.

    >>> best_of_weights(torch.tensor([[1., 3., 2.], [5., 5., 0.]]), n=2).round(decimals=4).tolist()
    [[0.0, 0.6667, 0.3333], [0.5, 0.5, 0.0]]
    """
    count_G = (~scores_GN.isnan()).sum(dim=1)
    if n < 1 or bool((count_G < n).any()):
        raise ShapeError(f"the best of {n} needs {n} scored answers to each prompt, found {int(count_G.min())}")
    is_missing_GN = scores_GN.isnan()
    # Answers without a score stand last in order, where no scored answer counts them.
    known_GN = scores_GN.masked_fill(is_missing_GN, torch.inf)
    ordered_GN = known_GN.sort(dim=1).values
    at_most_GN = torch.searchsorted(ordered_GN, known_GN, right=True).minimum(count_G[:, None])
    below_GN = torch.searchsorted(ordered_GN, known_GN)
    width = scores_GN.shape[1]
    shares = {count: _shares(width, count, n) for count in set(count_G.tolist())}
    share_GK = torch.tensor([shares[count] for count in count_G.tolist()], dtype=torch.float64)
    gained_GN = share_GK.gather(1, at_most_GN) - share_GK.gather(1, below_GN.minimum(at_most_GN))
    return (gained_GN / (at_most_GN - below_GN).clamp(min=1)).masked_fill(is_missing_GN, 0.0)


def best_of_log_ratio(scores_B: Tensor, anchors_BM: Tensor, *, n: int) -> Tensor:
    """log π_best(y) / π(y) of answers y, π_best the best of n answers of π (Sessa et al. 2024, theorem 1), as float64.

    π_best(y) / π(y) = (F(y)^n − F₋(y)^n) / (F(y) − F₋(y)), with F and F₋ the probabilities that an answer of π scores
    at most, and below, what y does: n F^(n−1) where nothing ties. They are estimated from M answers of π, among which
    y itself is counted, so that no answer is impossible. The paper drops the term of ties; it is kept here.

    >>> best_of_log_ratio(torch.tensor([2.0]), torch.tensor([[1., 3., 4.]]), n=2).exp().tolist()
    [0.75]
    """
    of_B = (~anchors_BM.isnan()).sum(dim=1) + 1
    at_most_B = ((anchors_BM <= scores_B[:, None]).sum(dim=1) + 1).double() / of_B
    below_B = (anchors_BM < scores_B[:, None]).sum(dim=1).double() / of_B
    ratio_B = (at_most_B**n - below_B**n) / (at_most_B - below_B)
    return ratio_B.log().masked_fill(scores_B.isnan(), torch.nan)


@cache
def _shares(width: int, of: int, n: int) -> list[float]:
    """C(k, n) / C(of, n) for k from 0 to `width`; exact in whole numbers, and dear where these are large."""
    return [comb(k, n) / comb(of, n) for k in range(width + 1)]
