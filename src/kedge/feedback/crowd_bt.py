"""Scores of answers and skills of people from comparisons (Crowd-BT, Chen et al. 2013).

P(j prefers a to b) = η_j σ(s_a − s_b) + (1 − η_j) σ(s_b − s_a): η = 1 is a careful person, ½ one who throws a coin, 0
one who always says the opposite. Fitted by expectation and maximisation: whether a comparison was meant is hidden.
Left out: the virtual item that ties scores down in the paper (a normal prior does it here), and the choice of the next
comparison (kedge.feedback.choice). Shape letters: M different comparisons,
K answers, J people.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from kedge.core.errors import DataError
from kedge.core.stats import Floats, logistic_fit, places_of, sigmoid

Comparison = tuple[Hashable, Hashable, Hashable]
"""A person, the answer that was preferred, and the other one."""
_ROUNDS = 2_000
_TOLERANCE = 1e-8
_FIRST_SKILL = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class CrowdBT:
    scores: Mapping[Hashable, float]
    """Of mean 0: a difference is a log-odds for a careful person."""
    skills: Mapping[Hashable, float]
    """η of each person."""
    log_likelihood: float


def crowd_bt(
    comparisons: Sequence[Comparison],
    *,
    precision: float = 0.1,
    skills: Mapping[Hashable, float] = MappingProxyType({}),
) -> CrowdBT:
    """Scores with a normal prior of `precision`, skills with a uniform one; `skills` that are given stay as they are.

    With all skills at 1 this is Bradley–Terry. Turning all scores and all skills round fits as well: the solution is
    the one that is reached from people who are mostly careful.

    >>> votes = [("ann", "a", "b")] * 3 + [("ann", "b", "a")]
    >>> fitted = crowd_bt(votes, precision=1e-9, skills={"ann": 1.0})
    >>> round(fitted.scores["a"] - fitted.scores["b"], 6)  # log 3
    1.098612
    """
    _refuse(comparisons, precision, skills)
    count = Counter(comparisons)
    names = list(dict.fromkeys(answer for _, *answers in count for answer in answers))
    people = list(dict.fromkeys(person for person, _, _ in count))
    design_MK, weight_M = _design(list(count), names), np.array(list(count.values()), dtype=np.float64)
    person_M = places_of([person for person, _, _ in count])
    is_given_J = np.array([person in skills for person in people])
    skill_J = np.array([skills.get(person, _FIRST_SKILL) for person in people])
    score_K = np.zeros(len(names))
    for _ in range(_ROUNDS):
        meant_M, _ = _meant(design_MK @ score_K, skill_J[person_M])
        mean_J = np.bincount(person_M, weights=weight_M * meant_M) / np.bincount(person_M, weights=weight_M)
        before_K, before_J = score_K, skill_J
        skill_J = np.where(is_given_J, skill_J, mean_J)
        score_K = logistic_fit(meant_M, design_MK, weight_M, precision=precision)
        if max(np.abs(score_K - before_K).max(), np.abs(skill_J - before_J).max()) < _TOLERANCE:
            break
    _, chance_M = _meant(design_MK @ score_K, skill_J[person_M])
    return CrowdBT(
        scores=dict(zip(names, (score_K - score_K.mean()).tolist(), strict=True)),
        skills=dict(zip(people, skill_J.tolist(), strict=True)),
        log_likelihood=float(weight_M @ np.log(chance_M)),
    )


def _design(comparisons: Sequence[Comparison], names: Sequence[Hashable]) -> Floats:
    """1 at the answer that was preferred, −1 at the other one."""
    place = {name: index for index, name in enumerate(names)}
    design_MK = np.zeros((len(comparisons), len(names)))
    design_MK[np.arange(len(comparisons)), [place[better] for _, better, _ in comparisons]] = 1.0
    design_MK[np.arange(len(comparisons)), [place[worse] for _, _, worse in comparisons]] = -1.0
    return design_MK


def _meant(gap_M: Floats, skill_M: Floats) -> tuple[Floats, Floats]:
    """The probability that each comparison was meant as it was said, and the probability of what was said."""
    p_M = sigmoid(gap_M)
    chance_M = skill_M * p_M + (1 - skill_M) * (1 - p_M)
    return skill_M * p_M / chance_M, chance_M


def _refuse(comparisons: Sequence[Comparison], precision: float, skills: Mapping[Hashable, float]) -> None:
    if not comparisons:
        raise DataError("crowd_bt needs comparisons: found none")
    for number, (person, better, worse) in enumerate(comparisons):
        if better == worse:
            raise DataError(f"comparisons[{number}] of {person!r} is of {better!r} with itself")
    if not precision > 0:
        raise DataError(f"precision is above 0, or scores have no bound: found {precision!r}")
    for person, skill in skills.items():
        if not 0 <= skill <= 1:
            raise DataError(f"a skill is between 0 and 1: found {skill!r} for {person!r}")
