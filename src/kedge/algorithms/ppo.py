"""PPO: scores shaped and normalised, rewards per token from a score and a KL penalty, the clipped losses.

One loss per token; nothing is averaged here. Left out: the entropy bonus and the early stop on KL (a trainer's).
Inputs are finite: clean what lies outside the mask with `kedge.core.loss.masked` before a loss.
Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.algorithms.kl import estimate
from kedge.core.errors import CheckpointError, ConfigError, NumericsError
from kedge.core.loss import ItemLoss, masked, widen


def shape_rewards(scores_B: Tensor, kl_BT: Tensor, mask_BT: Tensor, *, coef: float) -> Tensor:
    """-coef kl on every response token, the score added on the last one (Ziegler et al. 2019, eq. 2, by token).

    A row without a response token gets nothing, its score neither.

    >>> kl_BT, mask_BT = torch.tensor([[9., 1., 2., 9.]]), torch.tensor([[0, 1, 1, 0]]).bool()
    >>> shape_rewards(torch.tensor([5.]), kl_BT, mask_BT, coef=0.5).tolist()
    [[0.0, -0.5, 4.0, 0.0]]
    """
    left_BT = mask_BT.flip(1).cumsum(dim=1).flip(1)  # response tokens from here on
    score_BT = masked(widen(scores_B)[:, None].expand(mask_BT.shape), mask_BT & (left_BT == 1))
    return score_BT - coef * masked(widen(kl_BT), mask_BT)


def policy_loss(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantages_BT: Tensor,
    *,
    clip: float,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> ItemLoss:
    """The clipped surrogate (Schulman et al. 2017, eq. 7), as a loss.

    ratio = e^(logp - old_logp);  gain = min(ratio A, clamp(ratio, 1 - clip, 1 + clip_high) A);  loss = -gain.
    `clip_high` (DAPO's clip-higher, Yu et al. 2025, eq. 10) is `clip` when None. `dual_clip` c > 1 (Ye et al. 2020,
    section "dual-clip PPO") bounds the loss of a token that became likely although A < 0: gain = max(gain, c A).

    Stats: ratio; clip_fraction, 1 where a clip is active, so that the token has no gradient; approx_kl,
    (ratio - 1) - log ratio, an estimate of KL(old || new).

    A ratio of 1.3 is clipped to 1.2, so an advantage of 2 gains 2.4:

    >>> item = policy_loss(torch.tensor([[1.3]]).log(), torch.zeros(1, 1), torch.tensor([[2.]]), clip=0.2)
    >>> round(item.loss_BT.item(), 4), item.stats_BT["clip_fraction"].item()
    (-2.4, 1.0)
    """
    low, high = clip_range(clip, clip_high)
    ratio_BT = (widen(logp_BT) - widen(old_logp_BT)).exp()
    free_BT = ratio_BT * advantages_BT
    gain_BT = torch.minimum(free_BT, ratio_BT.clamp(low, high) * advantages_BT)
    if dual_clip is not None:
        if dual_clip <= 1:
            raise ConfigError(f"dual_clip: found {dual_clip}, expected more than 1 (3 is usual), or None for no bound")
        gain_BT = torch.where(advantages_BT < 0, torch.maximum(gain_BT, dual_clip * advantages_BT), gain_BT)
    return ItemLoss(
        loss_BT=-gain_BT,
        stats_BT={
            "ratio": ratio_BT.detach(),
            "clip_fraction": (gain_BT != free_BT).float(),
            "approx_kl": estimate(old_logp_BT, logp_BT, kind="k3").detach(),
        },
    )


def value_loss(values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, *, clip: float | None = None) -> ItemLoss:
    """Half the squared error of the value, the larger of the free and the clipped one (PPO2 of OpenAI Baselines).

    clipped = old + clamp(v - old, -clip, clip);  loss = max((v - R)^2, (clipped - R)^2) / 2. None does not clip.
    Stats: clip_fraction, 1 where the clipped error is the larger one, so that the token has no gradient.

    The value moved from 0 to 2, clipped to 1; the return is 4: max(2^2, 3^2) / 2.

    >>> item = value_loss(torch.tensor([[2.]]), torch.tensor([[0.]]), torch.tensor([[4.]]), clip=1.0)
    >>> item.loss_BT.tolist(), item.stats_BT["clip_fraction"].tolist()
    ([[4.5]], [[1.0]])
    """
    values_BT, old_values_BT, returns_BT = widen(values_BT), widen(old_values_BT), widen(returns_BT)
    free_BT = worst_BT = (values_BT - returns_BT).square()
    if clip is not None:
        low, high = clip_range(clip, None, around=0.0)
        clipped_BT = old_values_BT + (values_BT - old_values_BT).clamp(low, high)
        worst_BT = torch.maximum(free_BT, (clipped_BT - returns_BT).square())
    return ItemLoss(loss_BT=worst_BT / 2, stats_BT={"clip_fraction": (worst_BT != free_BT).float()})


def clip_range(clip: float, clip_high: float | None, *, around: float = 1.0) -> tuple[float, float]:
    """The bounds that `clip` below and `clip_high` above set; None above means the same as below.

    >>> clip_range(0.25, None), clip_range(0.25, 0.5)
    ((0.75, 1.25), (0.75, 1.5))
    """
    upper = clip if clip_high is None else clip_high
    for name, value in (("clip", clip), ("clip_high", upper)):
        if value < 0:
            raise ConfigError(f"{name}: found {value}, expected 0 or more")
    return around - clip, around + upper


def clip_scores(scores_B: Tensor, *, limit: float) -> Tensor:
    """Scores within [-limit, limit].

    >>> clip_scores(torch.tensor([-7., 0.5, 9.]), limit=5.0).tolist()
    [-5.0, 0.5, 5.0]
    """
    _check_positive("limit", limit)
    return widen(scores_B).clamp(-limit, limit)


def length_penalty(length_B: Tensor, *, coef: float, target: float) -> Tensor:
    """coef (1 - length / target), to be added to the score (Singhal et al. 2023, "A long way to go", section 4).

    A bonus below the target, a penalty above. The paper's coef is a moving std of the scores; here it is given.

    >>> length_penalty(torch.tensor([50, 100, 150]), coef=2.0, target=100).tolist()
    [1.0, 0.0, -1.0]
    """
    _check_positive("target", target)
    return coef * (1 - widen(length_B) / target)


def overlong_penalty(length_B: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment (Yu et al. 2025, eq. 13), to be added to the score.

    0 up to max_length - buffer tokens, then linear down to -1 at max_length, and -1 beyond.

    >>> overlong_penalty(torch.tensor([80, 85, 100, 120]), max_length=100, buffer=20).tolist()
    [0.0, -0.25, -1.0, -1.0]
    """
    if not 0 < buffer <= max_length:
        raise ConfigError(f"buffer: found {buffer}, expected 1 to {max_length} tokens, the max_length")
    return ((max_length - buffer - widen(length_B)) / buffer).clamp(-1, 0)


