"""Answers that other weights or another engine sampled: what each counts for, and which are left out.

The old log-probs are the trainer's, those of the behaviour are of whoever sampled; the ratio of their probabilities is
the weight of a token or of an answer, on the policy's loss and on the KL that is measured. The critic counts all
answers alike. Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kedge.algorithms import mean_ratio, sequence_importance, truncated_importance
from kedge.core.errors import KedgeError
from kedge.core.loss import masked, mean
from kedge.core.records import num_rows
from kedge.trainers.settings import CorrectionSettings
from kedge.trainers.shared import EvaluatedRollouts


class AllDropped(KedgeError):
    """No answer of a batch is near enough to the policy to be learnt from."""


def weighted(evaluated: EvaluatedRollouts, settings: CorrectionSettings | None) -> EvaluatedRollouts:
    """The same rollouts with what each token counts for; without settings all count alike."""
    if settings is None:
        return evaluated
    old_logp_BT, behaviour_logp_BT = _logprobs(evaluated)
    if settings.per == "token":
        weight_BT = truncated_importance(old_logp_BT, behaviour_logp_BT, cap=settings.cap)
    else:
        mask_BT = evaluated.rollouts.response_mask_BT
        weight_BT = sequence_importance(old_logp_BT, behaviour_logp_BT, mask_BT, cap=settings.cap)
    return replace(evaluated, weight_BT=weight_BT)


def near_policy(evaluated: EvaluatedRollouts, settings: CorrectionSettings | None) -> Tensor | None:
    """True on the answers that are learnt from; None where all are. Raises `AllDropped` where none is."""
    if settings is None or settings.drop is None:
        return None
    low, high = settings.drop
    ratio_B = mean_ratio(*_logprobs(evaluated), evaluated.rollouts.response_mask_BT)
    is_near_B = (ratio_B >= low) & (ratio_B <= high)
    if not bool(is_near_B.any()):
        raise AllDropped(
            f"all {num_rows(evaluated)} answers were sampled too far from the policy: their mean ratios of "
            f"probabilities are {ratio_B.min().item():.4g} to {ratio_B.max().item():.4g}, outside loss.correct.drop "
            f"[{low:g}, {high:g}]; nothing was learnt from them"
        )
    return is_near_B


def correction_metrics(
    evaluated: EvaluatedRollouts, is_near_B: Tensor | None, settings: CorrectionSettings | None
) -> dict[str, float]:
    """The mean weight, the share of the weights at the cap, and the share of the answers that were left out."""
    if settings is None or evaluated.weight_BT is None:
        return {}
    mask_BT = evaluated.rollouts.response_mask_BT
    is_capped_BT = (evaluated.weight_BT >= settings.cap).float()
    return {
        "correct/weight": mean(evaluated.weight_BT, mask_BT, per=settings.per).item(),
        "correct/capped": mean(is_capped_BT, mask_BT, per=settings.per).item(),
        "correct/dropped": 0.0 if is_near_B is None else (~is_near_B).float().mean().item(),
    }


def _logprobs(evaluated: EvaluatedRollouts) -> tuple[Tensor, Tensor]:
    """Of the policy before the update, and of whoever sampled; 0 outside the response, where both may hold anything."""
    mask_BT = evaluated.rollouts.response_mask_BT
    return masked(evaluated.old_logp_BT, mask_BT), masked(evaluated.rollouts.behaviour_logp_BT, mask_BT)
