"""What PPO and the critic-free methods share: minibatches, terms of the loss, and what changes besides the weights.

That is the KL coefficient, and the moments that shape rewards.

Both are part of a checkpoint: a resumed run continues with the same coefficient and moments.
Shape letters: B sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from kedge.algorithms import (
    AdaptiveKL,
    FixedKL,
    RunningMoments,
    clip_scores,
    estimate,
    missing_eos_penalty,
    missing_eos_score,
    overlong_penalty,
)
from kedge.core.errors import ContractStop
from kedge.core.loss import ItemLoss
from kedge.core.records import Experience
from kedge.trainers.evaluated import EvaluatedRollouts
from kedge.trainers.settings import KLSettings, ScoreSettings

KLController = FixedKL | AdaptiveKL
"""The coefficient of the KL penalty: `coef` now, `update(observed, n)` after each iteration."""


def kl_controller(settings: KLSettings) -> KLController:
    """A coefficient that is steered towards `target` where the settings have one, else a fixed one."""
    if settings.target is None:
        return FixedKL(settings.start)
    return AdaptiveKL(settings.start, target=settings.target, horizon=settings.horizon)


class KLExceeded(ContractStop):
    """The policy is further from the reference than the recipe allows."""

    def __init__(self, kl: float, limit: float) -> None:
        super().__init__(f"kl/mean is {kl:.3g} nats a sequence, over the limit of {limit:g}")
        self.kl = kl
        self.limit = limit

    def __reduce__(self) -> tuple[type[KLExceeded], tuple[float, float]]:
        return type(self), (self.kl, self.limit)


def check_kl_limit(evaluated: EvaluatedRollouts, settings: KLSettings) -> None:
    """Raise before a policy that has left its KL budget learns any more."""
    kl = evaluated.kl_B.mean().item()
    if settings.limit is not None and kl > settings.limit:
        raise KLExceeded(kl, settings.limit)


class ShapingSettings(Protocol):
    """The settings that say how scores are shaped."""

    @property
    def scores(self) -> ScoreSettings: ...
    @property
    def max_new_tokens(self) -> int: ...


@dataclass(slots=True, kw_only=True)
class RewardShaper:
    """Normalises, clips and penalises scores before they become rewards."""

    moments: RunningMoments = field(default_factory=RunningMoments)
    """Of all raw scores so far."""
    returns: RunningMoments = field(default_factory=RunningMoments)
    """Of the returns of whole answers so far: the baseline of REINFORCE."""

    def shape_scores(self, evaluated: EvaluatedRollouts, cfg: ShapingSettings) -> Tensor:
        """The scores of a batch, shaped; the moments are updated with the raw scores first."""
        self.moments.update(evaluated.scores_B)
        length_B = evaluated.rollouts.response_mask_BT.sum(dim=1)
        return self.shape(evaluated.scores_B, evaluated.rollouts.finished_B, length_B, cfg)

    def shape(self, scores_B: Tensor, finished_B: Tensor, length_B: Tensor, cfg: ShapingSettings) -> Tensor:
        """Any scores, shaped by the moments as they are."""
        settings = cfg.scores
        if settings.normalise != "none":
            scores_B = self.moments.normalise(scores_B, centre=settings.normalise == "standard")
        if settings.clip is not None:
            scores_B = clip_scores(scores_B, limit=settings.clip)
        if settings.missing_eos_penalty is not None:
            scores_B = missing_eos_penalty(scores_B, finished_B, penalty=settings.missing_eos_penalty)
        if settings.missing_eos_score is not None:
            scores_B = missing_eos_score(scores_B, finished_B, score=settings.missing_eos_score)
        if settings.overlong_buffer is not None:
            soft_B = overlong_penalty(length_B, max_length=cfg.max_new_tokens, buffer=settings.overlong_buffer)
            scores_B = scores_B + settings.overlong_penalty * soft_B
        return scores_B

    def state(self) -> dict[str, Any]:
        return {"moments": self.moments.state(), "returns": self.returns.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.moments.load(state["moments"])
        self.returns.load(state["returns"])


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
