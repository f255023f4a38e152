"""Seeds come from one stable hash, never from global state or Python's `hash`."""

from __future__ import annotations

from hashlib import blake2b


def seed_for(run_seed: int, name: str, index: int = 0) -> int:
    """A 63-bit seed for one named use of randomness in a run; the same on every machine and Python.

    >>> seed_for(7, "rollout", 0) == seed_for(7, "rollout", 0)
    True
    >>> len({seed_for(7, "rollout", 0), seed_for(7, "rollout", 1), seed_for(7, "split", 0), seed_for(8, "rollout", 0)})
    4
    """
    text = f"{run_seed}\x1f{name}\x1f{index}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1
