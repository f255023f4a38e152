"""How much memory a stage took at its peak: of the GPU where it computes there, else of the whole process.

It is an event and no metric: no two runs take the same, and metrics are compared to the last bit.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

import torch

from kedge.core.protocols import Tracker
from kedge.stages.shared.device import pick_device

CODE: Final = "run.memory"
NAME: Final = "memory/peak_gib"
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

Of = Literal["gpu", "process"]


@contextmanager
def report_peak_memory(tracker: Tracker, device: str) -> Generator[None]:
    """An event with the peak of what happens inside, once it has ended well. `device` is that of the recipe."""
    of: Of = "gpu" if pick_device(device).startswith("cuda") else "process"
    _begin(of)
    yield
    if (peak := _peak(of)) is not None:
        where = "of the GPU" if of == "gpu" else "resident in the process"
        message = f"peak memory: {peak / 2**30:.2f} GiB {where}"
        evidence = {NAME: peak / 2**30, "of": of}
        tracker.event({"level": "info", "code": CODE, "message": message, "step": None, "evidence": evidence})


def _begin(of: Of) -> None:
    if of == "gpu":
        torch.cuda.reset_peak_memory_stats()
        return
    gc.collect()
    with suppress(OSError, AttributeError):  # glibc keeps what earlier stages have freed, until it is asked
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):  # else the mark is that of the process so far, earlier stages included
        _RESET.write_text("5")  # Linux: the high-water mark falls to what is resident now


def _peak(of: Of) -> float | None:
    """In bytes; None where the system does not say."""
    if of == "gpu":
        return float(torch.cuda.max_memory_allocated())
    with suppress(OSError, StopIteration):
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return float(line.split()[1]) * 2**10
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 2**10)
