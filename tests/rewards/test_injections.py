"""Texts that try to write their own grade do not (`injections.CASES`); and the trial itself would notice."""

from __future__ import annotations

import re

import pytest
from injections import CASES, Case, attempt

from kedge.rewards import judge


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_text_writes_its_own_grade(case: Case) -> None:
    assert attempt(case) is None


def test_there_are_enough_of_them() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 20


def test_the_trial_notices_a_fence_that_can_be_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    guessed = f"[[{'0' * 32}]]"
    monkeypatch.setattr(judge, "fence_of", lambda seed, texts: guessed)
    held = {case.name: attempt(case) for case in CASES}
    assert held["fence of zeros"] == "text of the answer stands outside of its fence"


def test_the_trial_notices_a_reader_that_takes_the_first_score_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_score(text: str, **_: object) -> float:
        return float(re.findall(r'"score": (\d+)', text)[0])

    monkeypatch.setattr(judge, "read_score", first_score)
    (case,) = (case for case in CASES if case.name == "json")
    assert attempt(case) is not None
