"""Seeds come from one stable hash, never from global state or Python's `hash`; and the order of data from a seed."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def seed_for(run_seed: int, name: str, index: int = 0) -> int:
    """A 63-bit seed for one named use of randomness in a run; the same on every machine and Python.

    >>> seed_for(7, "rollout", 0) == seed_for(7, "rollout", 0)
    True
    >>> len({seed_for(7, "rollout", 0), seed_for(7, "rollout", 1), seed_for(7, "split", 0), seed_for(8, "rollout", 0)})
    4
    """
    text = f"{run_seed}\x1f{name}\x1f{index}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1


@lru_cache(maxsize=2)
def permutation(items: int, seed: int) -> NDArray[np.int64]:
    """0 to `items` - 1 in a random order."""
    import numpy as np  # late: commands that draw nothing start without it

    return np.random.default_rng(seed).permutation(items)


def item_at(index: int, items: int, seed: int) -> int:
    """Which item comes at place `index` of an endless order: every epoch is a permutation of all items."""
    epoch, offset = divmod(index, items)
    return int(permutation(items, seed_for(seed, "order", epoch))[offset])
