"""RLOO (Ahmadian et al. 2024; Kool et al. 2019): the mean return of the other answers to a prompt is the baseline.

The KL is in the reward, and a whole answer is one action, as in the paper. Left out: nothing.
Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kedge.algorithms.advantages import leave_one_out
from kedge.algorithms.group.method import KL_IN_REWARD, Credit, GroupMethod, GroupTraits
from kedge.algorithms.group.reinforce import policy_gradient_loss
from kedge.core.settings import Section


class RLOOSettings(Section):
    """REINFORCE leave-one-out (Ahmadian et al. 2024): the mean of the other answers is the baseline."""

    kind: Literal["rloo"] = "rloo"


def leave_one_out_advantages(_: Section, credit: Credit) -> Tensor:
    """The return of an answer less the mean return of the others in its group."""
    return credit.on_tokens(leave_one_out(credit.returns_B, credit.rollouts.group_B))


RLOO = GroupMethod(
    settings=RLOOSettings,
    advantages=leave_one_out_advantages,
    loss=policy_gradient_loss,
    per="sequence_sum",
    traits=GroupTraits(kl=KL_IN_REWARD, answers=4, is_on_policy=True),
)
