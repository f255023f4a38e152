"""Part of the library of faults for real: planted by settings, in the reward, in the generator; and healthy runs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CAUSES = {
    "critic learns nothing": "critic",
    "scores x 50": "reward_scale",
    "sampled at another temperature": "mismatch",
    "separate, fixed KL": "",
    "grpo": "",
}


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("faults")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_doctor_calls_planted_faults_by_their_names_and_healthy_runs_healthy(faults: Any, tmp_path: Path) -> None:
    home = faults.make_base(tmp_path, 5)
    seen: dict[str, str] = {}
    for case in (*faults.FAULTS, *faults.HEALTHY):
        if case.name in CAUSES:
            faults.make_run(home, case, 5)
            seen[case.name] = faults.outcome_of(faults.stage_folder(home, case), case, 5).named
    assert seen == CAUSES


def test_a_section_is_merged_and_anything_else_replaced(faults: Any) -> None:
    found = faults.merged({"kl": {"start": 0.5, "kind": "k1"}, "epochs": 2}, {"kl": {"start": 1.0}, "epochs": 1})
    assert found == {"kl": {"start": 1.0, "kind": "k1"}, "epochs": 1}


def test_the_verdict_asks_for_right_names_and_for_few_false_warnings(faults: Any) -> None:
    def seen(cause: str, named: str, warnings: int = 0) -> Any:
        alarms = {f"kl.{number}": number for number in range(warnings)}
        return faults.Outcome(case=faults.Case(name="a", cause=cause), seed=1, alarms=alarms, named=named)

    right, wrong, healthy = seen("critic", "critic", 2), seen("critic", "hacking", 1), seen("", "")
    told, is_good = faults.verdict([right, *[healthy] * 10])
    assert (told, is_good) == ("1 of 1 faults found, 1 named right; 0 warnings in 10 healthy runs", True)
    told, is_good = faults.verdict([right, wrong, *[healthy] * 10])
    assert (told, is_good) == ("2 of 2 faults found, 1 named right; 0 warnings in 10 healthy runs", False)
    assert faults.verdict([right, seen("", "critic", 1), *[healthy] * 9])[1]
    assert not faults.verdict([right, seen("", "critic", 2), *[healthy] * 9])[1]
