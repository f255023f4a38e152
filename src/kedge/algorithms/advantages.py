"""Scores and rewards in, advantages out. Pure functions of tensors; zero outside the mask; float32 at least.

Masks may have holes (several turns): the successor of a token is the next True token of its row. What stands outside
the mask is never read, NaN included. Left out: V-trace and other off-policy corrections.
Shape letters: B sequences, T token positions, G groups, N places in the largest group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.core.loss import masked, widen

_GROUP_EPS = 1e-6


def gae(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16) and the returns it implies; not whitened.

    delta_t = r_t + gamma V_next - V_t;  A_t = delta_t + gamma lam A_next;  returns = A + V.
    `next` is the next True token of the row; after the last one value and advantage are 0 (an answer that was cut
    is treated as ended: there is no bootstrap).

    With gamma 1/2 and lam 1/2: A_1 = 4 - 2 = 2; delta_0 = 1 + 2/2 - 1 = 1, A_0 = 1 + 2/4 = 1.5.

    >>> rewards_BT, values_BT = torch.tensor([[1., 4., 99.]]), torch.tensor([[1., 2., 99.]])
    >>> advantages_BT, returns_BT = gae(rewards_BT, values_BT, torch.tensor([[1, 1, 0]]).bool(), gamma=0.5, lam=0.5)
    >>> advantages_BT.tolist(), returns_BT.tolist()
    ([[1.5, 2.0, 0.0]], [[2.5, 4.0, 0.0]])
    """
    values_BT = masked(widen(values_BT), mask_BT)
    delta_BT = masked(widen(rewards_BT), mask_BT) + gamma * _next_values(values_BT, mask_BT) - values_BT
    advantages_BT = _discounted(delta_BT, mask_BT, gamma * lam)
    return advantages_BT, advantages_BT + values_BT


def returns_to_go(rewards_BT: Tensor, mask_BT: Tensor, *, gamma: float) -> Tensor:
    """R_t = r_t + gamma R_next: the return of REINFORCE (Williams 1992) and REINFORCE++ (Hu 2025).

    >>> returns_to_go(torch.tensor([[1., 99., 4.]]), torch.tensor([[1, 0, 1]]).bool(), gamma=0.5).tolist()
    [[3.0, 0.0, 4.0]]
    """
    return _discounted(widen(rewards_BT), mask_BT, gamma)


