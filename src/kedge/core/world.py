"""The processes that compute a run together. Each runs the same program on the whole batch and computes its share.

What is added up or gathered is the same on all of them afterwards, to the last bit, so that every decision that is
made from it is made alike. Alone there is nothing to add.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from kedge.core.errors import KedgeError, RunError

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What one process did for some time: seconds of its own work, of exchanging numbers, and of waiting until all of
    the others had come to exchange them. `memory_peak` is in GiB of its GPU, 0 without one."""

    busy: float
    communicating: float
    waiting: float
    memory_peak: float = 0.0


class World(Protocol):
    """Every method but `mine` and `explaining` is a meeting: all processes call it, in the same order, or the run ends
    with an error."""

    @property
    def rank(self) -> int:
        """The number of this process, from 0; number 0 writes files."""
        ...

    @property
    def size(self) -> int: ...

    @property
    def mesh(self) -> Any:
        """The processes as torch's `DeviceMesh` where each holds a part of the weights of models that learn; None where
        each holds all of them. On two dimensions the first has copies of the parts."""
        ...

    def mine(self, parts: Sequence[T]) -> list[T]:
        """This process's share of parts that are sorted by size."""
        ...

    def add(self, *tensors: Tensor) -> None:
        """Add up each tensor over all processes, in place."""
        ...

    def highest(self, *tensors: Tensor) -> None:
        """The largest of each entry over all processes, in place; what is not a number may be lost."""
        ...

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        ...

    def same(self, value: T) -> T:
        """The value of process 0."""
        ...

    def explaining(self) -> AbstractContextManager[None]:
        """Within, errors of exchanges that are no meetings (sharded weights are gathered in the midst of a pass) say
        which process is gone or hangs, as those of meetings do."""
        ...

    def spent(self) -> list[Spent]:
        """What each process did since this was asked last, by rank; nothing is measured of one that is alone."""
        ...


class Alone:
    """A single process; with a `mesh`, one that computes with sharded weights all the same."""

    rank = 0
    size = 1

    def __init__(self, mesh: Any = None) -> None:
        self.mesh = mesh

    def mine(self, parts: Sequence[T]) -> list[T]:
        return list(parts)

    def add(self, *tensors: Tensor) -> None:
        pass

    def highest(self, *tensors: Tensor) -> None:
        pass

    def gather(self, value: T) -> list[T]:
        return [value]

    def same(self, value: T) -> T:
        return value

    def explaining(self) -> AbstractContextManager[None]:
        return nullcontext()

    def spent(self) -> list[Spent]:
        return []


ALONE: World = Alone()


class _Replicated:
    """The processes of another world, each of which holds all weights."""

    mesh = None

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)


def replicated(world: World) -> World:
    """The same processes for models whose weights each of them holds: those that do not learn here."""
    return world if world.mesh is None else cast(World, _Replicated(world))


def together(world: World, compute: Callable[[], T]) -> list[T]:
    """What each process computes, by rank. What one of them refuses with an error of ours, all refuse."""
    if world.size == 1:
        return [compute()]
    try:
        own = compute()
    except KedgeError as error:
        own = error
    results: list[T] = []
    for result in world.gather(own):
        if isinstance(result, KedgeError):
            raise result
        results.append(result)
    return results


def share(parts: Sequence[T], rank: int, size: int) -> list[T]:
    """Every `size`-th part, forth and back, so that shares of parts that are sorted by size are about equally large.

    >>> [share([9, 8, 7, 6, 5, 4, 3], rank, 2) for rank in (0, 1)]
    [[9, 6, 5], [8, 7, 4, 3]]
    """
    places = (place % (2 * size) for place in range(len(parts)))
    owners = (place if place < size else 2 * size - 1 - place for place in places)
    return [part for part, owner in zip(parts, owners, strict=True) if owner == rank]


def passes_of(world: World, parts: Sequence[T]) -> list[tuple[T, bool]]:
    """This process's share of parts, each with whether it counts.

    Where weights are sharded every process makes as many passes, for they gather weights together: one with fewer parts
    computes the last of all once more, for nothing.
    """
    own = [(part, True) for part in world.mine(parts)]
    if world.mesh is None or not parts:
        return own
    most = -(-len(parts) // world.size)
    return own + [(parts[-1], False)] * (most - len(own))


_acts_alone: ContextVar[bool] = ContextVar("acts_alone", default=False)


@contextmanager
def acting_alone() -> Generator[None]:
    """Within, what `once` is given is done by this process without the others: nested calls, and the ways out of a run
    on which nobody may be waited for."""
    token = _acts_alone.set(True)
    try:
        yield
    finally:
        _acts_alone.reset(token)


def once(world: World, action: Callable[[], T]) -> T:
    """Process 0 does it. What it gives, or the error that it ends with, is the same on all; they wait for it.

    >>> once(ALONE, lambda: 3)
    3
    """
    if world.size == 1 or _acts_alone.get():
        return action()
    if world.rank:
        value, error = world.same(_nothing())
        if error is not None:
            raise error
        return value
    try:
        with acting_alone():
            value = action()
    except BaseException as error:
        world.same((None, portable(error)))
        raise
    return world.same((value, None))[0]


def _nothing() -> tuple[Any, BaseException | None]:
    """What a process that only listens brings to a meeting."""
    return None, None


def portable(error: BaseException) -> BaseException:
    """The error, or one with its words where it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a foreign class does when it is copied
        return RunError(f"{type(error).__name__}: {error}")
    return error


class InWorld(Protocol):
    """An object that all processes have, with files that process 0 alone reads and writes."""

    @property
    def world(self) -> World: ...


SelfT = TypeVar("SelfT", bound=InWorld)


def by_first(method: Callable[Concatenate[SelfT, P], T]) -> Callable[Concatenate[SelfT, P], T]:
    """A method that process 0 runs for all (`once`)."""

    @wraps(method)
    def call(self: SelfT, *args: P.args, **named: P.kwargs) -> T:
        return once(self.world, lambda: method(self, *args, **named))

    return call
