"""Crowd-BT: Bradley–Terry where all are careful (choix), its maximum, planted people, refusals."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import choix  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
import pytest

from kedge.core.errors import DataError
from kedge.feedback import crowd_bt
from kedge.feedback.crowd_bt import Comparison

TRUE = np.linspace(-1.5, 1.5, 7)
SKILLS = {"careful": 0.98, "good": 0.85, "coin": 0.5, "contrary": 0.1}


def drawn(seed: int, *, each: int = 600) -> list[Comparison]:
    rng = np.random.default_rng(seed)
    comparisons: list[Comparison] = []
    for person, skill in SKILLS.items():
        for _ in range(each):
            a, b = (int(index) for index in rng.permutation(7)[:2])
            p = 1 / (1 + np.exp(TRUE[b] - TRUE[a]))
            prefers_a = rng.random() < skill * p + (1 - skill) * (1 - p)
            comparisons.append((person, a, b) if prefers_a else (person, b, a))
    return comparisons


def penalised(
    comparisons: list[Comparison], scores: Mapping[Hashable, float], skills: Mapping[Hashable, float], precision: float
) -> float:
    total = -0.5 * precision * sum(score**2 for score in scores.values())
    for person, better, worse in comparisons:
        p = 1 / (1 + np.exp(scores[worse] - scores[better]))
        total += np.log(skills[person] * p + (1 - skills[person]) * (1 - p))
    return float(total)


def test_careful_people_alone_are_bradley_terry() -> None:
    comparisons = [item for item in drawn(0) if item[0] in ("careful", "good")]
    fitted = crowd_bt(comparisons, precision=1e-8, skills={"careful": 1.0, "good": 1.0})
    theirs = choix.ilsr_pairwise(7, [(a, b) for _, a, b in comparisons])
    assert [fitted.scores[index] for index in range(7)] == pytest.approx(theirs - np.mean(theirs), abs=1e-5)
    assert fitted.skills == {"careful": 1.0, "good": 1.0}


def test_planted_skills_and_scores_are_found() -> None:
    fitted = crowd_bt(drawn(1, each=3_000))
    assert fitted.skills == pytest.approx(SKILLS, abs=0.1)
    assert [fitted.scores[index] for index in range(7)] == pytest.approx(TRUE, abs=0.25)


def test_the_result_is_a_maximum() -> None:
    comparisons = drawn(2, each=150)
    fitted = crowd_bt(comparisons, precision=0.5)
    best = penalised(comparisons, fitted.scores, fitted.skills, 0.5)
    for step in (-0.01, 0.01):
        for index in range(7):
            moved = {**fitted.scores, index: fitted.scores[index] + step}
            assert penalised(comparisons, moved, fitted.skills, 0.5) < best
        for person in SKILLS:
            skill = min(1.0, max(0.0, fitted.skills[person] + step))
            if skill != fitted.skills[person]:
                assert penalised(comparisons, fitted.scores, {**fitted.skills, person: skill}, 0.5) <= best + 1e-5
    assert fitted.log_likelihood == pytest.approx(penalised(comparisons, fitted.scores, fitted.skills, 0.0))


CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "none": ([], {}, "found none"),
    "with itself": ([("p", "a", "a")], {}, r"comparisons\[0\] of 'p' is of 'a' with itself"),
    "no prior": ([("p", "a", "b")], {"precision": 0.0}, r"above 0, or scores have no bound: found 0\.0"),
    "a skill of 2": ([("p", "a", "b")], {"skills": {"p": 2.0}}, r"found 2\.0 for 'p'"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_refused(case: str) -> None:
    comparisons, options, message = CASES[case]
    with pytest.raises(DataError, match=message):
        crowd_bt(comparisons, **options)
