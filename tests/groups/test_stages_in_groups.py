"""RL stages with their roles in groups: the metrics, samples and weights of a single process, also after a process was
lost and across placements. The workers are threads here; `test_ray` has processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.groups import lost_groups as lost
from tests.groups.threads import thread_groups
from tests.processes import stages
from tests.processes.test_training import assert_near

from kedge.core.errors import DataError, RewardError, RunError
from kedge.core.world import ALONE

SEPARATE = {
    "learner": {"roles": ["policy"]},
    "critic": {"roles": ["critic"]},
    "judge": {"roles": ["reward", "gold"]},
    "reference": {"roles": ["reference"]},
}
APART = {"judge": {"roles": ["reward"]}, "learner": {"gpus": 1}}
ENGINES = {"learner": {"gpus": 1}, "engines": {"roles": ["generator"]}}
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "separate, all apart": ("ppo, separate", SEPARATE, {}),
    "lora, the judge apart": ("ppo, lora", APART, {}),
    "trunk, the judge apart": ("ppo, trunk", APART, {}),
    "grpo, an engine of its own": ("grpo", ENGINES, {}),
    "grpo, an engine with a lag": (
        "grpo", ENGINES, {"generator": {"kind": "local", "lag": 1}, "max_rounds": 1, "iterations": 3},
    ),
    "remax, greedy answers": ("remax", APART, {}),
}  # fmt: skip

QUICK_LAYOUTS = {"separate, all apart", "grpo, an engine with a lag"}
QUICK_KILLS = {"judge", "policy learns", "save"}


def _param(case: Any, quick: set[str]) -> Any:
    return case if str(case) in quick else pytest.param(case, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def expected(home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the stage that is disturbed."""
    return lost.undisturbed(home, tmp_path_factory.mktemp("alone"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("case", [_param(case, QUICK_LAYOUTS) for case in LAYOUTS])
def test_a_stage_in_groups_gives_what_one_process_gives(home: Path, tmp_path: Path, case: str) -> None:
    name, layout, changes = LAYOUTS[case]
    alone = stages.run_stage(ALONE, home, name, tmp_path / "alone", changes)
    with thread_groups(layout) as groups:
        apart = stages.run_stage(ALONE, home, name, tmp_path / "groups", changes, groups)
    written = (tmp_path / "groups/process-0/metrics.jsonl").read_text()
    for metric in ("time/policy_update", "time/reward_score", *(f"idle/{group}" for group in layout)):
        assert f'"{metric}"' in written, metric
    for facts in (alone, apart):
        del facts["checkpoints"]
        facts["events"].sort()
    assert_near(apart, alone, within=1e-6)


@pytest.mark.parametrize("case", [_param(case, QUICK_KILLS) for case in lost.CASES], ids=str)
def test_a_lost_process_changes_nothing(case: lost.Case, home: Path, tmp_path: Path, expected: dict[str, Any]) -> None:
    assert lost.compare(case, home, tmp_path, expected) is None


def test_too_many_losses_end_the_run_and_it_can_be_resumed_without_groups(
    home: Path, tmp_path: Path, expected: dict[str, Any]
) -> None:
    falls = [("policy", "update"), ("policy", "update")]
    with (
        thread_groups(lost.GROUPS, falls=falls, restarts=1) as groups,
        pytest.raises(RunError, match="was lost"),
    ):
        stages.run_stage(ALONE, home, lost.STAGE, tmp_path / "run", lost.CHANGES, groups)
    resumed = stages.run_stage(ALONE, home, lost.STAGE, tmp_path / "run", lost.CHANGES)
    for part in ("metrics", "samples", "model"):
        assert_near(resumed[part], expected[part], within=1e-6)


def test_a_run_without_groups_is_resumed_with_them(home: Path, tmp_path: Path, expected: dict[str, Any]) -> None:
    begun = {**lost.CHANGES, "max_steps": 1}
    stages.run_stage(ALONE, home, lost.STAGE, tmp_path / "run", begun)
    with thread_groups(lost.GROUPS) as groups:
        resumed = stages.run_stage(ALONE, home, lost.STAGE, tmp_path / "run", lost.CHANGES, groups)
    assert_near(resumed["metrics"], expected["metrics"], within=1e-6)
    assert_near(resumed["model"], expected["model"], within=1e-6)


def test_a_reward_that_fails_ends_the_run_with_its_words_and_everything_saved(home: Path, tmp_path: Path) -> None:
    (home / "broken.py").write_text("def score(answers):\n    raise OSError('no such table')\n")
    broken = {"reward": {"kind": "function", "path": "broken.py:score"}}
    words = "gave no score to any of 5 answers. Reasons: OSError: no such table"
    with thread_groups(lost.GROUPS) as groups, pytest.raises(RewardError, match=words):
        stages.run_stage(ALONE, home, lost.STAGE, tmp_path / "run", {**lost.CHANGES, **broken}, groups)
    assert (tmp_path / "run/process-0/checkpoints/step-000000").is_dir()


def test_what_a_worker_cannot_build_is_refused_with_its_words(home: Path, tmp_path: Path) -> None:
    gone = {"reward": {"kind": "function", "path": "nothing.py:score"}}
    with thread_groups(lost.GROUPS) as groups, pytest.raises(Exception, match=r"no file .*nothing\.py"):
        stages.run_stage(ALONE, home, lost.STAGE, tmp_path / "run", {**lost.CHANGES, **gone}, groups)
    with thread_groups(lost.GROUPS) as groups, pytest.raises(DataError, match=r"leave no room|longer than"):
        stages.run_stage(ALONE, home, lost.STAGE, tmp_path / "two", {**lost.CHANGES, "max_prompt_tokens": 3}, groups)
