"""Memory of the host beside a GPU: where a run keeps what is not having its turn.

Optimiser state is streamed from there bucket by bucket (`kedge.models.training.offload`). The weights of a frozen model
come as a whole for its turn (`MovedWeights`), byte by byte what they were. Left out: weights that learn, which
generation reads too, and weights that several processes hold in parts.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kedge.core.errors import ModelError
from kedge.models.forward.capture import release_graphs_over

_BLOCK_BYTES = 1 << 28
"""Tensors share blocks of this size: torch rounds pinned memory up to a power of two, for each tensor by itself that
would be a third more than is needed."""
_ALIGNMENT = 64
"""Bytes at whose multiples tensors begin."""


def host_bytes(sizes: Sequence[int], *, pinned: bool) -> list[Tensor]:
    """Zeros in host memory, so many bytes each. A GPU copies to and from `pinned` memory while the host goes on."""
    blocks: list[int] = []
    places: dict[int, tuple[int, int]] = {}
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size = -(-sizes[index] // _ALIGNMENT) * _ALIGNMENT
        block = next((block for block, used in enumerate(blocks) if used + size <= _BLOCK_BYTES), len(blocks))
        if block == len(blocks):
            blocks.append(0)
        places[index] = block, blocks[block]
        blocks[block] += size
    memory = [_zeros(size, pinned=pinned) for size in blocks]
    return [memory[block][start : start + sizes[index]] for index, (block, start) in sorted(places.items())]


def _zeros(size: int, *, pinned: bool) -> Tensor:
    try:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:
        raise ModelError(
            f"memory.offload: the host did not give {size / 2**30:.2f} GiB more of pinned memory "
            f"({str(error).partition(chr(10))[0]}); move less (a shorter list), or run where the host has more"
        ) from error


def host_floats(like: Sequence[Tensor], *, pinned: bool) -> list[Tensor]:
    """Zeros in float32 of the same shapes, in host memory."""
    blocks = host_bytes([4 * tensor.numel() for tensor in like], pinned=pinned)
    return [block.view(torch.float32).view(tensor.shape) for block, tensor in zip(blocks, like, strict=True)]


@torch.no_grad()
def host_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in float32, in host memory; pinned where the tensors are on a GPU."""
    copies = host_floats(tensors, pinned=any(tensor.is_cuda for tensor in tensors))
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor.detach())
    return copies


class MovedWeights:
    """The weights of frozen models, which are on their device within `turn` alone.

    They stay the same tensors: what is freed between two turns is the memory behind them. It may be elsewhere the next
    time, so CUDA graphs over them are dropped, and captured anew in the next turn: the same kernels over the same
    numbers. Buffers stay where they are.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._weights = [weight for model in models for weight in model.parameters()]
        for weight in self._weights:
            if not weight.untyped_storage().resizable():  # that of a file which is mapped into memory
                weight.data = weight.detach().clone()
        storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage() for weight in self._weights}
        self._storages = list(storages.values())
        self.num_bytes = sum(storage.nbytes() for storage in self._storages)
        self._device = self._weights[0].device
        sizes = [storage.nbytes() for storage in self._storages]
        self._host = host_bytes(sizes, pinned=self._device.type == "cuda")
        for host, storage in zip(self._host, self._storages, strict=True):
            host.copy_(_bytes_of(storage))
        self._depth = 0
        self._leave()

    @contextmanager
    def turn(self) -> Generator[None]:
        """Inside of the block the weights are on their device."""
        if not self._depth:
            self._come()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._leave()

    def _come(self) -> None:
        try:
            for host, storage in zip(self._host, self._storages, strict=True):
                storage.resize_(len(host))
                _bytes_of(storage).copy_(host, non_blocking=True)
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"out of memory for {self.num_bytes / 2**30:.2f} GiB of frozen weights that come back from the host: "
                "set a smaller micro_batch or memory.generate_rows, or memory.frozen_bits 8 or 4"
            ) from error

    def _leave(self) -> None:
        release_graphs_over(self._weights)
        for storage in self._storages:
            storage.resize_(0)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
