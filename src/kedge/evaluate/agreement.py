"""How far two raters agree on the same items: a judge and people, a detector and people, two people."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean

from kedge.core.stats import cohen_kappa


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Of a rater with a standard, over the labels of the standard. A label that the standard does not know, as None for
    a reply that could not be read, is wrong, and a label of its own for κ."""

    accuracy: float
    macro_f1: float
    """The mean over labels of the harmonic mean of precision and recall."""
    kappa: float
    """Cohen's: agreement beyond that of raters who draw labels with these frequencies."""


def agreement(standard: Sequence[Hashable], rater: Sequence[Hashable]) -> Agreement:
    """
    >>> agreement([1, 1, 2, 2], [1, 2, 2, 2])
    Agreement(accuracy=0.75, macro_f1=0.7333333333333334, kappa=0.5)
    """
    return Agreement(
        accuracy=fmean(label == other for label, other in zip(standard, rater, strict=True)),
        macro_f1=fmean(_f1(standard, rater, label) for label in dict.fromkeys(standard)),
        kappa=cohen_kappa(standard, rater),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """A detector of something against the truth."""

    sensitivity: float
    """Of what is there, the share that it finds."""
    specificity: float
    """Of what is not, the share that it leaves alone."""
    observed: float
    """The share that it reports."""
    true: float


def detection(truth: Sequence[bool], reported: Sequence[bool]) -> Detection:
    """
    >>> detection([True, True, False, False], [True, False, False, False])
    Detection(sensitivity=0.5, specificity=1.0, observed=0.25, true=0.5)
    """
    pairs = list(zip(truth, reported, strict=True))
    return Detection(
        sensitivity=fmean(found for is_there, found in pairs if is_there),
        specificity=fmean(not found for is_there, found in pairs if not is_there),
        observed=fmean(reported),
        true=fmean(truth),
    )


def _f1(standard: Sequence[Hashable], rater: Sequence[Hashable], label: Hashable) -> float:
    both = sum(own == label == other for own, other in zip(standard, rater, strict=True))
    return 2 * both / (sum(own == label for own in standard) + sum(other == label for other in rater))
