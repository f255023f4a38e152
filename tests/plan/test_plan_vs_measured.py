"""The benchmark that sets plans beside measured peaks: which rows it reads, and the recipes that it makes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from plan_vs_measured import ProbedRow, Row, Size, case_of, measured_rows, recipes_of, show_probed


def test_rows_of_the_page_that_were_not_run_are_left_out() -> None:
    rows = measured_rows()
    assert Row(shape="0.5b", stage="sft", way="full") in rows
    assert Row(shape="1.5b", stage="dpo", way="full") not in rows
    assert all(row.peak_gib > 0 and row.step_s > 0 for row in rows.values())


def test_sizes_reach_the_stages_and_each_may_be_alone() -> None:
    small = Size(batch=2, max_length=96, steps=4, iterations=3, new_tokens=8)
    sft, ppo = (Row(shape="135m", stage=stage, way="lora", size=small) for stage in ("sft", "ppo"))
    cases = [case_of(row, Path("home")) for row in (sft, ppo)]
    assert [(case.batch, case.steps, case.max_length, case.new_tokens) for case in cases] == [
        (2, 4, 96, 8),
        (4, 3, 96, 8),
    ]
    assert recipes_of([sft, ppo]) == [[sft, ppo]]
    alone = [Row(shape="135m", stage=stage, way="lora", size=Size(alone=True)) for stage in ("sft", "ppo")]
    assert recipes_of(alone) == [alone[:1], alone[1:]]


def test_rows_of_a_cpu_are_never_set_beside_those_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probed = [
        ProbedRow(
            row=Row(shape="0.5b", stage="sft", way="full"),
            machine=machine,
            planned=15.0,
            two_steps=14.0,
            corrected=15.1,
            pass_tokens=None,
            whole_run=whole,
            problem="",
        )
        for machine, whole in (("h200", None), ("cpu", None), ("cpu", 20.0))
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(asdict(row))}\n" for row in probed))
    show_probed(file)
    said = capsys.readouterr().out
    assert said.count("not run to its end") == 1
    assert "2 of 2 planned peaks within 25%" in said
    assert "1 of 2 corrected peaks within 10%" in said
