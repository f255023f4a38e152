"""What is added to any policy loss: the entropy bonus, and the KL where it is paid in the loss.

Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kedge.algorithms import estimate
from kedge.core.loss import ItemLoss
from kedge.core.records import Experience
from kedge.trainers.settings import KLSettings


def add_kl_and_entropy(
    item: ItemLoss,
    logp_BT: Tensor,
    entropy_BT: Tensor,
    experience: Experience,
    *,
    kl: KLSettings,
    coef: float,
    entropy: float,
) -> ItemLoss:
    """loss - entropy H, and + coef KL(policy || reference) under `where: loss`; facts stay as they are."""
    loss_BT = item.loss_BT - entropy * entropy_BT
    if kl.where == "loss":
        loss_BT = loss_BT + coef * estimate(logp_BT, experience.ref_logp_BT, kind=kl.kind)
    return replace(item, loss_BT=loss_BT)
