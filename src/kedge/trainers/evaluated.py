"""What the four roles said of a batch, and what is done before anything is learnt from it.

Rows that no reward source could score are left out; anything else that is not a number refuses the batch by name.
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
class Greedy:
    """The likeliest answer to the prompt of each row, as far as a baseline needs to know it."""

    scores_B: Tensor
    finished_B: Tensor
    length_B: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Answers that were scored as they were drawn, and how they were drawn."""

    rollouts: Rollouts
    scores_B: Tensor
    """NaN where a source failed."""
    greedy: Greedy
    """All zero for methods that do not ask for it."""
    mean_score: float
    """Of all answers that were drawn and have a score, those of groups that were left out too."""
    zero_variance: float
    """Share of all groups drawn whose scores are all equal: nothing can be learnt from comparing them."""
    rounds: int
    """Batches of prompts that were answered for this one."""

    @property
    def known_B(self) -> Tensor:
        """The scores; NaN also where the baseline has none."""
        return self.scores_B.masked_fill(self.greedy.scores_B.isnan(), torch.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """`scores_B` may hold NaN (a source failed) until `with_scores`."""

    rollouts: Rollouts
    scores_B: Tensor
    old_logp_BT: Tensor
    ref_logp_BT: Tensor
    values_BT: Tensor

    @property
    def kl_B(self) -> Tensor:
        """KL(policy || reference) of each answer in nats, by the log-probs of its tokens (k1)."""
        return masked(self.old_logp_BT - self.ref_logp_BT, self.rollouts.response_mask_BT).sum(dim=1)


def with_scores(judged: Judged) -> Judged:
    """The rows that have a score."""
    has_score_B = ~judged.scores_B.isnan()
    if bool(has_score_B.all()):
        return judged
    if not bool(has_score_B.any()):
        raise NumericsError(
            f"reward: none of the {num_rows(judged)} answers has a score (all NaN); nothing was learnt from them"
        )
    return take(judged, has_score_B)


def check_finite(judged: Judged) -> Judged:
    """The same; a number that is not finite is an error that says whose it is, in which row and at which token."""
    mask_BT = judged.rollouts.response_mask_BT
    named = {
        "reward": judged.scores_B[:, None],
        "policy log-prob": masked(judged.old_logp_BT, mask_BT),
        "reference log-prob": masked(judged.ref_logp_BT, mask_BT),
        "value": masked(judged.values_BT, mask_BT),
    }
    for name, tensor in named.items():
        bad = (~tensor.isfinite()).nonzero()
        if len(bad):
            row, at = bad[0].tolist()
            place = f"row {row}" if name == "reward" else f"row {row}, token {at}"
            raise NumericsError(
                f"{name}: {len(bad)} of {tensor.numel()} are not finite, first {tensor[row, at].item()} at {place}; "
                "nothing was learnt from this batch"
            )
    return judged