def length_price(length_B: Tensor, *, price: float, least: float, most: float) -> Tensor:
    """-price for each token that an answer is shorter than `least` or longer than `most`, to be added to the score.

    Free within the range, so that length earns nothing there either way; beyond it a reward that likes short answers,
    or long ones, has to pay for them.

    >>> length_price(torch.tensor([10, 20, 60, 64]), price=0.5, least=20, most=60).tolist()
    [-5.0, 0.0, 0.0, -2.0]
    """
    if not 0 <= least <= most:
        raise ConfigError(f"least {least:g} and most {most:g}: expected two lengths, 0 <= least <= most")
    length_B = widen(length_B)
    return price * ((length_B - least).clamp(max=0) + (most - length_B).clamp(max=0))


def missing_eos_penalty(scores_B: Tensor, finished_B: Tensor, *, penalty: float) -> Tensor:
    """score - penalty where the answer did not end by itself: still ranks cut answers by their score.

    >>> missing_eos_penalty(torch.tensor([3., 4.]), torch.tensor([True, False]), penalty=1.5).tolist()
    [3.0, 2.5]
    """
    scores_B = widen(scores_B)
    return torch.where(finished_B, scores_B, scores_B - penalty)


def missing_eos_score(scores_B: Tensor, finished_B: Tensor, *, score: float) -> Tensor:
    """`score` in place of the score where the answer did not end by itself (Huang et al. 2024, "EOS trick": -1).

    >>> missing_eos_score(torch.tensor([3., 4.]), torch.tensor([True, False]), score=-1.0).tolist()
    [3.0, -1.0]
    """
    scores_B = widen(scores_B)
    return torch.where(finished_B, scores_B, scores_B.new_full((), score))


