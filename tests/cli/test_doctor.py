"""`kedge doctor` as a user sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.runs import Run, new_manifest

Kedge = Callable[..., Any]


@pytest.fixture
def stage(tmp_path: Path) -> Callable[[float], Path]:
    def make(truncated: float) -> Path:
        settings = {"kind": "ppo", "sampling": {"max_new_tokens": 64}}
        folder = tmp_path / "hh"
        manifest = new_manifest(name="hh", stage="ppo", kind="ppo", seed=1, settings=settings)
        with Run.create(folder, manifest=manifest) as run:
            for step in range(1, 41):
                run.log(
                    {"reward/mean": 0.1 * step, "kl/mean": min(3.0, step - 1.0), "length/truncated": truncated}, step
                )
            run.finish("done")
        return folder

    return make


def test_a_healthy_run(kedge: Kedge, stage: Callable[[float], Path]) -> None:
    done = kedge("doctor", str(stage(0.1)))
    assert done.code == 0
    assert "✓ ppo (ppo, done)" in done.out
    assert "Healthy: the reward went from 0.25 to 3.85 in 40 steps, at a KL of 3 nats." in done.out
    assert "what to change" not in done.out
    assert "--set" not in done.out


def test_an_ill_run_is_a_report_and_no_failure(kedge: Kedge, stage: Callable[[float], Path]) -> None:
    done = kedge("doctor", str(stage(0.9)))
    assert done.code == 0
    lines = [line.strip() for line in done.out.splitlines()]
    assert "! ppo (ppo, done)" in lines
    assert "step 5: 90% of the answers are cut off before they end" in lines
    assert lines[lines.index("most likely") + 1].startswith("the policy does not end its answers: ")
    assert lines[lines.index("what to change, in this order") + 1].startswith("1. generation: sampling.max_new_tokens")
    assert "+      max_new_tokens: 100" in done.out
    assert "kedge run RECIPE --set name=hh-2 --set stages.ppo.sampling.max_new_tokens=100" in lines


def test_the_same_for_programs(kedge: Kedge, stage: Callable[[float], Path]) -> None:
    done = kedge("doctor", str(stage(0.9)), "--json")
    (found,) = json.loads(done.out)
    assert (found["pipeline"], found["stage"], found["is_healthy"]) == ("hh", "ppo", False)
    assert found["causes"][0]["code"] == "no_ends"
    assert (found["changes"][0]["key"], found["changes"][0]["new"]) == ("sampling.max_new_tokens", 100)


def test_a_folder_that_is_no_run(kedge: Kedge) -> None:
    done = kedge("doctor", "nowhere")
    assert done.code == 2
    assert "nowhere" in done.err
