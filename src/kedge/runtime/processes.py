"""A world of processes over torch.distributed: gradients and numbers are added in float32 at least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from kedge.core.world import share

T = TypeVar("T")

_BUCKET_BYTES = 256 * 2**20
"""Tensors are added together up to this size: a meeting costs more than a little memory."""


class ProcessWorld:
    """The processes of a group that has been joined (`torch.distributed.init_process_group`)."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def mine(self, parts: Sequence[T]) -> list[T]:
        return share(parts, self.rank, self.size)

    def add(self, *tensors: Tensor) -> None:
        _reduce(tensors, dist.ReduceOp.SUM)

    def highest(self, *tensors: Tensor) -> None:
        _reduce(tensors, dist.ReduceOp.MAX)

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def same(self, value: T) -> T:
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]


@torch.no_grad()
def _reduce(tensors: Sequence[Tensor], operation: Any) -> None:
    """In place; tensors of two bytes meet in float32, in which sums lose nothing that counts."""
    for bucket in _buckets(tensors):
        dtype = torch.promote_types(bucket[0].dtype, torch.float32) if bucket[0].is_floating_point() else torch.int64
        flat = torch.cat([tensor.detach().reshape(-1).to(dtype) for tensor in bucket])
        cast(Any, dist).all_reduce(flat, op=operation)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours of one type and device, up to a size."""
    buckets: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        last = buckets[-1][0] if buckets else None
        is_alike = last is not None and (last.dtype, last.device) == (tensor.dtype, tensor.device)
        if not is_alike or tensor.nbytes > room:
            buckets.append([])
            room = _BUCKET_BYTES
        buckets[-1].append(tensor)
        room -= tensor.nbytes
    return buckets
