"""Nothing of a recipe's name, a folder or a flag is run, or is more than a value, in what `kedge launch` writes."""

from __future__ import annotations

import pytest
from launch_attacks import CASES, VALUES, Case, attempt

_PLACES = sorted({(case.cluster, case.place) for case in CASES})


def problems_of(cases: list[Case]) -> dict[str, str]:
    return {str(case): problem for case in cases if (problem := attempt(case)) is not None}


def test_values_stay_values() -> None:
    """Two values at every place, other ones at each."""
    cases = [
        Case(place, VALUES[(2 * number + turn) % len(VALUES)], cluster)
        for number, (cluster, place) in enumerate(_PLACES)
        for turn in range(2)
    ]
    assert problems_of(cases) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "place"), _PLACES, ids=[f"{cluster}-{place}" for cluster, place in _PLACES])
def test_all_values_stay_values(cluster: str, place: str) -> None:
    assert problems_of([Case(place, value, cluster) for value in VALUES]) == {}


@pytest.mark.parametrize(
    ("broken", "case"),
    [
        ("kedge.launch.render.shlex.join", Case("recipe", "$(touch pwned)", "slurm")),
        ("kedge.launch.render.shlex.join", Case("set", "x; touch pwned", "slurm-ray")),
        ("kedge.launch.render.shlex.quote", Case("folder", "`touch pwned`", "slurm")),
        ("kedge.launch.render._json", Case("folder", "a #b", "jobset")),
        ("kedge.launch.render._unexpanded", Case("recipe", "$(NODE_RANK)", "jobset")),
    ],
    ids=str,
)
def test_the_cases_can_fail(broken: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is held by the function that is broken here."""
    monkeypatch.setattr(broken, " ".join if broken.endswith("join") else str)
    assert attempt(case) is not None


def test_line_breaks_are_refused_and_would_only_be_a_value_if_they_were_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.launch.checks.refuse_hidden", lambda values: None)
    assert attempt(Case("recipe", "x\ntouch pwned", "slurm")) is None
    assert attempt(Case("recipe", "x\nspec:\n  hostNetwork: true", "jobset")) is None
