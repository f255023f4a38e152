"""One process of a group that holds roles: what it is asked, in which order, and what it answers.

Each group is a program of processes alike that meet over torch.distributed, so all of its workers must be given the
same calls in the same order: else their sums mix, and training goes on with wrong numbers and no error. Calls have
numbers, and a worker refuses one that is not the next (`kedge.runtime.groups` hands them out). Records and states
travel as numpy: tensors of torch are slow through an object store.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import threading
import time
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from kedge.core.errors import KedgeError, ProcessError
from kedge.core.world import ALONE, World, portable
from kedge.runtime.processes import Place, Within, joined, sharding_alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """An event that a worker reports: the arguments of `Context.event`."""

    level: Any
    code: str
    message: str
    evidence: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a worker says of a call besides its result."""

    seconds: float
    """That the call took."""
    error: BaseException | None = None
    notes: tuple[Note, ...] = ()
    metrics: Mapping[str, float] | None = None
    """Of an update, which all workers of a group must have alike."""
    host: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)


@dataclass(frozen=True, slots=True)
class _Array:
    """A tensor; `dtype` is its own where numpy has none like it."""

    array: Any
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class _Record:
    """A dataclass of tensors and records."""

    kind: type[Any]
    values: Mapping[str, Any]


def packed(value: Any) -> Any:
    """The same value with arrays in the place of tensors, in records, dicts, lists and tuples."""
    match value:
        case Tensor():
            tensor = value.detach().cpu().contiguous()
            if tensor.dtype == torch.bfloat16:
                return _Array(tensor.view(torch.int16).numpy(), torch.bfloat16)
            return _Array(tensor.numpy())
        case dict():
            return {key: packed(item) for key, item in cast("dict[Any, Any]", value).items()}
        case list() | tuple() if type(value) in (list, tuple):
            return type(value)(packed(item) for item in cast("Sequence[Any]", value))
        case _ if _is_record(value):
            return _Record(type(value), {part.name: packed(getattr(value, part.name)) for part in fields(value)})
        case _:
            return value


def unpacked(value: Any, device: torch.device | None = None) -> Any:
    """The other way round, with tensors of their own memory on a device; None is the CPU."""
    match value:
        case _Array():
            tensor = torch.from_numpy(value.array.copy())
            tensor = tensor if value.dtype is None else tensor.view(value.dtype)
            return tensor if device is None else tensor.to(device)
        case _Record():
            record = object.__new__(value.kind)  # it was checked when it was made
            for name, item in value.values.items():
                object.__setattr__(record, name, unpacked(item, device))
            return record
        case dict():
            return {key: unpacked(item, device) for key, item in cast("dict[Any, Any]", value).items()}
        case list() | tuple() if type(value) in (list, tuple):
            return type(value)(unpacked(item, device) for item in cast("Sequence[Any]", value))
        case _:
            return value


