"""A world of processes over torch.distributed: gradients and numbers are added in float32 at least.

Before every meeting the processes tell each other what they came for. So one that has gone another way (an error that
it alone met, a decision that it alone took) is an error on all of them and not a sum of unlike things.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast

import torch
import torch.distributed as dist

# Here, for its functions have the group that exists when they are defined as a default: it would never be given back,
# and its threads would run into the end of Python, where torch aborts.
import torch.distributed.nn.functional  # pyright: ignore[reportUnusedImport]
from torch import Tensor

from kedge.core.errors import ConfigError, KedgeError, ProcessError, ProcessLost
from kedge.core.world import Alone, Spent, World, share
from kedge.runtime.watch import Watch

T = TypeVar("T")
Within = Literal["machine", "all"]
"""Whose processes hold all parts of a weight together."""

_BUCKET_BYTES = 256 * 2**20
"""Tensors are added together up to this size: a meeting costs more than a little memory."""


_PURPOSES: Final = ("adds up numbers", "looks for the largest number", "tells what it has", "hears of process 0")


class ProcessWorld:
    """The processes of a group that has been joined (`torch.distributed.init_process_group`).

    On a GPU a meeting begins when this process's own work is done and ends when its numbers are there: what is still
    queued would else be counted as waiting for the others.
    """

    def __init__(self, watch: Watch | None = None, *, timeout_s: float = 0.0, on_gpu: bool = False) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.watch = watch
        self.mesh: Any = None
        self._timeout_s = timeout_s
        self._on_gpu = on_gpu
        self._waiting = self._communicating = 0.0
        self._since = time.perf_counter()

    def write_stacks_to(self, folder: Path) -> None:
        """Where this process writes what it was doing, should another one hang."""
        if self.watch is not None:
            self.watch.stacks = folder

    def shard_weights(self, within: Within = "machine") -> None:
        """From here on each process holds a part of every weight: all meet, and say on which machine they are."""
        machines = self.gather(socket.gethostname())
        self.mesh = make_mesh(*mesh_shape(machines, within), on_gpu=self._on_gpu)

    def mine(self, parts: Sequence[T]) -> list[T]:
        return share(parts, self.rank, self.size)

    def add(self, *tensors: Tensor) -> None:
        with self._meeting(0):
            _reduce(tensors, dist.ReduceOp.SUM)

    def highest(self, *tensors: Tensor) -> None:
        with self._meeting(1):
            _reduce(tensors, dist.ReduceOp.MAX)

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        with self._meeting(2):
            dist.all_gather_object(values, value)
        return values

    def same(self, value: T) -> T:
        values: list[Any] = [value]
        with self._meeting(3):
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def spent(self) -> list[Spent]:
        now = self._now()
        busy = now - self._since - self._waiting - self._communicating
        peak = torch.cuda.max_memory_allocated() / 2**30 if self._on_gpu else 0.0
        by_rank = torch.zeros(self.size, 4, dtype=torch.float64)
        by_rank[self.rank] = torch.tensor([busy, self._communicating, self._waiting, peak], dtype=torch.float64)
        self._since, self._waiting, self._communicating = now, 0.0, 0.0
        self.add(by_rank)
        return [
            Spent(busy=busy, communicating=communicating, waiting=waiting, memory_peak=peak)
            for busy, communicating, waiting, peak in by_rank.tolist()
        ]

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def _meeting(self, purpose: int) -> Generator[None]:
        """Within, processes that are gone, that hang, or that came for something else become errors that say so.

        They compare what they came for once all are there, so the time until then was spent waiting.
        """
        if self.watch is not None:
            self.watch.is_waiting = True
        try:
            come = self._now()
            self._compare(purpose)
            met = time.perf_counter()
            yield
            self._waiting += met - come
            self._communicating += self._now() - met
        except RuntimeError as error:
            if isinstance(error, ProcessError) or self.watch is None:
                raise
            raise self._why_apart(error, self.watch) from error
        finally:
            if self.watch is not None:
                self.watch.is_waiting = False

    @contextmanager
    def explaining(self) -> Generator[None]:
        """The same for exchanges that are no meetings: those of FSDP2."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, KedgeError) or self.watch is None or not _is_of_exchange(error):
                raise
            raise self._why_apart(error, self.watch) from error

    def _why_apart(self, error: RuntimeError, watch: Watch) -> BaseException:
        """The error that ended another process, who hangs, or that the others are gone."""
        is_late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        if (heard := watch.heard(wait_s=0.5 if is_late else 5.0)) is not None:
            return heard
        if is_late:
            return watch.hang(self._timeout_s)
        return ProcessLost(f"process {self.rank} cannot reach the others any more: {error}")

    def _compare(self, purpose: int) -> None:
        own = torch.tensor([purpose])
        purposes = [torch.zeros_like(own) for _ in range(self.size)]
        cast(Any, dist).all_gather(purposes, own)
        if any(int(other) != purpose for other in purposes):
            said = ", ".join(f"process {rank} {_PURPOSES[int(other)]}" for rank, other in enumerate(purposes))
            heard = self.watch.heard() if self.watch and not _is_handling() else None
            raise heard or ProcessError(f"the processes of this run have come apart: {said}")


