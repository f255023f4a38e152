"""The whole loop: models answer, people label through the store, the run goes on, and a reward model learns from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from kedge.label.accounts import add_person
from kedge.label.database import open_store
from kedge.label.judging import judge
from kedge.label.projects import Settings, find_project, new_project
from kedge.label.questions import Decision
from kedge.label.work import next_task
from kedge.models.loading.tiny import make_tiny

SKILLS = (0.95, 0.85, 0.5)
LABEL: dict[str, Any] = {
    "kind": "label",
    "data": "tasks",
    "by": {"kind": "people", "project": "shop", "wanted": 3, "overlap": {"share": 0.0}, "guideline": "guide.md"},
    "questions": ["pair"],
}
REWARD: dict[str, Any] = {
    "kind": "reward",
    "data": "label",
    "heldout": "label.heldout",
    "labels": "soft",
    "batch": 8,
    "max_length": 96,
    "max_steps": 2,
    "if_unfit": "go_on",
    "loss": {"margin": True},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("loop")
    make_tiny(home / "tiny", hidden=32, layers=1)
    make_tiny(home / "other", seed=5, hidden=32, layers=1)
    weights = load_file(home / "other/model.safetensors")
    loud = {name: 40 * tensor for name, tensor in weights.items()}  # another way of answering
    save_file(loud, home / "other/model.safetensors", metadata={"format": "pt"})
    words = ["red", "green", "blue", "white", "black", "grey", "brown", "pink"]
    prompts = [{"prompt": f"What is {word} and {other}?"} for word in words for other in words if word != other]
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts[:20]))
    (home / "guide.md").write_text("The longer one is the better one.")
    return home


@pytest.fixture
def recipe(home: Path, tmp_path: Path) -> Callable[..., Path]:
    def write(*, reward: bool = False, **label: Any) -> Path:
        tasks = {"kind": "tasks", "models": [str(home / "tiny"), str(home / "other")], "answers": 1, "dtype": "float32"}
        tasks |= {"prompts": str(home / "prompts.jsonl"), "max_new_tokens": 6, "heldout": 0.2, "challenge": 0.1}
        given = LABEL | label
        by = given["by"] | {"guideline": str(home / "guide.md"), "db": str(tmp_path / "labels.db")}
        stages: dict[str, Any] = {"tasks": tasks, "label": given | {"by": by}}
        if reward:
            stages["reward"] = REWARD
        file = tmp_path / "recipe.yaml"
        settings = {"kedge": 1, "name": "loop", "seed": 3, "model": str(home / "tiny"), "stages": stages}
        file.write_text(yaml.safe_dump(settings, sort_keys=False))
        return file

    return write


def people_label(folder: Path, skills: tuple[float, ...] = SKILLS, most: int | None = None) -> int:
    """People of these skills prefer the longer answer; the number of labels."""
    store, chance, labels = open_store(str(folder / "labels.db")), Random(1), 0
    project = find_project(store, "shop")
    for number, skill in enumerate(skills):
        person = add_person(store, f"p{number}-{Random().random()}@example.org")
        while (most is None or labels < most) and (task := next_task(store, project, person)) is not None:
            left, right = (len(answer[0].content) for answer in task.answers)
            is_left = (left > right) == (chance.random() < skill)
            decision = Decision(verdict="step", outcome=-2 if is_left else 2, seconds=30.0)
            judge(store, project, person, task.assignment, decision)
            labels += 1
    store.close()
    return labels


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_people_label_between_two_runs_and_a_reward_model_learns_soft_labels(
    recipe: Callable[..., Path], kedge: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, runs = recipe(reward=True), tmp_path / "runs"
    assert kedge("run", file, "--runs", runs) == 4
    words = " ".join(capsys.readouterr().err.split())
    assert "waiting for people: 0 of 60 labels of project shop are there (0 of 20 tasks done)" in words
    assert "--resume" in words
    assert json.loads((runs / "loop/label/run.json").read_text())["status"] == "waiting"
    assert json.loads((runs / "loop/run.json").read_text())["status"] == "waiting"
    people_label(tmp_path, SKILLS[:1], most=10)
    assert kedge("run", file, "--runs", runs, "--resume") == 4
    assert "10 of 60 labels of project shop are there (0 of 20 tasks done), 50 are missing, about 0.4 h" in " ".join(
        capsys.readouterr().err.split()
    )
    people_label(tmp_path, (*SKILLS[:1], *SKILLS))
    assert kedge("run", file, "--runs", runs, "--resume") == 0

    made = runs / "loop/label"
    pairs, heldout = lines(made / "pairs.jsonl"), lines(made / "heldout.jsonl")
    assert len(pairs) + len(heldout) == 20
    assert len(heldout) == 4
    assert any(0.5 < row["certainty"] < 1 for row in pairs), "Dawid and Skene's posterior"
    assert {row["margin"] for row in pairs} <= {2 / 3, 2 / 9, 0.0}  # 0 where the majority is overruled
    numbers = json.loads((made / "agreement.json").read_text())
    assert (numbers["labels"], numbers["as_of"], numbers["exports"]["pairs"]["rows"]) == (60, 60, len(pairs))
    assert -1 < numbers["agreement"]["pair"]["low"] < numbers["agreement"]["pair"]["alpha"] < 1
    page = (made / "label-report.html").read_text()
    assert "example.org" not in page + (made / "agreement.json").read_text(), "addresses stay in the store"
    assert "Krippendorff" in page
    events = [row["message"] for row in lines(runs / "loop/reward/events.jsonl") if row["code"] == "reward.data"]
    assert events == [f"{len(pairs)} comparisons to learn, {len(heldout)} held out by prompt"]
    assert (runs / "loop/reward/model").is_dir()


def test_the_hours_of_people_are_told_before_anything_runs(
    recipe: Callable[..., Path], kedge: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert kedge("check", recipe()) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "20 tasks, about 60 labels: 1.0 h of people (60 s each, assumed: nobody has labelled yet)" in words


@pytest.mark.slow
def test_labels_below_what_is_needed_stop_the_run_with_everything_saved(
    recipe: Callable[..., Path], kedge: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, runs = recipe(need={"alpha": 0.9, "labels": 500}), tmp_path / "runs"
    assert kedge("run", file, "--runs", runs) == 4
    people_label(tmp_path)
    assert kedge("run", file, "--runs", runs, "--resume") == 3
    words = " ".join(capsys.readouterr().err.split())
    assert "60 labels, and need.labels is 500; α" in words
    assert "and need.alpha is 0.9" in words
    assert len(lines(runs / "loop/label/pairs.jsonl")) > 10
    assert "need.alpha is 0.9" in (runs / "loop/label/label-report.html").read_text()


@pytest.mark.slow
def test_a_share_of_the_labels_may_be_enough(
    recipe: Callable[..., Path], kedge: Callable[..., int], tmp_path: Path
) -> None:
    file, runs = recipe(), tmp_path / "runs"
    assert kedge("run", file, "--runs", runs) == 4
    people_label(tmp_path, SKILLS[:2])
    assert kedge("run", file, "--runs", runs, "--resume") == 4
    assert kedge("run", file, "--runs", runs, "--resume", "--set", "stages.label.enough=0.6") == 0


@pytest.mark.slow
def test_a_project_that_is_there_keeps_its_questions_and_its_other_items(
    recipe: Callable[..., Path], kedge: Callable[..., int], tmp_path: Path
) -> None:
    store = open_store(str(tmp_path / "labels.db"), create=True)
    new_project(store, "shop", ["pair", "axes"], "Look.", Settings(gold_share=0))
    store.close()
    (tmp_path / "more.jsonl").write_text(json.dumps({"prompt": "A?", "chosen": "b", "rejected": "c"}) + "\n")
    assert kedge("label", "add", "shop", tmp_path / "more.jsonl", "--db", tmp_path / "labels.db") == 0
    file, runs = recipe(), tmp_path / "runs"
    assert kedge("run", file, "--runs", runs) == 4
    people_label(tmp_path)
    assert kedge("run", file, "--runs", runs, "--resume") == 0
    prompts = {row["prompt"][0]["content"] for row in lines(runs / "loop/label/pairs.jsonl")}
    assert "A?" not in prompts, "what the tasks did not ask is not the stage's"


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a judge without trust": (
        {"by": {"kind": "judge", "url": "http://localhost/v1", "model": "m"}},
        "kedge judge trust",
    ),
    "unknown": ({"by": {"kind": "crowd", "project": "x"}}, "there is no 'crowd'"),
    "settle": ({"settle": "mean"}, "majority"),
    "agreement of nobody": (
        {"by": {"kind": "people", "project": "shop", "overlap": {"share": 0.0}}, "need": {"alpha": 0.4}},
        "no task is labelled by two people",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_asked_is_refused_before_anything_starts(
    recipe: Callable[..., Path],
    kedge: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    label, words = BAD[name]
    assert kedge("run", recipe(**label), "--runs", tmp_path / "runs") == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "labels.db").exists()
