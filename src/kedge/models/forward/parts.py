"""Tensors of which a process holds a part (DTensor): parts of a whole and the whole of parts.

Every process calls what gathers, in the same order. Weights are cut by their first dimension alone.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor


def num_parts(mesh: Any) -> int:
    """Into how many parts a weight is cut; on a mesh of two dimensions the first has copies of them."""
    return int(mesh.size(mesh.ndim - 1))


def num_copies(mesh: Any) -> int:
    """How many processes hold the same part."""
    return int(mesh.size()) // num_parts(mesh)


def is_part(tensor: Tensor) -> bool:
    """Whether this process has a part of the tensor only."""
    return hasattr(tensor, "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor, in the same memory."""
    return cast(Any, tensor)._local_tensor if is_part(tensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, on all processes."""
    return cast(Any, tensor).full_tensor() if is_part(tensor) else tensor


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """What this process has of a whole tensor that is cut as `like` is."""
    if not is_part(like) or is_part(whole):
        return local(whole)
    mesh = cast(Any, like).device_mesh
    parts = whole.chunk(num_parts(mesh))
    place = mesh.get_local_rank(mesh.ndim - 1)
    return parts[place] if place < len(parts) else whole[:0]


def as_part(own: Tensor, like: Tensor) -> Tensor:
    """The tensor of which this process has `own`, cut as `like` is."""
    if not is_part(like):
        return own
    from torch.distributed.tensor import DTensor

    cut: Any = like
    return DTensor.from_local(
        own, cut.device_mesh, cut.placements, run_check=False, shape=cut.shape, stride=cut.stride()
    )
