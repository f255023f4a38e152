"""Looks at a policy while it trains: they leave no trace in it, can be computed again, and go on after a crash."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.stages.judge_server import JudgeServer

from kedge.core.errors import ConfigError, RewardError
from kedge.evaluate.paired import tango
from kedge.exams.rows import read_rows
from kedge.models.training.train_step import TrainStep
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.report.run.page import render_run
from kedge.report.run.run_records import read_run
from kedge.runs.state import capture_rng, restore_rng
from kedge.stages.ppo.settings import PPOSettings, check, explain
from kedge.stages.rl import looks
from kedge.stages.rl.look_settings import LookSettings, open_for_policy

Start = Callable[..., Path]
Records = Callable[[Path], list[dict[str, Any]]]

OWN = """kedge_exam: 1
name: own
kind: choice
items: own.jsonl
forms: [cloze]
"""
WRITTEN = """kedge_exam: 1
name: written
kind: open
items: written.jsonl
max_new_tokens: 4
"""
EVAL = {"exam": ["own.yaml", "written.yaml"], "every": 2}
GROUP = {"kind": "group", "answers": 2, "minibatches": 1}


@pytest.fixture
def start(ppo_recipe: Callable[..., Path], ppo_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """A run of three iterations with two small exams beside its recipe; returns the folder of the stage."""
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))

    def run(name: str, *, resumed: bool = False, **settings: Any) -> Path:
        place = tmp_path / name
        file = ppo_recipe(place, **{"iterations": 3, "checkpoints": {"every": 1}, **settings})
        if settings.get("kind") == "group":
            recipe = json.loads(file.read_text())
            stage = recipe["stages"]["ppo"]
            for key in ("critic", "epochs"):
                stage.pop(key)
            file.write_text(json.dumps(recipe))
        (place / "own.yaml").write_text(OWN)
        choices = [f"{letter}{number}" for number, letter in enumerate("abcd")]
        rows = [{"question": f"Which is {n}?", "choices": choices, "answer": n % 4} for n in range(12)]
        (place / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (place / "written.yaml").write_text(WRITTEN)
        rows = [{"question": f"Say {letter}", "answer": letter} for letter in "xyz"]
        (place / "written.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return run_recipe(load_recipe(file), place / "runs", is_resumed=resumed, say=lambda _: None) / "ppo"

    return run


def without_looks(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if not name.startswith(("exam/", "judge/"))}
        for row in records
        if row["step"]
    ]


CASES: list[Any] = [
    pytest.param({"roles": "lora"}, id="ppo"),
    pytest.param({**GROUP, "roles": "separate"}, id="group", marks=pytest.mark.slow),
    pytest.param({"roles": "separate", "generator": {"kind": "local", "lag": 1}}, id="lag", marks=pytest.mark.slow),
    pytest.param({"roles": "trunk"}, id="trunk", marks=pytest.mark.slow),
    pytest.param({**GROUP, "roles": "lora", "method": "remax"}, id="remax", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("settings", CASES)
def test_a_run_with_looks_is_the_run_without_them(settings: dict[str, Any], start: Start, records: Records) -> None:
    plain, looked = start("plain", **settings), start("looked", **settings, eval=EVAL)
    found = records(looked / "metrics.jsonl")
    assert without_looks(found) == records(plain / "metrics.jsonl")
    assert records(looked / "samples.jsonl") == records(plain / "samples.jsonl")
    model = "model/model.safetensors"
    assert (looked / model).read_bytes() == (plain / model).read_bytes()
    assert [row["step"] for row in found if "exam/own/cloze" in row] == [0, 2, 3]
    _assert_paired(looked, found)
    page = render_run(read_run(looked))
    assert "Exams against the start" in page
    assert "own.cloze" in page


def _assert_paired(stage: Path, found: list[dict[str, Any]]) -> None:
    """The metrics are those of the rows of items."""
    scores = {
        step: {row.item: row.score for row in read_rows(stage / f"exams/{step:06d}/items.jsonl") if row.exam == "own"
               and row.metric == "cloze"}
        for step in (0, 2, 3)
    }  # fmt: skip
    for step in (2, 3):
        (row,) = [row for row in found if row["step"] == step]
        gaps = [scores[step][item] - score for item, score in scores[0].items()]
        assert len(gaps) == 12
        assert row["exam/own/cloze/change"] == pytest.approx(sum(gaps) / 12)
        expected = tango(sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps), 12)
        assert (row["exam/own/cloze/change/low"], row["exam/own/cloze/change/high"]) == pytest.approx(expected)
        assert 0 < row["exam/own/cloze/worse"] <= row["exam/own/cloze/worse/twice"] <= 1


class Fallen(Exception):
    pass


@pytest.mark.parametrize("place", ["look", pytest.param("update", marks=pytest.mark.slow)])
def test_a_run_that_fell_in_or_after_a_look_goes_on_to_the_last_bit(
    place: str, start: Start, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = start("whole", **GROUP, eval=EVAL)
    owner, name, call = (looks.Looks, "_take_exams", 2) if place == "look" else (TrainStep, "learn", 3)
    real, calls = getattr(owner, name), iter(range(1, 99))

    def falls(*arguments: Any, **named: Any) -> Any:
        if next(calls) == call:
            raise Fallen
        return real(*arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, falls)
        with pytest.raises(Fallen):
            start("fallen", **GROUP, eval=EVAL)
    found = start("fallen", **GROUP, eval=EVAL, resumed=True)
    for file in ("metrics.jsonl", "samples.jsonl"):
        assert records(found / file) == records(whole / file)
    files = sorted(path.relative_to(whole) for path in (whole / "exams").rglob("*.json*"))
    assert len(files) == 6
    assert all((found / file).read_bytes() == (whole / file).read_bytes() for file in files)


def test_what_is_gone_back_behind_is_forgotten(tmp_path: Path) -> None:
    for step in (0, 50, 100):
        (tmp_path / f"exams/{step:06d}").mkdir(parents=True)
    of_run = SimpleNamespace(folder=tmp_path / "exams", context=SimpleNamespace(once=lambda action: action()))
    looks.Looks.forget_after(of_run, 50)  # pyright: ignore[reportArgumentType]
    assert sorted(path.name for path in (tmp_path / "exams").iterdir()) == ["000000", "000050"]


def test_a_look_that_draws_random_numbers_gives_them_back() -> None:
    """Whatever an exam or a library draws by: the next number of the run is the same."""
    of_run: Any = SimpleNamespace(steps={2}, _compare=lambda step: {}, _write_about=lambda step: None)
    of_run.context = SimpleNamespace(once=lambda action: action())
    of_run._take_exams = lambda step: {"exam/a/b": torch.rand(3).sum().item() + np.random.rand() + random.random()}
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    state = capture_rng()
    assert looks.Looks.take(of_run, 2)["exam/a/b"] > 0
    after = (torch.rand(1).item(), np.random.rand(), random.random())
    restore_rng(state)
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == after


def judge(server: JudgeServer, model: str = "fair") -> dict[str, Any]:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    return {"kind": "judge", "url": url, "model": model, "retries": 0, "timeout_s": 5}


def test_a_judge_compares_each_look_with_the_start(
    start: Start, ppo_home: Path, judge_server: JudgeServer, records: Records
) -> None:
    prompts = str(ppo_home / "prompts.jsonl")
    eval_ = {"exam": None, "every": 2, "judge": judge(judge_server), "prompts": prompts, "answers": 2}
    stage = start("judged", **GROUP, eval=eval_, actor={"lr": 0.3})
    found = {row["step"]: row for row in records(stage / "metrics.jsonl")}
    assert "judge/win_rate" not in found.get(0, {})
    rows = [json.loads(line) for line in (stage / "exams/000003/judged.jsonl").read_text().splitlines()]
    assert len(rows) == 20
    by_prompt = [sum(row["preference"] for row in rows[at : at + 2]) / 2 for at in range(0, 20, 2)]
    assert found[3]["judge/win_rate"] == pytest.approx(sum(by_prompt) / 10)
    assert found[3]["judge/win_rate/low"] < found[3]["judge/win_rate"] < found[3]["judge/win_rate/high"]
    assert {"judge/ties", "judge/inconsistent", "judge/fallen", "judge/fallen/twice"} <= set(found[2])
    assert "Win rate over the start" in render_run(read_run(stage))


@pytest.mark.slow
def test_a_judge_who_cannot_be_asked_is_known_before_training_and_missed_after(
    start: Start, ppo_home: Path, judge_server: JudgeServer, records: Records
) -> None:
    prompts = str(ppo_home / "prompts.jsonl")
    eval_ = {"exam": None, "every": 2, "judge": judge(judge_server), "prompts": prompts}
    judge_server.verdict = lambda model, first, second: ""  # a status of 400
    with pytest.raises(RewardError, match="1 of 1 comparisons could not be asked"):
        start("refused", **GROUP, eval=eval_)
    judge_server.verdict = lambda model, first, second: '{"better": "A"}' if not first or not second else ""
    stage = start("missed", **GROUP, eval=eval_, actor={"lr": 0.3})
    failed = [event for event in records(stage / "events.jsonl") if event["code"] == "eval.failed"]
    assert [event["step"] for event in failed] == [2, 3]
    assert (stage / "model").is_dir()


def findings(**eval_: Any) -> list[str]:
    given = {"kind": "ppo", "reward": "r", "prompts": "p.jsonl", "iterations": 100, "eval": eval_}
    return [
        finding.message for finding in check(PPOSettings.model_validate(given)) if finding.code.startswith("ppo.eval")
    ]


def test_what_cannot_be_looked_at_is_found_before_training() -> None:
    assert findings(exam="quick") == []
    assert "there is no exam 'quik' (did you mean 'quick'?)" in findings(exam="quik")[0]
    assert "the files of the exam mmlu are not here" in findings(exam=["quick", "mmlu"])[0]
    assert "loads a model by itself" in findings(exam="lm_eval:arc_easy")[0]
    assert "neither an exam nor a judge" in findings(exam=None)[0]
    asked = {"kind": "judge", "url": "http://127.0.0.1:1/v1", "model": "m"}
    assert findings(judge=asked) == [
        "eval.judge is there and eval.prompts is not: a judge compares answers to fixed prompts"
    ]
    assert "eval.every 200 is more than the 100 iterations" in findings(every=200)[0]


def test_the_cost_of_looks_is_told() -> None:
    given = {"kind": "ppo", "reward": "r", "prompts": "p.jsonl", "iterations": 100, "eval": {"limit": 5}}
    assert explain(PPOSettings.model_validate(given))[-1].startswith("3 looks at the policy, each 6 exams of ")
    own = given | {"eval": {"exam": "knowledge", "limit": 5, "every": 10}}
    line = explain(PPOSettings.model_validate(own))[-1]
    assert line == "11 looks at the policy, each 1 exam of 5 items: 40 choices compared, 0 answers of 0 tokens at most"


def test_an_exam_that_asks_for_scores_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path))
    folder = tmp_path / "exams/reward_pairs"
    folder.mkdir(parents=True)
    row = {"id": "1", "prompt": "P", "chosen": "good", "rejected": "bad", "subset": "s"}
    (folder / "items.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match="asks for scores of a reward model"):
        open_for_policy("reward_pairs", limit=None)
    assert LookSettings(exam="quick").exams[0] == "knowledge"
