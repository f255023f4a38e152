"""Where a run computes: how many processes, and what follows when one of them dies or hangs. Never changes a result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, model_validator

from kedge.core.errors import ConfigError
from kedge.core.quoting import quoted
from kedge.core.settings import Section

MOST: Final = 1024
MOST_ON_CPU: Final = 64
"""Processes without a GPU share the cores of the machine; a larger number is a slip of the keyboard."""


def _auto_or_count(processes: Any) -> Any:
    is_count = isinstance(processes, int) and not isinstance(processes, bool) and 1 <= processes <= MOST
    if processes != "auto" and not is_count:
        raise ValueError(f"must be auto or a whole number from 1 to {MOST:,}, found {quoted(processes)}")
    return processes


class PlacementSettings(Section):
    """The processes that compute a run together. A resumed run may have other ones."""

    processes: Annotated[Literal["auto"] | int, BeforeValidator(_auto_or_count)] = 1
    """How many; `auto`: one for each GPU of this machine. Under torchrun and srun, those that they started."""
    weights: Literal["replicate", "shard"] = "replicate"
    """`replicate`: every process holds all weights, and gradients are added up. `shard`: each holds a part of every
    weight that learns, of its moments and of frozen models beside it (FSDP2)."""
    shard_within: Literal["machine", "all"] = "machine"
    """Whose processes hold all parts of a weight together: those of one machine, each machine with a copy, or all."""
    timeout: float = Field(default=600, gt=0, le=7 * 24 * 3600)
    """Seconds that one process may keep the others waiting before the run ends with its name."""
    restarts: int = Field(default=3, ge=0, le=1000)
    """How many times a process that was killed leads back to the last checkpoint by itself."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_groups(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and "groups" in given:
            raise ValueError("`groups` (roles on GPUs of their own) are not there yet: all processes hold all roles")
        return given


def num_processes(placement: PlacementSettings, *, num_gpus: int | None, num_sampling: int = 0) -> int:
    """How many processes this machine starts; `num_gpus` is None where the run computes on the CPU, and `num_sampling`
    of the GPUs sample and do not learn.

    >>> num_processes(PlacementSettings(processes="auto"), num_gpus=8)
    8
    >>> num_processes(PlacementSettings(processes="auto"), num_gpus=8, num_sampling=2)
    6
    >>> num_processes(PlacementSettings(processes="auto"), num_gpus=None)
    1
    """
    if placement.processes == "auto":
        return max((num_gpus or 1) - num_sampling, 1)
    if problem := too_many(placement.processes, num_gpus=num_gpus, num_sampling=num_sampling):
        raise ConfigError(f"placement.processes: {problem}")
    return placement.processes


def too_many(processes: int, *, num_gpus: int | None, num_sampling: int = 0) -> str | None:
    """Why this machine cannot run so many processes; None where it can."""
    if num_gpus is None:
        if processes <= MOST_ON_CPU:
            return None
        return f"{processes:,} processes on the CPU of one machine are too many; at most {MOST_ON_CPU}"
    num_learning = max(num_gpus - num_sampling, 1)
    if processes <= num_learning:
        return None
    samplers = f", of which vLLM has {num_sampling}" if num_sampling else ""
    return (
        f"{processes:,} processes need a GPU each, and torch finds {num_gpus} here{samplers}; use at most "
        f"{num_learning}, `auto`, or device: cpu"
    )