def mesh_shape(machines: Sequence[str], within: Within) -> tuple[int, int]:
    """How many copies of the parts there are, and how many parts; `machines` are those of the processes, by rank.

    >>> mesh_shape(["a", "a", "b", "b"], "machine"), mesh_shape(["a", "a", "b", "b"], "all")
    ((2, 2), (1, 4))
    """
    if within == "all":
        return 1, len(machines)
    blocks = [[*ranks] for _, ranks in groupby(machines)]
    if len({len(block) for block in blocks}) > 1 or len(blocks) != len({*machines}):
        counts = ", ".join(f"{block[0]}: {len(block)}" for block in blocks)
        raise ConfigError(
            "placement.shard_within: machine needs as many processes on every machine, in the order of their numbers; "
            f"found {counts}. Start as many on each, or set placement.shard_within: all"
        )
    return len(blocks), len(blocks[0])


def make_mesh(copies: int, parts: int, *, on_gpu: bool) -> Any:
    """The processes of the group that has been joined, for sharded weights."""
    from torch.distributed.device_mesh import init_device_mesh

    shape, names = ((parts,), ("shard",)) if copies == 1 else ((copies, parts), ("replicate", "shard"))
    return init_device_mesh("cuda" if on_gpu else "cpu", shape, mesh_dim_names=names)


def _is_of_exchange(error: RuntimeError) -> bool:
    """Whether torch's backends of exchange say it: gloo has no error of its own."""
    return isinstance(error, cast(Any, dist).DistError) or any(name in str(error) for name in ("gloo", "NCCL"))


def _is_handling() -> bool:
    """Whether an error is being handled, which is then why this process went another way."""
    return sys.exception() is not None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This process among those that a launcher started, and where they meet."""

    rank: int
    size: int
    local_rank: int
    """Its number on its machine, which is the number of its GPU."""
    address: str
    port: int


def place_of(environment: Mapping[str, str]) -> Place | None:
    """What torchrun (also that of a Kubernetes job) or srun says of this process; None where none of them started it.

    Inside of an sbatch script SLURM_NTASKS is set too, but only srun sets SLURM_STEP_NUM_TASKS.

    >>> place_of({"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7",
    ...     "SLURM_STEP_NODELIST": "gpu[03-04]"})
    Place(rank=9, size=16, local_rank=1, address='gpu03', port=20007)
    """
    try:
        if "RANK" in environment and int(environment.get("WORLD_SIZE", "1")) > 1:
            rank = int(environment["RANK"])
            return Place(
                rank=rank,
                size=int(environment["WORLD_SIZE"]),
                local_rank=int(environment.get("LOCAL_RANK", rank)),
                address=environment["MASTER_ADDR"],
                port=int(environment["MASTER_PORT"]),
            )
        if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
            return Place(
                rank=int(environment["SLURM_PROCID"]),
                size=int(environment["SLURM_STEP_NUM_TASKS"]),
                local_rank=int(environment["SLURM_LOCALID"]),
                address=environment.get("MASTER_ADDR") or first_host(nodes),
                port=int(environment.get("MASTER_PORT") or 20_000 + int(environment["SLURM_JOB_ID"]) % 20_000),
            )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"the environment of a process that torchrun or srun started is not whole: {error}; RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT belong together, as do SLURM_PROCID, SLURM_LOCALID and SLURM_STEP_NODELIST"
        ) from error
    return None


def first_host(nodes: str) -> str:
    """The first machine of a list as Slurm writes it.

    >>> [first_host(nodes) for nodes in ("gpu[07-09,12],big", "a1,a2", "rack[1,3]-ib", "r[1-2]n[05-06]")]
    ['gpu07', 'a1', 'rack1-ib', 'r1n05']
    """
    entry = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", entry[0] if entry else nodes)


@contextmanager
def joined(place: Place, *, on_gpu: bool, timeout_s: float) -> Generator[ProcessWorld]:
    """Meet the other processes; within, this one is of their world. On a GPU, its own becomes the current one."""
    timeout = timedelta(seconds=timeout_s)
    os.environ.update(
        RANK=str(place.rank), WORLD_SIZE=str(place.size), MASTER_ADDR=place.address, MASTER_PORT=str(place.port)
    )
    if on_gpu:
        torch.cuda.set_device(place.local_rank)
    try:
        store, rank, size = next(cast(Any, dist).rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        dist.init_process_group(
            _backend(on_gpu),
            store=cast(Any, dist).PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:
        raise ProcessLost(
            f"process {place.rank} of {place.size} did not meet the others at {place.address}:{place.port} within "
            f"{timeout_s:g} s: {error}"
        ) from error
    watch = Watch(cast(Any, dist).PrefixStore("watch", store), rank, size)
    try:
        yield ProcessWorld(watch, timeout_s=timeout_s, on_gpu=on_gpu)
    except BaseException as error:
        watch.tell(error)
        if not on_gpu:  # NCCL would wait for those that are gone
            dist.destroy_process_group()
        raise
    watch.close()
    dist.destroy_process_group()


@contextmanager
def sharding_alone(*, on_gpu: bool) -> Generator[World]:
    """Within, this process is a group of one, which computes with sharded weights as several would."""
    store = cast(Any, dist).TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group(_backend(on_gpu), store=store, rank=0, world_size=1)
    try:
        yield Alone(make_mesh(1, 1, on_gpu=on_gpu))
    finally:
        dist.destroy_process_group()


def _backend(on_gpu: bool) -> str:
    return "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
