"""Strengths of several models from comparisons of two at a time (Bradley and Terry 1952), with or without ties.

P(a beats b) = π_a / (π_a + π_b), where log π is the strength. Ties are half a win for each, or have a probability of
their own (Davidson 1970): ν √(π_a π_b) beside π_a and π_b. The likelihood is maximised by Newton's method; standard
errors count what is compared on one prompt as one observation (a sandwich over clusters). Shape letters: M matches, K
models, G clusters, P parameters (K strengths, and log ν with Davidson's ties).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import NormalDist
from typing import Literal

import numpy as np

from kedge.core.stats import Floats, places_of, sigmoid
from kedge.evaluate.paired import holm

Match = tuple[str, str, float]
"""Two models, and 1 where the first won, ½ where they tied, 0 where the second won."""
_OUTCOMES = (0.0, 0.5, 1.0)
_ROUNDS = 200
_LONGEST_STEP = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    strengths: Mapping[str, float]
    """Of mean 0, in natural logarithms, the strongest first."""
    standard_errors: Mapping[str, float]
    nu: float | None
    """How readily equal models tie; None where ties are halved."""
    covariances: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    """Of the strengths of two models, in both orders."""

    def elo(self, name: str) -> float:
        """The strength on the scale of chess: 1000 in the mean, 400 for ten to one."""
        return 1000 + 400 / math.log(10) * self.strengths[name]

    def difference(self, first: str, second: str) -> tuple[float, float]:
        """How much stronger the first of two models is, with the standard error of that."""
        errors = self.standard_errors
        variance = errors[first] ** 2 + errors[second] ** 2 - 2 * self.covariances[first, second]
        return self.strengths[first] - self.strengths[second], math.sqrt(max(0.0, variance))


def rank_intervals(ranking: Ranking, *, alpha: float = 0.05) -> dict[str, tuple[int, int]]:
    """The best and the worst place that each model may have, all of them true together with 1 − alpha.

    Every two models are compared, with p-values adjusted by Holm: a model stands below those that are shown to be
    stronger, and above those that are shown to be weaker.

    >>> matches = [("a", "b", 1)] * 60 + [("a", "b", 0)] * 20 + [("b", "c", 1)] * 21 + [("b", "c", 0)] * 19
    >>> rank_intervals(bradley_terry(matches))
    {'a': (1, 1), 'b': (2, 3), 'c': (2, 3)}
    """
    pairs = list(combinations(ranking.strengths, 2))
    gaps = [ranking.difference(*pair) for pair in pairs]
    places = {name: (1, len(ranking.strengths)) for name in ranking.strengths}
    for (first, second), p_value in zip(pairs, holm([_two_sided(*gap) for gap in gaps]), strict=True):
        if p_value < alpha:  # the strongest come first
            places[second] = (places[second][0] + 1, places[second][1])
            places[first] = (places[first][0], places[first][1] - 1)
    return places


def _two_sided(gap: float, error: float) -> float:
    if error == 0 or math.isinf(error):
        return float(gap == 0 or error > 0)
    return min(1.0, 2 * (1 - NormalDist().cdf(abs(gap) / error)))


def bradley_terry(
    matches: Sequence[Match],
    *,
    ties: Literal["half", "davidson"] = "half",
    clusters: Sequence[Hashable] | None = None,
) -> Ranking:
    """Strengths of all models that occur. `clusters` names, for each match, what it shares with others: its prompt.

    Refused where strengths cannot be compared or have no bound: models that never met, not even through others, or a
    model (a set of models) that never lost to the rest.

    >>> fitted = bradley_terry([("a", "b", 1), ("a", "b", 1), ("a", "b", 1), ("a", "b", 0)])
    >>> round(fitted.strengths["a"] - fitted.strengths["b"], 6), round(math.log(3), 6)
    (1.098612, 1.098612)
    """
    if ties not in ("half", "davidson"):
        raise ValueError(f"ties are 'half' or 'davidson': found {ties!r}")
    if clusters is not None and len(clusters) != len(matches):
        raise ValueError(f"one cluster a match: found {len(clusters)} for {len(matches)} matches")
    names = list(dict.fromkeys(name for first, second, _ in matches for name in (first, second)))
    _refuse(matches, names)
    place = {name: index for index, name in enumerate(names)}
    first_M = np.array([place[first] for first, _, _ in matches])
    second_M = np.array([place[second] for _, second, _ in matches])
    outcome_M = np.array([outcome for _, _, outcome in matches], dtype=np.float64)
    has_nu = ties == "davidson" and bool((outcome_M == _OUTCOMES[1]).any())
    design_MK = np.zeros((len(matches), len(names)))
    np.add.at(design_MK, (np.arange(len(matches)), first_M), 1.0)
    np.add.at(design_MK, (np.arange(len(matches)), second_M), -1.0)
    theta_P = _maximum(design_MK, outcome_M, has_nu=has_nu, halves=ties == "half")
    score_MP, information_PP = _derivatives(theta_P, design_MK, outcome_M, has_nu=has_nu, halves=ties == "half")
    covariance_PP = _covariance(score_MP, information_PP, clusters, len(names))
    error_P = np.sqrt(np.diag(covariance_PP))
    order = sorted(range(len(names)), key=lambda index: -theta_P[index])
    nu = None if ties == "half" else float(np.exp(theta_P[-1])) if has_nu else 0.0
    return Ranking(
        strengths={names[index]: float(theta_P[index]) for index in order},
        standard_errors={names[index]: float(error_P[index]) for index in order},
        nu=nu,
        covariances={
            (names[first], names[second]): float(covariance_PP[first, second])
            for first in order
            for second in order
            if first != second
        },
    )


def _maximum(design_MK: Floats, outcome_M: Floats, *, has_nu: bool, halves: bool) -> Floats:
    """The parameters of the largest likelihood; strengths of mean 0."""
    count = design_MK.shape[1]
    theta_P = np.zeros(count + has_nu)
    for _ in range(_ROUNDS):
        score_MP, information_PP = _derivatives(theta_P, design_MK, outcome_M, has_nu=has_nu, halves=halves)
        step_P = np.linalg.solve(_anchored(information_PP, count), score_MP.sum(axis=0))
        step_P = np.clip(step_P, -_LONGEST_STEP, _LONGEST_STEP)
        theta_P = theta_P + step_P
        theta_P[:count] -= theta_P[:count].mean()
        if np.abs(step_P).max() < 1e-12:
            break
    return theta_P


def _anchored(information_PP: Floats, count: int) -> Floats:
    """With a term for the sum of all strengths, which no match says anything about."""
    anchored_PP = information_PP.copy()
    anchored_PP[:count, :count] += 1.0
    return anchored_PP


def _derivatives(
    theta_P: Floats, design_MK: Floats, outcome_M: Floats, *, has_nu: bool, halves: bool
) -> tuple[Floats, Floats]:
    """The gradient of the log-likelihood of each match, and minus the second derivative of all of it."""
    count = design_MK.shape[1]
    gap_M = design_MK @ theta_P[:count]
    if halves or not has_nu:
        p_M = sigmoid(gap_M)
        weight_M = p_M * (1 - p_M)
        return (outcome_M - p_M)[:, None] * design_MK, design_MK.T @ (design_MK * weight_M[:, None])
    # log π_a = gap/2, log π_b = −gap/2, log of the tie's share = log ν: the larger exponent is taken out of all three.
    logs_3M = np.stack([gap_M / 2, -gap_M / 2, np.full_like(gap_M, theta_P[-1])])
    shares_3M = np.exp(logs_3M - logs_3M.max(axis=0))
    win_M, loss_M, tie_M = shares_3M / shares_3M.sum(axis=0)
    tied_M = (outcome_M == _OUTCOMES[1]).astype(np.float64)
    lead_M = (outcome_M == 1) - (outcome_M == 0) * 1.0
    score_MP = np.column_stack([((lead_M - (win_M - loss_M)) / 2)[:, None] * design_MK, tied_M - tie_M])
    by_gap_M = (win_M + loss_M - (win_M - loss_M) ** 2) / 4
    by_both_M = -(win_M - loss_M) * tie_M / 2
    information_PP = np.empty((count + 1, count + 1))
    information_PP[:count, :count] = design_MK.T @ (design_MK * by_gap_M[:, None])
    information_PP[:count, count] = information_PP[count, :count] = design_MK.T @ by_both_M
    information_PP[count, count] = (tie_M * (1 - tie_M)).sum()
    return score_MP, information_PP


def _covariance(score_MP: Floats, information_PP: Floats, clusters: Sequence[Hashable] | None, count: int) -> Floats:
    """Of the parameters, with strengths of mean 0; robust to what matches of a cluster share."""
    inverse_PP = np.linalg.inv(_anchored(information_PP, count))
    centred_PP = np.eye(len(inverse_PP))
    centred_PP[:count, :count] -= 1 / count
    if clusters is None:
        return centred_PP @ inverse_PP @ centred_PP.T
    total_GP = np.zeros((len(set(clusters)), score_MP.shape[1]))
    np.add.at(total_GP, places_of(clusters), score_MP)
    groups = len(total_GP)
    scale = groups / (groups - 1) if groups > 1 else math.inf
    return centred_PP @ inverse_PP @ (scale * total_GP.T @ total_GP) @ inverse_PP @ centred_PP.T


def _refuse(matches: Sequence[Match], names: Sequence[str]) -> None:
    for first, second, outcome in matches:
        if first == second:
            raise ValueError(f"{first} cannot be compared with itself")
        if outcome not in _OUTCOMES:
            raise ValueError(f"an outcome is 1, 0.5 or 0: found {outcome} for {first} and {second}")
    if len(names) < 2:
        raise ValueError("at least two models are needed")
    met: dict[str, set[str]] = {name: set() for name in names}
    beat: dict[str, set[str]] = {name: set() for name in names}
    for first, second, outcome in matches:
        met[first].add(second)
        met[second].add(first)
        if outcome > 0:
            beat[first].add(second)
        if outcome < 1:
            beat[second].add(first)
    together = _reached(met, names[0])
    if len(together) < len(names):
        apart = ", ".join(sorted(set(names) - together))
        raise ValueError(f"{apart} never met {', '.join(sorted(together))}, not even through others: no ranking of all")
    for name in names:
        below = _reached(beat, name)
        if len(below) < len(names):
            never = ", ".join(sorted(set(names) - below))
            raise ValueError(
                f"{', '.join(sorted(below))} never won or tied against {never}: there the strengths have no bound. "
                "More comparisons are needed"
            )


def _reached(edges: Mapping[str, set[str]], start: str) -> set[str]:
    seen, waiting = {start}, [start]
    while waiting:
        for name in edges[waiting.pop()] - seen:
            seen.add(name)
            waiting.append(name)
    return seen