def whiten(x_BT: Tensor, mask_BT: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Zero mean, unit variance over masked entries; zero outside: (x - mean) / sqrt(variance + eps).

    The variance is that of the population (divided by n).

    >>> whiten(torch.tensor([[1., 3., 99.]]), torch.tensor([[1, 1, 0]]).bool()).round(decimals=4).tolist()
    [[-1.0, 1.0, 0.0]]
    """
    _, deviation_BT, std = _moments(x_BT, mask_BT, eps)
    return deviation_BT / std


def scale(x_BT: Tensor, mask_BT: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Unit variance over masked entries, their mean kept; zero outside: (x - mean) / sqrt(variance + eps) + mean.

    >>> scale(torch.tensor([[1., 5., 99.]]), torch.tensor([[1, 1, 0]]).bool()).round(decimals=4).tolist()
    [[2.0, 4.0, 0.0]]
    """
    mean, deviation_BT, std = _moments(x_BT, mask_BT, eps)
    return masked(deviation_BT / std + mean, mask_BT)


def group_centred(scores_B: Tensor, group_B: Tensor, *, scale: bool) -> Tensor:
    """Score minus the mean of its group, over the group's std: GRPO (Shao et al. 2024, section 4.1.2).

    A = (s - mean) / (std + 1e-6) with the sample std (n - 1). `scale=False` only centres: Dr. GRPO (Liu et al. 2025,
    section 3.2). Groups are any integers in any order; a group of one gives 0. Here: one number per answer; process
    supervision (section 4.1.3) is left out.

    >>> group_centred(torch.tensor([1., 7., 3.]), torch.tensor([4, -2, 4]), scale=False).tolist()
    [-1.0, 0.0, 1.0]
    >>> group_centred(torch.tensor([1., 7., 3.]), torch.tensor([4, -2, 4]), scale=True)
    tensor([-0.7071,  0.0000,  0.7071])
    """
    deviation_GN, size_G, row_B, column_B = _deviations(scores_B, group_B)
    if scale:
        variance_G = deviation_GN.square().sum(dim=1) / (size_G - 1).clamp(min=1)
        deviation_GN = deviation_GN / (variance_G.sqrt() + _GROUP_EPS)[:, None]
    return deviation_GN[row_B, column_B].to(widen(scores_B).dtype)


def leave_one_out(scores_B: Tensor, group_B: Tensor) -> Tensor:
    """Score minus the mean of the others in its group: RLOO (Kool et al. 2019; Ahmadian et al. 2024, section 3).

    A = s - (sum of the others) / (n - 1) = (s - mean) n / (n - 1). A group of one has no others and gives 0.

    >>> leave_one_out(torch.tensor([1., 7., 2., 6.]), torch.tensor([4, -2, 4, 4])).tolist()
    [-3.0, 0.0, -1.5, 4.5]
    """
    deviation_GN, size_G, row_B, column_B = _deviations(scores_B, group_B)
    deviation_GN = deviation_GN * (size_G / (size_G - 1).clamp(min=1))[:, None]
    return deviation_GN[row_B, column_B].to(widen(scores_B).dtype)


def greedy_baseline(scores_B: Tensor, greedy_scores_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Score minus the score of the greedy answer to the same prompt, on every token: ReMax (Li et al. 2023, alg. 1).

    >>> greedy_baseline(torch.tensor([3.]), torch.tensor([1.]), torch.tensor([[1, 0]]).bool()).tolist()
    [[2.0, 0.0]]
    """
    gain_B = widen(scores_B) - widen(greedy_scores_B)
    return masked(gain_B[:, None].expand(mask_BT.shape), mask_BT)


def _discounted(x_BT: Tensor, mask_BT: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay y_next on the mask, zero outside.

    A hole adds nothing and passes the sum through undiscounted, so rows need no compaction. The reach doubles each
    round: log2(T) rounds of whole-tensor arithmetic, which on CPU too cost no more than a loop over T (one thread,
    64 x 384: 13 times less; 512 x 384: the same).
    """
    sum_BT = masked(x_BT, mask_BT)
    carry_BT = torch.ones_like(sum_BT).masked_fill(mask_BT, decay)
    reach, length = 1, mask_BT.shape[1]
    while reach < length:
        sum_BT = sum_BT + carry_BT * F.pad(sum_BT[:, reach:], (0, reach))
        carry_BT = carry_BT * F.pad(carry_BT[:, reach:], (0, reach))
        reach *= 2
    return masked(sum_BT, mask_BT)


def _next_values(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The value of the next True token of the row after each position, 0 where there is none."""
    length = mask_BT.shape[1]
    position_T = torch.arange(length, device=mask_BT.device)
    here_or_later_BT = torch.where(mask_BT, position_T, length).flip(1).cummin(dim=1).values.flip(1)
    later_BT = F.pad(here_or_later_BT[:, 1:], (0, 1), value=length)
    return F.pad(values_BT, (0, 1)).gather(1, later_BT)


def _moments(x_BT: Tensor, mask_BT: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean over the mask, deviations from it (zero outside), and sqrt(population variance + eps)."""
    x_BT = masked(widen(x_BT), mask_BT)
    count = mask_BT.sum().clamp(min=1)
    mean = x_BT.sum() / count
    deviation_BT = masked(x_BT - mean, mask_BT)
    return mean, deviation_BT, (deviation_BT.square().sum() / count + eps).sqrt()


def _deviations(scores_B: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Deviations from the group mean laid out one group a row, group sizes, and the row and column of each score.

    In float64, because equal scores must give 0 and not rounding noise over 1e-6; and without scattered adds, whose
    order, and so whose last bit, changes from run to run on a GPU.
    """
    _, row_B, size_G = torch.unique(group_B, return_inverse=True, return_counts=True)
    order_B = row_B.argsort(stable=True)
    place_B = torch.arange(len(row_B), device=row_B.device) - (size_G.cumsum(0) - size_G)[row_B[order_B]]
    column_B = torch.empty_like(row_B).index_copy(0, order_B, place_B)
    filled_GN = torch.arange(int(place_B.max()) + 1, device=row_B.device) < size_G[:, None]
    scores_GN = torch.zeros(filled_GN.shape, dtype=torch.float64, device=row_B.device)
    scores_GN = scores_GN.index_put((row_B, column_B), scores_B.double())
    mean_G = scores_GN.sum(dim=1) / size_G
    return masked(scores_GN - mean_G[:, None], filled_GN), size_G, row_B, column_B
