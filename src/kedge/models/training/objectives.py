"""Objectives of supervised stages: the loss and the facts of a batch under a model, as sums over its items.

Shape letters: B rows, T token positions, D width, C comparisons, K answers in a comparison, O objectives of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from kedge.algorithms.reward import all_pairs, bradley_terry, plackett_luce
from kedge.core.batches import TIE, Batch, Comparisons
from kedge.core.loss import weight_of, widen
from kedge.core.records import send
from kedge.models.forward.heads import LanguageModel
from kedge.models.training.learner import Objective, Sums

RankingLoss = Literal["plackett_luce", "all_pairs"]
Scores = Callable[[Tensor, Tensor], Tensor]
"""From tokens and attention mask, right-padded and on the host, to raw scores (B, O) with gradient."""


def imitation(model: LanguageModel) -> Objective[Batch]:
    """Maximum likelihood of the counted tokens; every token of the step has the same weight."""
    return Objective(
        weight=lambda batch: float(weight_of(batch.counted_BT, "token")), sums=partial(_imitation_sums, model)
    )


def preference(scores: Scores, *, ranking: RankingLoss, centre: float) -> Objective[Comparisons]:
    """Scores in the order in which people ranked answers. Comparisons of two use Bradley–Terry with their margin and
    certainty."""
    return Objective(
        weight=lambda batch: float(batch.weight_C.double().sum()),
        sums=partial(_preference_sums, scores, ranking=ranking, centre=centre),
    )


def _imitation_sums(model: LanguageModel, batch: Batch) -> Sums:
    logp_BT = model.logprobs(batch.tokens_BT, batch.attention_mask_BT, batch.counted_BT)
    return Sums(loss=-widen(logp_BT).sum(dim=1).sum(), facts={})


def _preference_sums(scores: Scores, batch: Comparisons, *, ranking: RankingLoss, centre: float) -> Sums:
    scores_BO = scores(batch.tokens_BT, batch.attention_mask_BT)
    row_CK, objective_C, rank_CK, margin_C, certainty_C, weight_C = (
        send(x, scores_BO.device)
        for x in (
            *(batch.row_CK, batch.objective_C, batch.rank_CK),
            *(batch.margin_C, batch.certainty_C, batch.weight_C),
        )
    )
    scores_CK = scores_BO[row_CK, objective_C[:, None]]
    ranking_loss = plackett_luce if ranking == "plackett_luce" else all_pairs
    ranking_loss_C = ranking_loss(scores_CK, rank_CK) + centre * _squared_sum(scores_CK, rank_CK)
    # Chosen for each comparison and not for the batch: pairs and rankings may share one, and margins are for pairs.
    is_pair_C, better_C, worse_C = _pairs(scores_CK, rank_CK)
    pair_loss_C = bradley_terry(better_C, worse_C, margin_B=margin_C, certainty_B=certainty_C, centre=centre)
    loss_C = torch.where(is_pair_C, pair_loss_C, ranking_loss_C)
    accuracy_C, gap_C = _order(scores_CK.detach(), rank_CK)
    # A tie has no better answer to be right about.
    is_tie_C = certainty_C == TIE
    accuracy_C, gap_C = accuracy_C.masked_fill(is_tie_C, TIE), gap_C.masked_fill(is_tie_C, 0.0)
    return Sums(
        loss=(loss_C * weight_C).sum(),
        facts={"accuracy": (accuracy_C * weight_C).sum(), "margin": (gap_C * weight_C).sum()},
    )


def _pairs(scores_CK: Tensor, rank_CK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which comparisons are of two answers, one of them better; and the scores of the best and the worst answer."""
    first_C = torch.where(rank_CK > 0, rank_CK, rank_CK.max() + 1).argmin(dim=1, keepdim=True)
    last_C = rank_CK.argmax(dim=1, keepdim=True)
    is_strict_C = (rank_CK.gather(1, first_C) < rank_CK.gather(1, last_C)).squeeze(1)
    is_pair_C = ((rank_CK > 0).sum(dim=1) == 2) & is_strict_C
    return is_pair_C, scores_CK.gather(1, first_C).squeeze(1), scores_CK.gather(1, last_C).squeeze(1)


def _squared_sum(scores_CK: Tensor, rank_CK: Tensor) -> Tensor:
    """(Σ scores)² of the ranked answers: the centring penalty of Bradley–Terry for any number of answers."""
    return torch.where(rank_CK > 0, scores_CK, 0.0).sum(dim=1).square()


def _order(scores_CK: Tensor, rank_CK: Tensor) -> tuple[Tensor, Tensor]:
    """Share of strictly ranked pairs in the right order (equal scores count half), and their mean score gap."""
    is_pair_CKK = (rank_CK[:, :, None] < rank_CK[:, None, :]) & (rank_CK[:, :, None] > 0)
    gap_CKK = scores_CK[:, :, None] - scores_CK[:, None, :]
    right_CKK = (gap_CKK > 0).float() + 0.5 * (gap_CKK == 0).float()
    num_C = is_pair_CKK.sum(dim=(1, 2)).clamp(min=1)
    return (
        torch.where(is_pair_CKK, right_CKK, 0.0).sum(dim=(1, 2)) / num_C,
        torch.where(is_pair_CKK, gap_CKK, 0.0).sum(dim=(1, 2)) / num_C,
    )
