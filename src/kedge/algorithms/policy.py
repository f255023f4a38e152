"""Policy losses beside PPO's: GSPO, CISPO, REINFORCE, and weights for rollouts that other weights sampled.

One loss per token; nothing is averaged here. A KL term is the trainer's, which adds it to the loss or the rewards.
Where no mask is passed, inputs are finite: clean them with `kedge.core.loss.masked` first.
Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.algorithms.kl import estimate
from kedge.algorithms.ppo import clip_range
from kedge.core.errors import ConfigError
from kedge.core.loss import ItemLoss, masked, widen


def gspo_loss(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip: float,
    clip_high: float | None = None,
) -> ItemLoss:
    """The clipped surrogate with one ratio a sequence: GSPO (Zheng et al. 2025, eq. 5 and 7), as a loss.

    s = exp(mean over the response of logp - old_logp);  loss = -min(s A, clamp(s, 1 - clip, 1 + clip_high) A),
    the same on every response token, zero outside; averaged `per="sequence"` it is the paper's objective, and the
    gradient passes through the ratio to every token. The paper's clips are small: 3e-4 and 4e-4. Left out: GSPO-token
    (eq. 13), the group advantage (eq. 6: `group_centred`). Stats: ratio (s), clip_fraction, approx_kl (by token).

    Log-ratios 0.6 and 0 have the mean 0.3: s = 1.3499, clipped to 1.2 where A = 2.

    >>> logp_BT, mask_BT = torch.tensor([[0.6, 0., 9.]]), torch.tensor([[1, 1, 0]]).bool()
    >>> item = gspo_loss(logp_BT, torch.zeros(1, 3), torch.full((1, 3), 2.), mask_BT, clip=0.2)
    >>> item.loss_BT, item.stats_BT["ratio"]
    (tensor([[-2.4000, -2.4000, -0.0000]]), tensor([[1.3499, 1.3499, 1.3499]]))
    """
    low, high = clip_range(clip, clip_high)
    logp_BT, old_logp_BT = masked(widen(logp_BT), mask_BT), masked(widen(old_logp_BT), mask_BT)
    advantages_BT = masked(advantages_BT, mask_BT)
    length_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    ratio_B1 = ((logp_BT - old_logp_BT).sum(dim=1, keepdim=True) / length_B1).exp()
    free_BT = ratio_B1 * advantages_BT
    gain_BT = torch.minimum(free_BT, ratio_B1.clamp(low, high) * advantages_BT)
    return ItemLoss(
        loss_BT=-gain_BT,
        stats_BT={
            "ratio": ratio_B1.detach().expand(mask_BT.shape),
            "clip_fraction": (gain_BT != free_BT).float(),
            "approx_kl": estimate(old_logp_BT, logp_BT, kind="k3").detach(),
        },
    )


def cispo_loss(
    logp_BT: Tensor, old_logp_BT: Tensor, advantages_BT: Tensor, *, clip: float, clip_high: float
) -> ItemLoss:
    """REINFORCE with a clipped importance weight: CISPO (MiniMax-M1 2025, eq. 4 and 5), as a loss.

    weight = stop_gradient(clamp(ratio, 1 - clip, 1 + clip_high));  loss = -weight A logp.
    No token loses its gradient, unlike under PPO's clip. `clip` of 1 or more means no lower bound, as in the paper,
    which tunes only `clip_high`. Left out: the optional token mask (eq. 6). Averaged `per="token"` it is eq. 4 for
    one group. Stats: ratio, clip_fraction (1 where the weight was clipped), approx_kl.

    p went from 1/4 to 1/2: the ratio 2 is clipped to 1.5, and the loss is -1.5 * 2 * ln(1/2) = 2.0794.

    >>> logp_BT, old_logp_BT = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    >>> item = cispo_loss(logp_BT, old_logp_BT, torch.tensor([[2.]]), clip=1.0, clip_high=0.5)
    >>> round(item.loss_BT.item(), 4)
    2.0794
    """
    low, high = clip_range(clip, clip_high)
    logp_BT = widen(logp_BT)
    ratio_BT = (logp_BT - widen(old_logp_BT)).exp().detach()
    weight_BT = ratio_BT.clamp(low, high)
    return ItemLoss(
        loss_BT=-weight_BT * advantages_BT * logp_BT,
        stats_BT={
            "ratio": ratio_BT,
            "clip_fraction": (weight_BT != ratio_BT).float(),
            "approx_kl": estimate(old_logp_BT, logp_BT, kind="k3").detach(),
        },
    )


def reinforce_loss(logp_BT: Tensor, advantages_BT: Tensor) -> ItemLoss:
    """-A logp (Williams 1992, eq. 4): the plain policy gradient, for rollouts of the current policy.

    >>> reinforce_loss(torch.tensor([[-0.5]]), torch.tensor([[3.]])).loss_BT.tolist()
    [[1.5]]
    """
    return ItemLoss(loss_BT=-advantages_BT * widen(logp_BT), stats_BT={})


def truncated_importance(old_logp_BT: Tensor, behaviour_logp_BT: Tensor, *, cap: float) -> Tensor:
    """min(e^(old_logp - behaviour_logp), cap), without gradient: truncated importance sampling (Ionides 2008).

    It corrects for tokens sampled by other weights or another engine than the trainer's (Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training"). Multiply the loss of each token by it.

    >>> old_logp_BT, behaviour_logp_BT = torch.tensor([[0.6, 0.2]]).log(), torch.tensor([[0.1, 0.4]]).log()
    >>> truncated_importance(old_logp_BT, behaviour_logp_BT, cap=2.0)
    tensor([[2.0000, 0.5000]])
    """
    _check_cap(cap)
    return (widen(old_logp_BT) - widen(behaviour_logp_BT)).exp().clamp(max=cap).detach()


def sequence_importance(old_logp_BT: Tensor, behaviour_logp_BT: Tensor, mask_BT: Tensor, *, cap: float) -> Tensor:
    """min(e^(sum over the response of old_logp - behaviour_logp), cap) on every token of an answer, without gradient.

    The weight of the answer as a whole. Unlike the weight of a token it accounts for the tokens before, which other
    weights sampled too; its spread grows with the length, so it suits short answers and weights that differ little.

    Ratios 3 and 1/2 make 1.5 for both tokens; what lies outside the response does not count.

    >>> old_logp_BT, behaviour_logp_BT = torch.tensor([[0.6, 0.2, 0.9]]).log(), torch.tensor([[0.2, 0.4, 0.1]]).log()
    >>> sequence_importance(old_logp_BT, behaviour_logp_BT, torch.tensor([[1, 1, 0]]).bool(), cap=2.0)
    tensor([[1.5000, 1.5000, 1.5000]])
    """
    _check_cap(cap)
    gap_BT = masked(widen(old_logp_BT) - widen(behaviour_logp_BT), mask_BT)
    return gap_BT.sum(dim=1, keepdim=True).exp().clamp(max=cap).detach().expand(mask_BT.shape)


def mean_ratio(old_logp_BT: Tensor, behaviour_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """e^(mean over the response of old_logp - behaviour_logp) of each answer, without gradient.

    It is the geometric mean of the ratios of its tokens, 1 where it has none: how near whoever sampled an answer is to
    the policy, whatever its length.

    Ratios 4 and 1/2 have the geometric mean sqrt(2).

    >>> old_logp_BT, behaviour_logp_BT = torch.tensor([[0.8, 0.2, 0.9]]).log(), torch.tensor([[0.2, 0.4, 0.1]]).log()
    >>> mean_ratio(old_logp_BT, behaviour_logp_BT, torch.tensor([[1, 1, 0]]).bool())
    tensor([1.4142])
    """
    gap_BT = masked(widen(old_logp_BT) - widen(behaviour_logp_BT), mask_BT)
    return (gap_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)).exp().detach()


def _check_cap(cap: float) -> None:
    if cap <= 0:
        raise ConfigError(f"cap: found {cap}, expected more than 0 (2 is usual)")
