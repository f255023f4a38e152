"""Several reward sources into one score: ensembles, weights, gates.

A source that failed for an answer says so with NaN, and whatever reads that NaN is NaN: the caller masks such rows.
Nothing is averaged around a gap, because a mean over fewer members is another quantity.
Shape letters: K sources, B sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.core.errors import ShapeError
from kedge.core.loss import widen


def ensemble_mean(scores_KB: Tensor) -> Tensor:
    """Mean of the members (Coste et al. 2023, section 3, "mean optimisation").

    >>> ensemble_mean(torch.tensor([[1., 4.], [3., 8.]])).tolist()
    [2.0, 6.0]
    """
    return widen(scores_KB).mean(dim=0)


def worst_case(scores_KB: Tensor) -> Tensor:
    """The lowest member (Coste et al. 2023, section 3, "worst-case optimisation").

    >>> worst_case(torch.tensor([[1., 8.], [3., 4.]])).tolist()
    [1.0, 4.0]
    """
    return widen(scores_KB).amin(dim=0)


def uncertainty_weighted(scores_KB: Tensor, *, coef: float) -> Tensor:
    """mean - coef variance over the members (Coste et al. 2023, section 3, "uncertainty-weighted optimisation").

    The variance is that of the population (divided by K), as in the paper.

    >>> uncertainty_weighted(torch.tensor([[1., 4.], [3., 8.]]), coef=0.5).tolist()
    [1.5, 4.0]
    """
    scores_KB = widen(scores_KB)
    return scores_KB.mean(dim=0) - coef * scores_KB.var(dim=0, correction=0)


def weighted_sum_of(scores_KB: Tensor, weights_K: Tensor) -> Tensor:
    """Sum over the sources of weight times score. A weight of 0 does not silence a NaN.

    >>> weighted_sum_of(torch.tensor([[1., 4.], [3., 8.]]), torch.tensor([2., -1.])).tolist()
    [-1.0, 0.0]
    """
    if weights_K.shape != scores_KB.shape[:1]:
        raise ShapeError(f"weights_K has shape {tuple(weights_K.shape)}, expected {tuple(scores_KB.shape[:1])}")
    return (widen(weights_K)[:, None] * widen(scores_KB)).sum(dim=0)


def gated(helpful_B: Tensor, safe_B: Tensor, *, threshold: float, is_risky_B: Tensor | None = None) -> Tensor:
    """The safety score where it is below the threshold or the prompt is risky, else helpfulness.

    Llama 2 (Touvron et al. 2023, section 3.2.3, the combined reward R_c) with 0.15 on probabilities; its whitening
    of the logits is left out. Any two sources will do: the second is a gate that the first must pass (a verifier
    with scores 0 and 1 and threshold 1 gives a style score to right answers only). The score that is not chosen may
    be NaN; a NaN gate gives NaN, unless the prompt is risky, when it is the score itself.

    >>> helpful_B, safe_B = torch.tensor([0.75, 1., 0.5]), torch.tensor([0.125, 0.25, 0.375])
    >>> gated(helpful_B, safe_B, threshold=0.15, is_risky_B=torch.tensor([False, False, True])).tolist()
    [0.125, 1.0, 0.375]
    """
    helpful_B, safe_B = widen(helpful_B), widen(safe_B)
    holds_B = ~(safe_B >= threshold)  # also where the gate is NaN
    if is_risky_B is not None:
        holds_B = holds_B | is_risky_B
    return torch.where(holds_B, safe_B, helpful_B)