def _is_record(value: Any) -> bool:
    if not is_dataclass(value) or isinstance(value, type):
        return False
    return any(isinstance(getattr(value, part.name), Tensor) for part in fields(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """A group as a recipe asks for it."""

    name: str
    roles: frozenset[str]
    size: int
    """Processes, each with a GPU of its own where there are GPUs."""
    weights: str = "replicate"
    shard_within: Within = "machine"
    """Whose processes hold all parts of sharded weights together: those of a machine, or all of the group."""


class Make(Protocol):
    """Builds what one process of a group holds: parts by name, each with its verbs. It can be imported by its name."""

    def __call__(
        self, order: Any, *, roles: frozenset[str], world: World, device: str, notes: list[Note]
    ) -> Mapping[str, Any]: ...


class RoleWorker:
    """One process of a group: serves calls to the `parts` that it holds, in their order."""

    def __init__(
        self,
        parts: Mapping[str, Any],
        *,
        rank: int = 0,
        device: torch.device | None = None,
        notes: list[Note] | None = None,
        stacks: Path | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        """`notes` is where the parts put events. After `timeout_s` of one call, what all threads do is written into
        the folder `stacks`."""
        self._parts, self._rank, self._device = parts, rank, device
        self._notes = [] if notes is None else notes
        self._stacks, self._timeout_s = stacks, timeout_s
        self._due = 0

    def call(self, number: int, part: str, verb: str, args: Any, carried: Any = None) -> tuple[Reply, Any]:
        """The reply, and from process 0 the packed result. `args` are packed, those by position and those by name;
        `carried` is the packed result of another group."""
        if number != self._due:
            words = f"call {number} ({part}.{verb}) came to process {self._rank} where call {self._due} is due"
            return Reply(seconds=0.0, error=ProcessError(f"{words}: the calls of a group have one order")), None
        self._due += 1
        since = time.perf_counter()
        result, error = None, None
        try:
            with self._watched():
                given, named = unpacked(args, self._device)
                first = () if carried is None else (unpacked(carried),)
                result = getattr(self._parts[part], verb)(*first, *given, **named)
        except (Exception, SystemExit) as raised:
            error = _told(raised)
        notes, metrics = tuple(self._notes), _metrics(result)
        self._notes.clear()
        own = packed(result) if self._rank == 0 and error is None else None
        return Reply(seconds=time.perf_counter() - since, error=error, notes=notes, metrics=metrics), own

    @contextmanager
    def _watched(self) -> Generator[None]:
        if self._stacks is None or not self._timeout_s:
            yield
            return
        timer = threading.Timer(self._timeout_s, self._write_stacks)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _write_stacks(self) -> None:
        assert self._stacks is not None
        with suppress(OSError):  # a full disk is no reason to keep silent about who hangs
            self._stacks.mkdir(parents=True, exist_ok=True)
            with (self._stacks / f"rank-{self._rank}.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)


class Member:
    """The part `group` of every worker: meets the others, and makes the parts that it serves from then on."""

    def __init__(
        self, parts: dict[str, Any], layout: GroupLayout, rank: int, *, on_gpu: bool, timeout_s: float, stacks: Path
    ) -> None:
        self.notes: list[Note] = []
        self._parts, self._layout, self._rank = parts, layout, rank
        self._on_gpu, self._timeout_s, self._stacks = on_gpu, timeout_s, stacks
        self._stack = ExitStack()

    def address(self) -> tuple[str, int]:
        """Where the processes of the group may meet: at process 0."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return _own_address(), int(probe.getsockname()[1])

    def build(
        self, address: tuple[str, int], folder: str, environment: Mapping[str, str], make: Make, order: Any
    ) -> None:
        """Have `make` build the parts. `folder` is the driver's, in which relative paths start."""
        os.environ.update(environment)
        with suppress(OSError):
            os.chdir(folder)
        if self._on_gpu:
            torch.set_num_threads(1)  # as `few_host_threads` says
        device = "cuda:0" if self._on_gpu else "cpu"
        world = self._world(address)
        self._parts |= make(order, roles=self._layout.roles, world=world, device=device, notes=self.notes)

    def _world(self, address: tuple[str, int]) -> World:
        is_cut = self._layout.weights == "shard"
        if self._layout.size == 1:
            return self._stack.enter_context(sharding_alone(on_gpu=self._on_gpu)) if is_cut else ALONE
        place = Place(rank=self._rank, size=self._layout.size, local_rank=0, address=address[0], port=address[1])
        world = self._stack.enter_context(joined(place, on_gpu=self._on_gpu, timeout_s=self._timeout_s))
        world.write_stacks_to(self._stacks)
        if is_cut:
            world.shard_weights(self._layout.shard_within)
        return world


def _own_address() -> str:
    """This machine as others reach it: by the route that leads out, else by itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def make_worker(layout: GroupLayout, rank: int, *, on_gpu: bool, timeout_s: float, stacks: Path) -> RoleWorker:
    """A worker that has nothing but its part `group` yet."""
    parts: dict[str, Any] = {}
    parts["group"] = member = Member(parts, layout, rank, on_gpu=on_gpu, timeout_s=timeout_s, stacks=stacks)
    device = torch.device("cuda:0") if on_gpu else None
    return RoleWorker(parts, rank=rank, device=device, notes=member.notes, stacks=stacks, timeout_s=timeout_s)


def _told(error: BaseException) -> BaseException:
    """The error as it travels: its own words, and where it came from for one that is not ours."""
    if not isinstance(error, KedgeError):
        error.add_note("".join(traceback.format_exception(error)))
    return portable(error)


def _metrics(result: Any) -> Mapping[str, float] | None:
    is_metrics = isinstance(result, dict) and bool(result) and all(type(item) is float for item in result.values())
    return cast("Mapping[str, float]", result) if is_metrics else None
