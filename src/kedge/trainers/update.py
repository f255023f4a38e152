"""What the updates of PPO and of the critic-free methods share: minibatches, and the terms added to any policy loss.

Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from kedge.algorithms import estimate
from kedge.core.loss import ItemLoss
from kedge.core.records import Experience
from kedge.trainers.settings import KLSettings


class Passes(Protocol):
    """Settings that say how often a batch is learnt from."""

    @property
    def epochs(self) -> int: ...
    @property
    def minibatches(self) -> int: ...


def minibatches(rows: int, cfg: Passes, *, seed: int) -> Iterable[Tensor]:
    """The rows of every optimiser step: a new permutation each epoch, cut into parts that differ by at most one."""
    rng = torch.Generator().manual_seed(seed)
    for _ in range(cfg.epochs):
        order_B = torch.randperm(rows, generator=rng)
        yield from (part for part in order_B.tensor_split(min(cfg.minibatches, rows)))


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
    """loss − entropy · H, and + coef · KL(policy ‖ reference) under `kl.where: loss`; statistics stay as they are."""
    loss_BT = item.loss_BT - entropy * entropy_BT
    if kl.where == "loss":
        loss_BT = loss_BT + coef * estimate(logp_BT, experience.ref_logp_BT, kind=kl.kind)
    return replace(item, loss_BT=loss_BT)
