"""What trial passes are measured with: a clock that waits for the device, and its free memory."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Gauge(Protocol):
    """What trial passes are measured with."""

    def seconds(self) -> float:
        """A clock that has waited for the device."""
        ...

    def free_bytes(self) -> int:
        """Memory of the device that nobody holds."""
        ...

    def release(self) -> None:
        """Give cached memory back to the device."""
        ...


class CudaGauge:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seconds(self) -> float:
        torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def gauge_of(device: torch.device) -> Gauge | None:
    """None where a constant is taken instead of a measurement."""
    return CudaGauge(device) if device.type == "cuda" else None
