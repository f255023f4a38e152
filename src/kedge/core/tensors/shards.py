"""Tensors of which each process holds a part (FSDP2's DTensors): which box of the whole tensor is its own."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of a tensor: where it begins and how long it is in each dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.size, strict=True))

    def within(self, outer: Box) -> Box:
        """The same box, its offset counted from where `outer` begins."""
        offset = tuple(start - base for start, base in zip(self.offset, outer.offset, strict=True))
        return Box(offset=offset, size=self.size)

    def overlap(self, other: Box) -> Box:
        """What two boxes have in common; it may be empty.

        >>> Box(offset=(0, 0), size=(4, 2)).overlap(Box(offset=(3, 0), size=(4, 2)))
        Box(offset=(3, 0), size=(1, 2))
        """
        starts = tuple(max(own, their) for own, their in zip(self.offset, other.offset, strict=True))
        ends = (min(own.stop, their.stop) for own, their in zip(self.slices, other.slices, strict=True))
        return Box(offset=starts, size=tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True)))


def is_sharded_tensor(value: Any) -> TypeGuard[DTensor]:
    """Whether processes hold a part of it each. Other tensors are told apart without importing what knows of parts."""
    if not isinstance(value, Tensor) or type(value) in (Tensor, Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def own_box(tensor: DTensor) -> Box:
    """The part of `tensor` that this process holds: every dimension is cut as `torch.chunk` cuts, mesh by mesh."""
    offset, size = [0] * tensor.ndim, list(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this process is not of the mesh that holds a tensor of shape {tuple(tensor.shape)}")
    for place, count, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
        if placement.is_replicate():
            continue
        if not placement.is_shard():
            raise ValueError(f"a tensor that is placed as {placement} has no parts that could be saved")
        dim = getattr(placement, "dim")  # noqa: B009 (only shards have one)
        length = -(-size[dim] // count)
        start = min(place * length, size[dim])
        offset[dim] += start
        size[dim] = min(length, size[dim] - start)
    box = Box(offset=tuple(offset), size=tuple(size))
    if tuple(tensor.to_local().shape) != box.size:
        raise ValueError(
            f"this process holds {tuple(tensor.to_local().shape)} of a tensor of shape {tuple(tensor.shape)}, "
            f"expected {box.size}: it is not cut into equal pieces"
        )
    return box


def is_first_copy(tensor: DTensor) -> bool:
    """Whether this process is the one to write its part, of those that hold the same part."""
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return all(
        place == 0 for place, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()
    )


def with_part(part: Tensor, like: DTensor) -> DTensor:
    """A tensor that is cut as `like` is, of which `part` is what this process holds."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
