"""Which pairs to ask people about next.

A pair is worth asking where its outcome is open and would move the reward model: p (1 − p) · xᵀΣx, chosen one after
the other, with Σ as it will be once the ones before are answered (D-optimal design). Or where the members of an
ensemble disagree, or where the outcome is most open. A share is always drawn at random, held-out pairs are drawn at
random alone, and every pair keeps the probability with which it was chosen, so that what is measured on the chosen ones
can be weighed back to the pool. Shape letters: N pairs of the pool, D features, M members.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from kedge.core.errors import DataError
from kedge.core.stats import Floats, Ints, places_of

RANDOM_SHARE = 0.2
"""Of every batch: without it nothing could be said of the pool, nor of what the reward model does not doubt."""
FEATURES = 256
"""Directions that differences of hidden states are projected to."""

Reason = Literal["heldout", "d_optimal", "ensemble", "uncertain", "random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A pair of the pool that shall be asked."""

    index: int
    reason: Reason
    propensity: float
    """The probability that it was chosen: held-out pairs of the whole pool, the others of what held-out ones left."""


class Criterion(Protocol):
    """How pairs are chosen that are not drawn at random."""

    @property
    def reason(self) -> Reason: ...

    @property
    def pairs(self) -> int: ...

    def order(self, is_open_N: Bools) -> Iterator[int]:
        """Pairs by their worth, best first. `is_open_N` changes between two: what is closed is not to be given."""
        ...


Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DOptimal:
    """Of a linear head on features x, the difference of both answers' last hidden states."""

    features_ND: Floats
    covariance_DD: Floats
    """Σ, of the head's weights (`laplace_covariance`)."""
    p_N: Floats
    """The probability that the first answer is the better one."""
    reason: Reason = "d_optimal"

    @property
    def pairs(self) -> int:
        return len(self.p_N)

    def order(self, is_open_N: Bools) -> Iterator[int]:
        """With the update of Σ for an answer of weight v = p (1 − p): Σ − v Σx xᵀΣ / (1 + v xᵀΣx)."""
        weight_N = self.p_N * (1 - self.p_N)
        covariance_DD = self.covariance_DD.copy()
        spread_N = np.einsum("nd,de,ne->n", self.features_ND, covariance_DD, self.features_ND)
        while is_open_N.any():
            best = int(np.where(is_open_N, weight_N * spread_N, -np.inf).argmax())
            yield best
            direction_D = covariance_DD @ self.features_ND[best]
            shrink = weight_N[best] / (1 + weight_N[best] * float(self.features_ND[best] @ direction_D))
            covariance_DD -= shrink * np.outer(direction_D, direction_D)
            spread_N = np.maximum(spread_N - shrink * np.square(self.features_ND @ direction_D), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ensemble:
    """By the standard deviation over members of the probability that the first answer is the better one."""

    p_MN: Floats
    reason: Reason = "ensemble"

    @property
    def pairs(self) -> int:
        return self.p_MN.shape[1]

    def order(self, is_open_N: Bools) -> Iterator[int]:
        return _descending(self.p_MN.std(axis=0), is_open_N)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Uncertain:
    """By how near the probability that the first answer is the better one comes to ½."""

    p_N: Floats
    reason: Reason = "uncertain"

    @property
    def pairs(self) -> int:
        return len(self.p_N)

    def order(self, is_open_N: Bools) -> Iterator[int]:
        return _descending(-np.abs(self.p_N - 0.5), is_open_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRandom:
    """Everything at random: what else is compared with, and the first round, which has no reward model."""

    pairs: int
    reason: Reason = "random"

    def order(self, is_open_N: Bools) -> Iterator[int]:
        return iter(())


def choose(
    criterion: Criterion,
    *,
    count: int,
    seed: int,
    random_share: float = RANDOM_SHARE,
    heldout: int = 0,
    near_duplicates: Sequence[Hashable] | None = None,
) -> list[Chosen]:
    """`count` pairs to learn from and `heldout` ones to measure on; of near-duplicate prompts one pair in all.

    First the held-out pairs are drawn from all prompts, each with the same probability; then the criterion chooses from
    the other prompts, which is certain for a given pool; then `random_share` of `count` is drawn from those that are
    left. `near_duplicates` names for each pair its group of prompts that are nearly the same. Where the pool has too
    few of them, fewer are chosen.

    >>> pool = Uncertain(p_N=np.array([0.9, 0.5, 0.6, 0.99, 0.1]))
    >>> [(pair.index, pair.reason, pair.propensity) for pair in choose(pool, count=2, seed=0, random_share=0.5)]
    [(1, 'uncertain', 1.0), (4, 'random', 0.25)]
    """
    _refuse(criterion, count, heldout, random_share, near_duplicates)
    names = list(range(criterion.pairs)) if near_duplicates is None else list(near_duplicates)
    group_N = places_of(names)
    rng = np.random.default_rng(seed)
    is_open_N: Bools = np.ones(criterion.pairs, dtype=np.bool_)
    num_random = count if isinstance(criterion, AtRandom) else round(random_share * count)
    chosen = _drawn(heldout, group_N, is_open_N, rng, "heldout")
    chosen += _best(criterion, count - num_random, group_N, is_open_N)
    return chosen + _drawn(num_random, group_N, is_open_N, rng, "random")


def laplace_covariance(features_ND: Floats, p_N: Floats, *, precision: float) -> Floats:
    """Σ of a head's weights after pairs were answered: (Xᵀ diag(p (1 − p)) X + precision · 1)⁻¹.

    >>> laplace_covariance(np.array([[2.0]]), np.array([0.5]), precision=1.0).tolist()
    [[0.5]]
    """
    weighted_ND = features_ND * (p_N * (1 - p_N))[:, None]
    precision_DD = features_ND.T @ weighted_ND + precision * np.eye(features_ND.shape[1])
    return np.asarray(np.linalg.inv(precision_DD), dtype=np.float64)


def projected(features_ND: Floats, *, size: int = FEATURES, seed: int) -> Floats:
    """Features in `size` random directions, which keep lengths and angles nearly; as they are where they are fewer.

    >>> projected(np.ones((3, 8)), size=4, seed=0).shape, projected(np.ones((3, 2)), size=4, seed=0).shape
    ((3, 4), (3, 2))
    """
    wide = features_ND.shape[1]
    if wide <= size:
        return features_ND
    return features_ND @ (np.random.default_rng(seed).standard_normal((wide, size)) / np.sqrt(size))


def _descending(worth_N: Floats, is_open_N: Bools) -> Iterator[int]:
    return (int(index) for index in np.argsort(-worth_N, kind="stable") if is_open_N[index])


def _best(criterion: Criterion, count: int, group_N: Ints, is_open_N: Bools) -> list[Chosen]:
    chosen: list[Chosen] = []
    if count == 0:
        return chosen
    for index in criterion.order(is_open_N):
        chosen.append(Chosen(index=index, reason=criterion.reason, propensity=1.0))
        is_open_N[group_N == group_N[index]] = False
        if len(chosen) == count:
            break
    return chosen


def _drawn(count: int, group_N: Ints, is_open_N: Bools, rng: np.random.Generator, reason: Reason) -> list[Chosen]:
    """Groups with equal probability, and one pair of each with equal probability."""
    groups = np.unique(group_N[is_open_N])
    count = min(count, len(groups))
    chosen: list[Chosen] = []
    for group in rng.choice(groups, size=count, replace=False) if count else ():
        members = np.flatnonzero((group_N == group) & is_open_N)
        propensity = count / len(groups) / len(members)
        chosen.append(Chosen(index=int(rng.choice(members)), reason=reason, propensity=propensity))
    is_open_N[np.isin(group_N, group_N[[pair.index for pair in chosen]])] = False
    return chosen


def _refuse(
    criterion: Criterion, count: int, heldout: int, random_share: float, near_duplicates: Sequence[Hashable] | None
) -> None:
    if count < 0 or heldout < 0:
        raise DataError(f"numbers of pairs are at least 0: found count {count}, heldout {heldout}")
    if not 0 <= random_share <= 1:
        raise DataError(f"random_share is a share from 0 to 1: found {random_share!r}")
    if near_duplicates is not None and len(near_duplicates) != criterion.pairs:
        raise DataError(f"one group of prompts a pair: found {len(near_duplicates)} for {criterion.pairs} pairs")
