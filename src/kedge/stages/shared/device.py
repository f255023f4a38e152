"""Where a model is computed, and what training it there costs."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import torch

from kedge.core.errors import ConfigError


def pick_device(name: str) -> str:
    """`auto` is the GPU where there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def checked_device(name: str) -> str:
    """`pick_device` for the option `--device`: a device that this machine does not have is an error that says so."""
    try:
        device = torch.device(pick_device(name))
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: there is no such device; auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: torch finds no GPU here; use cpu")
    return str(device)


@contextmanager
def few_host_threads(name: str) -> Generator[None]:
    """Where a GPU computes, the host has one thread within the block: its own tensors are small, and to wake all cores
    for them takes longer than they do (an iteration of PPO on an H200: 1.37 s with sixteen threads, 0.95 with one)."""
    before = torch.get_num_threads()
    if pick_device(name).startswith("cuda"):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class CostMeter:
    """The seconds of all steps of a run, and on a GPU the peak of its memory since the meter was made."""

    def __init__(self, device: str) -> None:
        self._device = device
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()

    def read(self, metrics: Sequence[Mapping[str, float]]) -> dict[str, str]:
        """`metrics` are all that the run has logged: those of the parts before a resumption count too."""
        cost = {"training time": f"{sum(line.get('time/step', 0.0) for line in metrics):.1f} s"}
        if self._device.startswith("cuda"):
            cost["peak GPU memory"] = f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"
        return cost
