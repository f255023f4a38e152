"""One loss per token, and the one place where losses are averaged.

A mean over an optimiser step is a sum of numerators over a sum of denominators: the role that trains adds up
`weight_of` over all micro-batches and workers first, then divides every `weighted_sum` by that one total, so the
update does not depend on how the rows were cut. Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from kedge.core.errors import ConfigError, ShapeError
from kedge.core.optimiser import Per
from kedge.core.suggest import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemLoss:
    """One loss per token (B, T) and per-token facts to log. Nothing is averaged yet."""

    loss_BT: Tensor
    stats_BT: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        for name, stat_BT in self.stats_BT.items():
            if stat_BT.shape != self.loss_BT.shape:
                raise ShapeError(
                    f"ItemLoss: stats_BT[{name!r}] has shape {tuple(stat_BT.shape)}, "
                    f"expected {tuple(self.loss_BT.shape)}, the shape of loss_BT"
                )


def widen(x: Tensor) -> Tensor:
    """float32 at least: lower types are converted, float64 stays.

    >>> widen(torch.ones(1, dtype=torch.bfloat16)).dtype, widen(torch.ones(1, dtype=torch.float64)).dtype
    (torch.float32, torch.float64)
    """
    return x if x.dtype == torch.float64 else x.float()


def masked(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """x on the mask, 0 outside: what stands outside, NaN too, reaches neither values nor gradients.

    Clean log-probs and values with this *before* a loss: once a NaN went through arithmetic, its gradient is NaN
    even where the result is masked afterwards.

    >>> masked(torch.tensor([[1., float("nan")]]), torch.tensor([[True, False]])).tolist()
    [[1.0, 0.0]]
    """
    if mask_BT.dtype != torch.bool or mask_BT.shape != x_BT.shape:
        raise ShapeError(
            f"mask_BT is {mask_BT.dtype} of shape {tuple(mask_BT.shape)}, "
            f"expected torch.bool of shape {tuple(x_BT.shape)}, the shape of what it masks"
        )
    return torch.where(mask_BT, x_BT, x_BT.new_zeros(()))


def weight_of(mask_BT: Tensor, per: Per, *, max_length: int | None = None) -> Tensor:
    """The denominator that this batch adds to the step's total: how many items it has, as int64.

    token: True entries; sequence and sequence_sum: rows with a True entry; constant: B times T. A micro-batch that
    is padded to fewer positions than its step passes the step's T as `max_length` (only `constant` reads it).

    >>> mask_BT = torch.tensor([[True, True, False], [False, False, False]])
    >>> [weight_of(mask_BT, per).item() for per in ("token", "sequence", "sequence_sum", "constant")]
    [2, 1, 1, 6]
    """
    _check_per(per)
    if per == "token":
        return mask_BT.sum()
    if per == "constant":
        rows, length = mask_BT.shape
        return torch.full((), rows * (length if max_length is None else max_length), device=mask_BT.device)
    return mask_BT.any(dim=1).sum()


def weighted_sum(x_BT: Tensor, mask_BT: Tensor, per: Per) -> Tensor:
    """The numerator that this batch adds: the sum over the mask, or for `sequence` the sum of row means.

    >>> x_BT, mask_BT = torch.tensor([[1., 3.], [5., 99.]]), torch.tensor([[True, True], [True, False]])
    >>> weighted_sum(x_BT, mask_BT, "token").item(), weighted_sum(x_BT, mask_BT, "sequence").item()
    (9.0, 7.0)
    """
    _check_per(per)
    sum_B = widen(masked(x_BT, mask_BT)).sum(dim=1)
    if per == "sequence":
        sum_B = sum_B / mask_BT.sum(dim=1).clamp(min=1)
    return sum_B.sum()


def mean(item_or_tensor_BT: ItemLoss | Tensor, mask_BT: Tensor, *, per: Per) -> Tensor:
    """weighted_sum / weight_of: the mean over one batch that is a whole step by itself; 0 where nothing counts.

    token: sum / tokens. sequence: mean of row means. sequence_sum: mean of row sums. constant: sum / (B T).

    >>> x_BT, mask_BT = torch.tensor([[1., 3.], [5., 99.]]), torch.tensor([[True, True], [True, False]])
    >>> [mean(x_BT, mask_BT, per=per).item() for per in ("token", "sequence", "sequence_sum", "constant")]
    [3.0, 3.5, 4.5, 2.25]
    """
    x_BT = item_or_tensor_BT.loss_BT if isinstance(item_or_tensor_BT, ItemLoss) else item_or_tensor_BT
    return weighted_sum(x_BT, mask_BT, per) / weight_of(mask_BT, per).clamp(min=1)


def stat_sums(item: ItemLoss, mask_BT: Tensor) -> dict[str, Tensor]:
    """The numerators of the facts of a loss, without gradient; their denominator is `weight_of(mask_BT, "token")`.

    Facts are means over tokens whatever the loss is averaged over: a clip fraction is a share of tokens.
    """
    return {name: weighted_sum(stat_BT.detach(), mask_BT, "token") for name, stat_BT in item.stats_BT.items()}


def stat_means(item: ItemLoss, mask_BT: Tensor) -> dict[str, Tensor]:
    """Means over the tokens of one batch of every fact of a loss, without gradient.

    >>> item = ItemLoss(loss_BT=torch.zeros(1, 3), stats_BT={"ratio": torch.tensor([[1., 2., 99.]])})
    >>> stat_means(item, torch.tensor([[True, True, False]]))
    {'ratio': tensor(1.5000)}
    """
    tokens = weight_of(mask_BT, "token").clamp(min=1)
    return {name: total / tokens for name, total in stat_sums(item, mask_BT).items()}


def _check_per(per: str) -> None:
    if per not in get_args(Per):
        raise ConfigError(f"per: found {per!r}{did_you_mean(per, get_args(Per))}, expected {', '.join(get_args(Per))}")
