"""How far a model has moved from another, by the answers that it sampled.

Shape letters: B sequences, R sequences of one pass, T token positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.core.loss import masked
from kedge.core.protocols import ReferenceRole
from kedge.core.records import Rollouts
from kedge.core.world import ALONE, World
from kedge.models.forward.backbones import Part, micro_batches
from kedge.models.forward.heads import LanguageModel
from kedge.models.training.passes import InferenceSize


def rounding(policy: ReferenceRole, reference: ReferenceRole, rollouts: Rollouts) -> tuple[float, float]:
    """How far a rounded reference is from the policy that it was before it was rounded: the mean of |Δ log-prob| of a
    token, and the KL of an answer in nats. Asked of a policy that has not learnt yet."""
    mask_BT = rollouts.response_mask_BT
    gap_BT = masked(policy.logprobs(rollouts) - reference.logprobs(rollouts), mask_BT)
    return (gap_BT.abs().sum() / mask_BT.sum()).item(), gap_BT.sum(dim=1).mean().item()


@torch.no_grad()
def log_ratios(other: LanguageModel, rollouts: Rollouts, *, temperature: float, world: World = ALONE) -> Tensor:
    """`ratio_B` = Σ_t log p(token t) − log p_other(token t) over the response, in nats; p is whoever sampled.

    Over samples of p, its mean is KL(p ‖ p_other) of a whole answer (the estimator k1: no bias, single ones may be
    negative). Both log-probs are taken at the temperature of sampling. On the host; `other` is active. The processes of
    `world` share the rows.
    """

    def gaps(part: Part[Rollouts]) -> tuple[Tensor, Tensor]:
        record = part.record
        logp_RT = other.logprobs(
            record.tokens_BT, part.attention_mask_RT, part.response_mask_RT, temperature=temperature
        )
        gap_RT = (record.behaviour_logp_BT.to(logp_RT.device) - logp_RT).masked_fill(
            ~record.response_mask_BT.to(logp_RT.device), 0.0
        )
        return part.index_R, gap_RT.sum(dim=1)

    parts = InferenceSize(other.device, world=world).each(
        lambda size: micro_batches(rollouts, tokens=size.tokens, shares=size.shares), gaps
    )
    ratio_B = torch.zeros(len(rollouts.tokens_BT))
    for index_R, gap_R in parts:
        ratio_B[index_R.cpu()] = gap_R.float().cpu()
    world.add(ratio_B)
    return ratio_B
