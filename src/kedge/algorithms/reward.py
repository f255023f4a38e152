"""Losses of reward models: pairs (Bradley-Terry) and rankings of K answers (Plackett-Luce, all pairs).

Scores in, one loss a row out. Shape letters: B prompts, K answers to each. In `rank_BK` 1 is best, equal ranks are
ties and 0 marks an absent answer, whose score may be anything. Types narrower than float32 are widened first.
Left out: regression on absolute ratings, and every mean over the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from kedge.core.loss import widen


def bradley_terry(
    chosen_B: Tensor,
    rejected_B: Tensor,
    *,
    margin_B: Tensor | None = None,
    certainty_B: Tensor | None = None,
    centre: float = 0.0,
) -> Tensor:
    """-log σ(c - r - margin) + centre · (c + r)².

    The margin makes clear preferences count for more (Touvron et al. 2023, eq. 2); `centre` pulls scores, which pairs
    fix only up to a constant, towards zero mean (Eisenstein et al. 2023). `certainty_B` p is the probability that the
    chosen answer is the better one: -p log σ(c - r - margin) - (1 - p) log σ(r - c - margin). At 1 it is the loss
    without it, to the last bit.

    >>> bradley_terry(torch.tensor([2.0]), torch.tensor([1.0]), margin_B=torch.tensor([1.0]), centre=0.01)
    tensor([0.7831])
    """
    chosen_B, rejected_B = widen(chosen_B), widen(rejected_B)
    gap_B = chosen_B - rejected_B
    margin_B = torch.zeros_like(gap_B) if margin_B is None else widen(margin_B)
    log_likelihood_B = logsigmoid(gap_B - margin_B)
    if certainty_B is not None:
        certainty_B = widen(certainty_B)
        log_likelihood_B = certainty_B * log_likelihood_B + (1 - certainty_B) * logsigmoid(-gap_B - margin_B)
    return centre * (chosen_B + rejected_B).square() - log_likelihood_B


def plackett_luce(scores_BK: Tensor, rank_BK: Tensor) -> Tensor:
    """Σ_i [log Σ_{j: rank_j >= rank_i} exp(s_j) - s_i]: minus the log-likelihood of choosing best first.

    Ties are Breslow's (1974): each of the tied answers is chosen from all that are left, the tied ones included. This
    sets no order among them, and is smallest where their scores are equal. Without ties and K = 2: bradley_terry.

    >>> plackett_luce(torch.tensor([[0.0, 0.0, 0.0]]), torch.tensor([[2, 1, 3]]))  # 3 · 2 · 1 orders: log 6
    tensor([1.7918])
    """
    present_BK = rank_BK > 0
    scores_BK = _without_absent(scores_BK, present_BK)
    left_BKK = present_BK[:, None, :] & (rank_BK[:, None, :] >= rank_BK[:, :, None])
    # The lowest finite number and not -inf: a row of absent answers alone would else have a NaN gradient.
    lowest = torch.finfo(scores_BK.dtype).min
    norm_BK = torch.where(left_BKK, scores_BK[:, None, :], lowest).logsumexp(-1)
    return torch.where(present_BK, norm_BK - scores_BK, 0).sum(1)


def all_pairs(scores_BK: Tensor, rank_BK: Tensor) -> Tensor:
    """Mean of -log σ(s_i - s_j) over the pairs of a row with rank_i < rank_j  (Ouyang et al. 2022, eq. 1).

    Ties add no pair; a row without any pair gives 0. Without ties and K = 2: bradley_terry.

    >>> all_pairs(torch.tensor([[0.0, 0.0, 9.0]]), torch.tensor([[1, 2, 0]]))  # the third is absent: log 2
    tensor([0.6931])
    """
    present_BK = rank_BK > 0
    scores_BK = _without_absent(scores_BK, present_BK)
    above_BKK = (rank_BK[:, :, None] < rank_BK[:, None, :]) & present_BK[:, :, None]
    loss_BKK = torch.where(above_BKK, -logsigmoid(scores_BK[:, :, None] - scores_BK[:, None, :]), 0)
    return loss_BKK.sum((-1, -2)) / above_BKK.sum((-1, -2)).clamp(min=1)


def _without_absent(scores_BK: Tensor, present_BK: Tensor) -> Tensor:
    """Zero for absent answers, so that whatever their scores hold reaches neither values nor gradients."""
    return torch.where(present_BK, widen(scores_BK), 0)
