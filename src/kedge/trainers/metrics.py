"""The numbers that are written down of an iteration, by the names of docs/ppo.md.

Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from kedge.core.loss import mean
from kedge.core.protocols import Metrics
from kedge.core.records import Rollouts, ValueTargets, num_rows
from kedge.core.text_measures import distinct, repetition, self_similarity
from kedge.trainers.evaluated import Judged


def facts_of(asked: Judged, judged: Judged, *, is_recomputed: bool = True) -> dict[str, float]:
    """Of the answers, before anything is learnt from them. `asked` still has the rows without a score. Generator and
    trainer can be compared only where the old log-probs are `recomputed`."""
    rollouts, scores_B = judged.rollouts, judged.scores_B
    mask_BT = rollouts.response_mask_BT
    length_B = mask_BT.sum(dim=1)
    mismatch_BT = (rollouts.behaviour_logp_BT - judged.old_logp_BT).abs()
    return {
        "reward/mean": scores_B.mean().item(),
        "reward/std": scores_B.std(correction=0).item(),
        "reward/min": scores_B.min().item(),
        "reward/max": scores_B.max().item(),
        "reward/length_correlation": correlation(scores_B, length_B),
        "reward/unscored": 1 - num_rows(judged) / num_rows(asked),
        "kl/mean": judged.kl_B.mean().item(),
        "length/mean": length_B.float().mean().item(),
        "length/max": float(length_B.max()),
        "length/truncated": (~rollouts.finished_B).float().mean().item(),
        **({"policy/mismatch": mean(mismatch_BT, mask_BT, per="token").item()} if is_recomputed else {}),
        **text_facts(rollouts),
    }


def text_facts(rollouts: Rollouts) -> dict[str, float]:
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
    """How much of the variance of the returns the critic foresaw: 1 is all, 0 no more than their mean, below 0 less."""
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
    x_B, y_B = (one.double() - one.double().mean() for one in (x_B, y_B))
    scale = (x_B.square().sum() * y_B.square().sum()).sqrt()
    return ((x_B * y_B).sum() / scale).item() if scale > 0 else 0.0


def prefixed(area: str, metrics: Metrics) -> dict[str, float]:
    """Entropy is the policy's, and stands by itself."""
    named = {name: f"{area}/{name}" for name in metrics} | {"entropy": "entropy/mean"}
    return {named[name]: value for name, value in metrics.items()}


def mean_of(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each number over the steps that have it; of a peak, the largest."""
    found: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            found.setdefault(name, []).append(value)
    return {name: max(values) if name.endswith("_max") else sum(values) / len(values) for name, values in found.items()}
