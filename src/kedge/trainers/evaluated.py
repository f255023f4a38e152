"""Rollouts with what the roles computed of them, and what is checked before anything is learnt from them.

Rows that no reward source could score are left out; any other number that is not finite refuses the batch by name.
Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kedge.core.errors import NumericsError
from kedge.core.loss import masked
from kedge.core.records import Rollouts, num_rows, take


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyBaseline:
    """The greedy answer to the prompt of each row, as far as a baseline needs it."""

    scores_B: Tensor
    finished_B: Tensor
    length_B: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRollouts:
    """Answers that were scored as they were sampled, and how they were sampled."""

    rollouts: Rollouts
    scores_B: Tensor
    """NaN where a source failed."""
    greedy: GreedyBaseline
    """All zero for methods without a greedy baseline."""
    mean_score: float
    """Mean over all answers that were sampled and have a score, those of groups that were left out too."""
    zero_variance: float
    """Share of all sampled groups whose scores are all equal: a comparison within them teaches nothing."""
    rounds: int
    """Batches of prompts that were answered to fill this one."""

    @property
    def known_B(self) -> Tensor:
        """The scores; NaN also where the baseline has none."""
        return self.scores_B.masked_fill(self.greedy.scores_B.isnan(), torch.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedRollouts:
    """Rollouts with scores, log-probs and values. `scores_B` may hold NaN until `drop_unscored`."""

    rollouts: Rollouts
    scores_B: Tensor
    old_logp_BT: Tensor
    ref_logp_BT: Tensor
    values_BT: Tensor

    @property
    def kl_B(self) -> Tensor:
        """KL(policy ‖ reference) of each answer in nats, by the log-probs of its tokens (k1)."""
        return masked(self.old_logp_BT - self.ref_logp_BT, self.rollouts.response_mask_BT).sum(dim=1)


def drop_unscored(evaluated: EvaluatedRollouts) -> EvaluatedRollouts:
    """The rows that have a score."""
    has_score_B = ~evaluated.scores_B.isnan()
    if bool(has_score_B.all()):
        return evaluated
    if not bool(has_score_B.any()):
        raise NumericsError(
            f"reward: none of the {num_rows(evaluated)} answers has a score (all NaN); nothing was learnt from them"
        )
    return take(evaluated, has_score_B)


def check_finite(evaluated: EvaluatedRollouts) -> EvaluatedRollouts:
    """The same rollouts; a number that is not finite is an error that names its source, row and token."""
    mask_BT = evaluated.rollouts.response_mask_BT
    tensors = {
        "reward": evaluated.scores_B[:, None],
        "policy log-prob": masked(evaluated.old_logp_BT, mask_BT),
        "reference log-prob": masked(evaluated.ref_logp_BT, mask_BT),
        "value": masked(evaluated.values_BT, mask_BT),
    }
    for name, tensor in tensors.items():
        bad = (~tensor.isfinite()).nonzero()
        if len(bad):
            row, position = bad[0].tolist()
            place = f"row {row}" if name == "reward" else f"row {row}, token {position}"
            raise NumericsError(
                f"{name}: {len(bad)} of {tensor.numel()} are not finite, first {tensor[row, position].item()} at "
                f"{place}; nothing was learnt from this batch"
            )
    return evaluated
