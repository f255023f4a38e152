"""What PPO and the critic-free methods share: rollouts with what the roles computed of them, checked before anything is
learnt from them, and their metrics; minibatches, terms of the loss, and what changes besides the weights.

Rows that no reward source could score are left out; any other number that is not finite refuses the batch by name.
What changes besides the weights is the KL coefficient and the moments that shape rewards. Both are part of a
checkpoint: a resumed run continues with the same ones. Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    length_price,
    missing_eos_penalty,
    missing_eos_score,
    overlong_penalty,
)
from kedge.core.errors import ContractStop, NumericsError
from kedge.core.loss import ItemLoss, masked, mean
from kedge.core.protocols import Metrics
from kedge.core.records import Experience, Rollouts, ValueTargets, num_rows, take
from kedge.core.text_measures import distinct, repetition, self_similarity
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
        if (length := settings.length) is not None:
            scores_B = scores_B + length_price(length_B, price=length.price, least=length.least, most=length.most)
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
    """loss − entropy · H, and + coef · KL(policy ‖ reference) under `kl.where: loss`; statistics stay as they are.

    What a sampled token says, of its loss and of the KL, counts for its weight. Entropy is of all tokens that could
    have been sampled, and has none.
    """
    loss_BT = _by_weight(item.loss_BT, experience.weight_BT) - entropy * entropy_BT
    if kl.where == "loss":
        kl_BT = estimate(logp_BT, experience.ref_logp_BT, kind=kl.kind)
        loss_BT = loss_BT + coef * _by_weight(kl_BT, experience.weight_BT)
    return replace(item, loss_BT=loss_BT)


def _by_weight(x_BT: Tensor, weight_BT: Tensor | None) -> Tensor:
    return x_BT if weight_BT is None else weight_BT * x_BT


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
    weight_BT: Tensor | None = None
    """What each token counts for, where other weights sampled it; None counts all alike."""

    @property
    def kl_B(self) -> Tensor:
        """KL(policy ‖ reference) of each answer in nats, by the log-probs of its tokens (k1) and their weights."""
        gap_BT = masked(self.old_logp_BT - self.ref_logp_BT, self.rollouts.response_mask_BT)
        return _by_weight(gap_BT, self.weight_BT).sum(dim=1)


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
        "generator log-prob": masked(evaluated.rollouts.behaviour_logp_BT, mask_BT),
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


def rollout_metrics(
    evaluated: EvaluatedRollouts, *, num_sampled: int, is_recomputed: bool = True, age: int | None = None
) -> dict[str, float]:
    """Rewards, KL, lengths and texts of a batch. `num_sampled` counts the rows without a score too. The mismatch
    between generator and trainer is measured only where the trainer recomputed the old log-probs."""
    rollouts, scores_B = evaluated.rollouts, evaluated.scores_B
    mask_BT = rollouts.response_mask_BT
    length_B = mask_BT.sum(dim=1)
    return {
        "reward/mean": scores_B.mean().item(),
        "reward/std": scores_B.std(correction=0).item(),
        "reward/min": scores_B.min().item(),
        "reward/max": scores_B.max().item(),
        "reward/at_limit": share_at_limit(scores_B),
        "reward/length_correlation": correlation(scores_B, length_B),
        "reward/unscored": 1 - num_rows(evaluated) / num_sampled,
        "kl/mean": evaluated.kl_B.mean().item(),
        "length/mean": length_B.float().mean().item(),
        "length/max": float(length_B.max()),
        "length/truncated": (~rollouts.finished_B).float().mean().item(),
        **(distance_from_sampler(evaluated, age) if is_recomputed else {}),
        **({} if age is None else {"age/mean": float(age)}),
        **text_metrics(rollouts),
    }


def distance_from_sampler(evaluated: EvaluatedRollouts, age: int | None) -> dict[str, float]:
    """Mean absolute difference of the generator's and the trainer's log-probs, nats a token. Of answers of this very
    policy it is the `mismatch` of the two; of older ones mostly the way that the policy has gone since, its `drift`."""
    rollouts = evaluated.rollouts
    distance_BT = (rollouts.behaviour_logp_BT - evaluated.old_logp_BT).abs()
    distance = mean(distance_BT, rollouts.response_mask_BT, per="token").item()
    return {"policy/drift" if age else "policy/mismatch": distance}


def text_metrics(rollouts: Rollouts) -> dict[str, float]:
    answers = sampled_tokens(rollouts)
    return {
        "repetition/mean": sum(map(repetition, answers)) / len(answers),
        "distinct/mean": distinct(answers),
        "similarity/mean": self_similarity(answers),
    }


def sampled_tokens(rollouts: Rollouts) -> list[list[int]]:
    """The tokens of each answer."""
    rows = zip(rollouts.tokens_BT.tolist(), rollouts.response_mask_BT.tolist(), strict=True)
    return [[token for token, counts in zip(tokens, mask, strict=True) if counts] for tokens, mask in rows]


def explained_variance(targets: ValueTargets) -> dict[str, float]:
    """Share of the variance of the returns that the critic predicted: 1 is all of it, 0 no more than their mean."""
    mask_BT = targets.rollouts.response_mask_BT
    returns_N, values_N = targets.returns_BT[mask_BT], targets.old_values_BT[mask_BT]
    spread = returns_N.var(correction=0)
    unexplained = (returns_N - values_N).var(correction=0)
    return {"value/explained_variance": (1 - unexplained / spread).item() if spread > 0 else 0.0}


def share_at_limit(scores_B: Tensor) -> float:
    """The share of the answers at the highest score of the batch or at the lowest, whichever is more; what is within
    1 % of the range counts as being there. A ceiling that all reach, or a check that none passes, gives 1.

    >>> import torch
    >>> share_at_limit(torch.tensor([0.0, 0.5, 1.0, 1.0])), share_at_limit(torch.tensor([2.0, 2.0]))
    (0.5, 1.0)
    """
    low, high = scores_B.min(), scores_B.max()
    margin = 0.01 * (high - low)
    at_ends = ((scores_B >= high - margin).float().mean(), (scores_B <= low + margin).float().mean())
    return max(share.item() for share in at_ends)


def correlation(x_B: Tensor, y_B: Tensor) -> float:
    """Pearson's; 0 where one of them does not vary.

    >>> import torch
    >>> round(correlation(torch.tensor([1., 2., 4.]), torch.tensor([2, 4, 8])), 4)
    1.0
    """
    x_B, y_B = (values_B.double() - values_B.double().mean() for values_B in (x_B, y_B))
    scale = (x_B.square().sum() * y_B.square().sum()).sqrt()
    return ((x_B * y_B).sum() / scale).item() if scale > 0 else 0.0


def prefixed(area: str, metrics: Metrics) -> dict[str, float]:
    """Entropy is the policy's, and stands by itself."""
    named = {name: f"{area}/{name}" for name in metrics} | {"entropy": "entropy/mean"}
    return {named[name]: value for name, value in metrics.items()}


FIRST_STEP = {
    "entropy/mean": "entropy/first",
    "policy/approx_kl": "policy/approx_kl_first",
    "policy/clip_fraction": "policy/clip_fraction_first",
}
"""Metrics whose mean depends on the number of optimiser steps, and the names of those of the first one. Before it the
policy is the one that sampled, so that runs with other `epochs` and `minibatches` can be compared by its entropy, and
KL and clipping are 0 unless ratios do not start at 1."""


def mean_over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the optimiser steps that have it; the maximum where its name ends in `_max`. Beside
    the means of `FIRST_STEP` stand the values of the first step."""
    by_name: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            by_name.setdefault(name, []).append(value)
    means = {
        name: max(values) if name.endswith("_max") else sum(values) / len(values) for name, values in by_name.items()
    }
    return means | {first: by_name[name][0] for name, first in FIRST_STEP.items() if name in by_name}
