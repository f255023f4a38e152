"""Whom to believe: true classes and people's errors from labels alone (Dawid and Skene 1979).

P(person j says l | truth k) = π^j_kl, a whole matrix for each person; truths and matrices are found by expectation and
maximisation from the vote shares of each item. Left out: priors of people from gold questions, and items of unequal
difficulty. Shape letters: N items, J people, K classes, M labels that were given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kedge.core.errors import DataError
from kedge.core.stats import Floats, Ints
from kedge.feedback.ratings import Labels, Ratings, labels_of

_ROUNDS = 5_000
_TOLERANCE = 1e-10
"""Of the posterior, between two rounds."""
_FEWEST_CLASSES = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DawidSkene:
    """Truths and people as the labels tell them."""

    posterior: Floats
    """(N, K): the probability of each class; the priors for an item without labels."""
    priors: Floats
    """(K,): how frequent the classes are."""
    confusion: Floats
    """(J, K, K): π, the probability of each label given each truth; 1/K where a person had nothing of that truth."""
    log_likelihood: float
    """Of the labels that were given, in nats; smoothing is no part of it."""
    rounds: int

    @property
    def accuracy(self) -> Floats:
        """(J,): Σ_k prior_k π^j_kk, the probability that a person labels an item rightly."""
        return np.einsum("k,jkk->j", self.priors, self.confusion)

    @property
    def labels(self) -> list[int]:
        """The most probable class of each item."""
        return [int(label) for label in self.posterior.argmax(axis=1)]


def dawid_skene(
    ratings: Ratings, *, classes: int, smoothing: float = 0.01, mirrored: bool | Sequence[int] = False
) -> DawidSkene:
    """Truths, class frequencies and everybody's errors. Labels are 0 … classes − 1.

    `smoothing` is added to every count of a matrix, a Dirichlet(1 + smoothing) prior; 0 is maximum likelihood.
    `mirrored` is for labels of sides that were drawn at random, where who errs on the left errs on the right as often:
    π_kl = π_k'l', with k' the class of the other side. True reads classes from left to right, so that k' = classes − 1
    − k and a tie is in the middle; (0, 2, 1) names each class's own mirror where the tie is class 0.

    >>> result = dawid_skene([[0, 0, 1], [1, 1, 1], [0, 0, 0], [1, 1, 0]], classes=2)
    >>> result.labels, result.accuracy.round(2).tolist()
    ([0, 1, 0, 1], [1.0, 1.0, 0.5])
    """
    return dawid_skene_of(labels_of(ratings), classes=classes, smoothing=smoothing, mirrored=mirrored)


def dawid_skene_of(
    labels: Labels, *, classes: int, smoothing: float = 0.01, mirrored: bool | Sequence[int] = False
) -> DawidSkene:
    """The same from labels that are laid out already: a table of many items and people has few of its places filled."""
    class_M = _class_numbers(labels, classes)
    mirror_K = _mirror(mirrored, classes)
    if not smoothing >= 0 or smoothing == float("inf"):
        raise DataError(f"smoothing is a finite number of at least 0: found {smoothing!r}")
    vote_NK = np.zeros((labels.items, classes))
    np.add.at(vote_NK, (labels.item_M, class_M), 1.0)
    has_label_N = vote_NK.sum(axis=1) > 0

    def improved(posterior_NK: Floats) -> tuple[Floats, Floats, Floats, float]:
        prior_K = posterior_NK[has_label_N].mean(axis=0)
        confusion_JKK = _confusion(posterior_NK, labels, class_M, smoothing, mirror_K)
        return prior_K, confusion_JKK, *_posterior(prior_K, confusion_JKK, labels, class_M, has_label_N)

    before_NK = vote_NK / np.maximum(vote_NK.sum(axis=1, keepdims=True), 1)
    prior_K, confusion_JKK, posterior_NK, log_likelihood = improved(before_NK)
    rounds = 1
    while rounds < _ROUNDS and np.abs(posterior_NK - before_NK).max() >= _TOLERANCE:
        before_NK = posterior_NK
        prior_K, confusion_JKK, posterior_NK, log_likelihood = improved(before_NK)
        rounds += 1
    return DawidSkene(
        posterior=np.where(has_label_N[:, None], posterior_NK, prior_K),
        priors=prior_K,
        confusion=confusion_JKK,
        log_likelihood=log_likelihood,
        rounds=rounds,
    )


def _confusion(posterior_NK: Floats, labels: Labels, class_M: Ints, smoothing: float, mirror_K: Ints | None) -> Floats:
    """π from expected counts. A row without any count says nothing: uniform, as with the least smoothing."""
    classes = posterior_NK.shape[1]
    cell_M = labels.person_M * classes + class_M
    count_KJL = np.stack(
        [
            np.bincount(cell_M, weights=posterior_NK[labels.item_M, truth], minlength=labels.people * classes)
            for truth in range(classes)
        ]
    )
    count_JKK = count_KJL.reshape(classes, labels.people, classes).transpose(1, 0, 2)
    if mirror_K is not None:
        count_JKK = count_JKK + count_JKK[:, mirror_K][:, :, mirror_K]
    smoothed_JKK = count_JKK + smoothing
    total_JK = smoothed_JKK.sum(axis=2, keepdims=True)
    return np.where(total_JK > 0, smoothed_JKK / np.where(total_JK > 0, total_JK, 1), 1 / classes)


def _posterior(
    prior_K: Floats, confusion_JKK: Floats, labels: Labels, class_M: Ints, has_label_N: NDArray[np.bool_]
) -> tuple[Floats, float]:
    with np.errstate(divide="ignore"):  # what never happens has a logarithm of −∞ and a posterior of 0
        log_prior_K, log_JKK = np.log(prior_K), np.log(confusion_JKK)
    log_NK = np.stack(
        [
            np.bincount(labels.item_M, weights=log_JKK[labels.person_M, truth, class_M], minlength=labels.items)
            for truth in range(len(prior_K))
        ],
        axis=1,
    )
    log_NK = log_NK + log_prior_K
    highest_N1 = log_NK.max(axis=1, keepdims=True)
    total_N1 = np.exp(log_NK - highest_N1).sum(axis=1, keepdims=True)
    posterior_NK = np.exp(log_NK - highest_N1) / total_N1
    log_N = (highest_N1 + np.log(total_N1)).squeeze(1)
    return np.where(has_label_N[:, None], posterior_NK, 0.0), float(log_N[has_label_N].sum())


def _class_numbers(labels: Labels, classes: int) -> Ints:
    if classes < _FEWEST_CLASSES:
        raise DataError(f"classes is a number of at least {_FEWEST_CLASSES}: found {classes!r}")
    for value in labels.values:
        if value not in range(classes):
            raise DataError(f"labels are whole numbers from 0 to {classes - 1} (classes: {classes}): found {value!r}")
    return np.array(labels.values, dtype=np.int64)[labels.class_M]


def _mirror(mirrored: bool | Sequence[int], classes: int) -> Ints | None:
    if isinstance(mirrored, bool):
        return np.arange(classes)[::-1] if mirrored else None
    mirror_K = np.array(mirrored, dtype=np.int64)
    is_mirror = sorted(mirrored) == list(range(classes)) and bool((mirror_K[mirror_K] == np.arange(classes)).all())
    if not is_mirror:
        raise DataError(
            f"mirrored names the other side of each of the {classes} classes, whose other side is the class itself: "
            f"found {list(mirrored)}"
        )
    return mirror_K
