"""The random numbers of passes: the same again where one is computed again, and of its own for each process."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from kedge.core.seeds import seed_for
from kedge.core.world import World


@contextmanager
def own_random_numbers(world: World, device: torch.device) -> Generator[None]:
    """Within the block each process has random numbers of its own, so that no two rows of a step have the same dropout;
    after it the generators of all are alike again. A single process goes on with those that it has."""
    if world.size == 1:
        yield
        return
    seed = int(torch.randint(2**62, ()))  # the same on all
    with same_random_numbers(device):
        torch.manual_seed(seed_for(seed, "process", world.rank))
        yield


@contextmanager
def same_random_numbers(device: torch.device) -> Generator[None]:
    """After the block the generators are as they were before it."""
    before = random_state(device)
    try:
        yield
    finally:
        restore(before, device)


def random_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), of_device


def restore(state: tuple[torch.Tensor, torch.Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
