"""No answer writes its own verdict."""

from __future__ import annotations

import pytest
from comparison_injections import CASES, ORDER, Case, attempt

from kedge.rewards import judge_protocol, pairwise


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_verdict_is_the_judges_own(case: Case) -> None:
    assert attempt(case) is None


def test_a_fence_that_can_be_guessed_would_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases do attack: with a fence that is known, or without one in the reply, some of them win."""
    fence = f"[[{'0' * 32}]]"
    monkeypatch.setattr(pairwise, "fence_of", lambda seed, texts: fence)
    assert attempt(next(case for case in CASES if case.name == "fence of zeros")) is not None
    monkeypatch.undo()
    monkeypatch.setattr(pairwise, "read_winner", lambda content, fence: _first_verdict(content))
    assert all(attempt(case) is not None for case in CASES[1:5])


def _first_verdict(content: str) -> str:
    """How a reader without fences finds the verdict."""
    found = ORDER.search(content)
    assert found is not None
    return (found[1] or found[2]).lower()


def test_the_rubric_that_ships_is_the_one_that_is_attacked() -> None:
    assert judge_protocol.comparison_rubric() == judge_protocol.COMPARISON
