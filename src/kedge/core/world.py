"""The processes that compute a run together. Each runs the same program on the whole batch and computes its share.

What is added up or gathered is the same on all of them afterwards, to the last bit, so that every decision that is
made from it is made alike. Alone there is nothing to add.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from kedge.core.errors import KedgeError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class World(Protocol):
    """Every method but `mine` is a meeting: all processes call it, in the same order, or the run ends with an error."""

    @property
    def rank(self) -> int:
        """The number of this process, from 0; number 0 writes files."""
        ...

    @property
    def size(self) -> int: ...

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


class Alone:
    """A single process."""

    rank = 0
    size = 1

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


ALONE: World = Alone()


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
