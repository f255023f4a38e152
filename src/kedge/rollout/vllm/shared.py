"""Servers on the GPUs that learn: which ones, what memory they may take, and that it is free when they need it."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from kedge.core.errors import ConfigError
from kedge.core.files import readable_bytes
from kedge.rollout.vllm.settings import VllmSettings

_AUTO: Final = 0.5
"""Of what is free when the servers start. The moments of the optimisers and the graphs of the layers come later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUMemory:
    free: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """What vLLM may take of each GPU, and that in words."""

    share: float
    words: str


def release_memory() -> None:
    """Give back to the GPU what torch keeps for later: a server that wakes up takes its memory anew."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def gpu_memory(device: torch.device) -> GPUMemory:
    """Of the GPU that this process learns on, once it has released what it does not need."""
    if device.type != "cuda":
        raise ConfigError(
            f"generator.gpus is shared, and this run learns on the {device.type.upper()}: vLLM sleeps on NVIDIA GPUs "
            "alone. Set device: cuda, or gpus: 0 for vLLM on the CPU"
        )
    release_memory()
    free, total = torch.cuda.mem_get_info(device)
    return GPUMemory(free=free, total=total)


def weight_bytes(model: nn.Module) -> int:
    """Of the policy as vLLM holds it, without adapters."""
    return sum(
        weight.numel() * weight.element_size() for name, weight in model.named_parameters() if ".lora_" not in name
    )


def share_of(settings: VllmSettings, gpus: Sequence[GPUMemory], *, weights: int) -> MemoryShare:
    """What vLLM may take of each of these GPUs, on which a policy of `weights` bytes is spread by tensor_parallel.

    >>> settings, gpu = VllmSettings(python="p", gpus="shared"), GPUMemory(free=60 << 30, total=80 << 30)
    >>> share_of(settings, [gpu], weights=1 << 30).share
    0.37
    """
    fullest = min(gpus, key=lambda gpu: gpu.free / gpu.total)
    free = fullest.free / fullest.total
    share = math.floor(100 * _AUTO * free) / 100 if settings.memory_share == "auto" else settings.memory_share
    room, own = int(share * fullest.total), weights // settings.tensor_parallel
    of_gpu = f"{share:.2f} of a GPU of {readable_bytes(fullest.total)} is {readable_bytes(room)}"
    if share > free:
        raise ConfigError(
            f"generator.memory_share: {of_gpu}, and {readable_bytes(fullest.free)} are free beside what learns; set it "
            f"to at most {math.floor(100 * free) / 100:.2f}, or leave it out"
        )
    if room <= own:
        raise ConfigError(
            f"generator.memory_share: {of_gpu}, and the weights of the policy alone take {readable_bytes(own)} there; "
            f"{readable_bytes(fullest.free)} are free beside what learns. Set a larger share, spread vLLM over more of "
            "the GPUs (tensor_parallel), learn less (roles: lora), or give vLLM GPUs of its own"
        )
    words = (
        f"vLLM shares the GPUs that learn: awake it may take {of_gpu} (generator.memory_share), of which the weights "
        f"are {readable_bytes(own)}; {readable_bytes(fullest.free)} are free beside what learns"
    )
    return MemoryShare(share=share, words=words)


def shared_devices(settings: VllmSettings, names: Sequence[str], *, num_learning: int) -> list[tuple[str, ...]]:
    """The GPUs of each server among those that this process sees: the ones that learn, which are the first."""
    size = settings.tensor_parallel
    if num_learning > len(names):
        raise ConfigError(
            f"generator.gpus is shared, {num_learning} processes learn on this machine, and the first of them, which "
            f"starts vLLM, sees {len(names)} GPU(s): let each process see all GPUs of its machine"
        )
    if num_learning % size:
        raise ConfigError(
            f"generator.gpus is shared, and {num_learning} GPU(s) that learn cannot be cut into servers of {size} "
            "(generator.tensor_parallel)"
        )
    return [tuple(names[at : at + size]) for at in range(0, num_learning, size)]
