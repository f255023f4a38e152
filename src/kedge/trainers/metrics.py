"""The metrics of an iteration, by the names of docs/ppo.md.

Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from kedge.core.loss import mean
from kedge.core.protocols import Metrics
from kedge.core.records import Rollouts, ValueTargets, num_rows
from kedge.core.text_measures import distinct, repetition, self_similarity
from kedge.trainers.evaluated import EvaluatedRollouts


def rollout_metrics(evaluated: EvaluatedRollouts, *, num_sampled: int, is_recomputed: bool = True) -> dict[str, float]:
    """Rewards, KL, lengths and texts of a batch. `num_sampled` counts the rows without a score too. The mismatch
    between generator and trainer is measured only where the trainer recomputed the old log-probs."""
    rollouts, scores_B = evaluated.rollouts, evaluated.scores_B
    mask_BT = rollouts.response_mask_BT
    length_B = mask_BT.sum(dim=1)
    mismatch_BT = (rollouts.behaviour_logp_BT - evaluated.old_logp_BT).abs()
    return {
        "reward/mean": scores_B.mean().item(),
        "reward/std": scores_B.std(correction=0).item(),
        "reward/min": scores_B.min().item(),
        "reward/max": scores_B.max().item(),
        "reward/length_correlation": correlation(scores_B, length_B),
        "reward/unscored": 1 - num_rows(evaluated) / num_sampled,
        "kl/mean": evaluated.kl_B.mean().item(),
        "length/mean": length_B.float().mean().item(),
        "length/max": float(length_B.max()),
        "length/truncated": (~rollouts.finished_B).float().mean().item(),
        **({"policy/mismatch": mean(mismatch_BT, mask_BT, per="token").item()} if is_recomputed else {}),
        **text_metrics(rollouts),
    }


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


def mean_over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the optimiser steps that have it; the maximum where its name ends in `_max`."""
    by_name: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            by_name.setdefault(name, []).append(value)
    return {
        name: max(values) if name.endswith("_max") else sum(values) / len(values) for name, values in by_name.items()
    }