@dataclass(slots=True)
class RunningMoments:
    """Mean and variance of every score seen so far, in float64 (Chan et al. 1979, eq. 2.1).

    Shards merged, in any order, give what one pass over all gives. Zheng et al. 2023 ("Secrets of RLHF", section
    5.3.1) normalise and clip rewards so; their per-batch variant is left out.

    >>> moments = RunningMoments()
    >>> moments.update(torch.tensor([1., 3.]))
    >>> moments.update(torch.tensor([8.]))
    >>> moments.mean, round(moments.variance, 4)
    (4.0, 8.6667)
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations from the mean."""

    @property
    def variance(self) -> float:
        """Of the population (divided by n); 0 before the first score."""
        return self.squares / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        return math.sqrt(self.variance)

    def update(self, scores: Tensor) -> None:
        """Takes in a batch of scores; one that is not finite is refused, and nothing is changed."""
        scores = scores.detach().double().flatten()
        if scores.numel() == 0:
            return
        if bad := int((~scores.isfinite()).sum()):
            raise NumericsError(
                f"{bad} of {scores.numel()} scores are not finite; the running moments were not changed. "
                "Drop the rows whose reward source failed before this"
            )
        mean = scores.mean().item()
        self.merge(RunningMoments(count=scores.numel(), mean=mean, squares=(scores - mean).square().sum().item()))

    def merge(self, other: RunningMoments) -> None:
        """Takes in what another one has seen."""
        total = self.count + other.count
        if total == 0:
            return
        gap = other.mean - self.mean
        self.mean += gap * other.count / total
        self.squares += other.squares + gap * gap * self.count * other.count / total
        self.count = total

    def normalise(self, scores_B: Tensor, *, centre: bool, eps: float = 1e-6) -> Tensor:
        """(scores - mean) / std, or scores / std without centring, which keeps the sign of a score.

        While the scores seen hardly differ (std at most eps) they are not divided: noise is not blown up.

        >>> moments = RunningMoments(count=2, mean=3.0, squares=8.0)
        >>> scores_B = torch.tensor([5., 1.])
        >>> moments.normalise(scores_B, centre=True).tolist(), moments.normalise(scores_B, centre=False).tolist()
        ([1.0, -1.0], [2.5, 0.5])
        """
        shifted_B = widen(scores_B) - (self.mean if centre else 0.0)
        return shifted_B / self.std if self.std > eps else shifted_B

    def state(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load(self, state: Mapping[str, Any]) -> None:
        match state:
            case {"count": int(count), "mean": float(mean), "squares": float(squares)}:
                self.count, self.mean, self.squares = count, mean, squares
            case _:
                raise CheckpointError(f"running moments: found {dict(state)}, expected count, mean and squares")


def _check_positive(name: str, value: float) -> None:
    if value <= 0:
        raise ConfigError(f"{name}: found {value}, expected more than 0")
