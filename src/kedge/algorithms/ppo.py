"""PPO: rewards per token from a score and a KL penalty, the clipped policy loss and the clipped value loss.

One loss per token; nothing is averaged here. Left out: the entropy bonus and the early stop on KL (a trainer's).
Inputs are finite: clean what lies outside the mask with `kedge.core.loss.masked` before a loss.
Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.algorithms.kl import estimate
from kedge.core.errors import ConfigError
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
