"""Part of the library of faults for real: planted by settings, in the reward, in the generator; and healthy runs."""

from __future__ import annotations

import importlib
from dataclasses import replace
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
    lines, is_good = faults.verdict([right, *[healthy] * 10])
    assert lines[0].startswith("faults that rules were set by: 1 of 1 (21 to 100 %) named right")
    assert (lines[-1], is_good) == ("healthy runs: 0 of 10 (0 to 28 %) with a warning", True)
    lines, is_good = faults.verdict([right, wrong, *[healthy] * 10])
    assert "1 of 2 (9 to 91 %) named right, 0 second, 1 misnamed, 0 missed" in lines[0]
    assert not is_good
    unseen = replace(wrong, case=faults.UNSEEN[0])
    lines, is_good = faults.verdict([right, unseen, *[healthy] * 10])
    assert lines[2].startswith("unseen faults: 0 of 1")
    assert is_good  # a rate, not a promise
    assert faults.verdict([right, seen("", "critic", 1), *[healthy] * 9])[1]
    assert not faults.verdict([right, *[seen("", "critic", 1)] * 2, *[healthy] * 8])[1]
