"""People as the judge of an evaluation: the run waits, their verdicts become win rates, and a gate can read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kedge.core.errors import Waiting
from kedge.gate.judgements import read_judgements
from kedge.label.accounts import add_person
from kedge.label.database import open_store
from kedge.label.judging import judge
from kedge.label.projects import Settings, find_project, new_project
from kedge.label.questions import Decision
from kedge.label.work import next_task
from kedge.models.loading.tiny import make_tiny
from kedge.stages.evaluate.run import run
from kedge.stages.evaluate.settings import EvaluateSettings, explain

Start = Callable[..., Any]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("people")
    make_tiny(home / "tiny", hidden=32, layers=1)
    make_tiny(home / "other", seed=5, hidden=32, layers=1)
    weights = load_file(home / "other/model.safetensors")
    loud = {name: 40 * tensor for name, tensor in weights.items()}
    save_file(loud, home / "other/model.safetensors", metadata={"format": "pt"})
    (home / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"P{number}?"}) + "\n" for number in range(6)))
    return home


@pytest.fixture
def start(home: Path, run_recorded: Callable[..., Any], tmp_path: Path) -> Start:
    store = open_store(str(tmp_path / "labels.db"), create=True)
    new_project(store, "shop", ["pair"], "The longer one.", Settings(gold_share=0, repeat_share=0))
    store.close()

    def start(**changes: Any) -> Any:
        given: dict[str, Any] = {"kind": "evaluate", "models": ["tiny", "other"], "prompts": "p", "max_new_tokens": 5}
        given |= {"answers": 2, "dtype": "float32", "judge": {"kind": "people", "project": "shop", **changes}}
        settings = EvaluateSettings.model_validate(given)
        models = [str(home / name) for name in settings.models]
        return run_recorded(tmp_path / "stage", run, settings, models=models, prompts=str(home / "prompts.jsonl"))

    return start


def people_label(folder: Path, most: int | None = None) -> int:
    """Somebody prefers the longer answer."""
    store, labels = open_store(str(folder / "labels.db")), 0
    project, person = find_project(store, "shop"), add_person(store, None)
    while (most is None or labels < most) and (task := next_task(store, project, person)) is not None:
        left, right = (len(answer[0].content) for answer in task.answers)
        outcome = 0 if left == right else -1 if left > right else 1
        judge(store, project, person, task.assignment, Decision(verdict="step", outcome=outcome))
        labels += 1
    store.close()
    return labels


def test_the_run_waits_and_verdicts_become_win_rates(start: Start, tmp_path: Path) -> None:
    with pytest.raises(Waiting, match=r"0 of \d+ comparisons of project shop are there"):
        start()
    assert (tmp_path / "stage/answers.jsonl").is_file(), "who waits sees what is asked"
    people_label(tmp_path)
    recorded = start()
    answers = {row["id"]: row["answer"] for row in recorded.lines("answers")}
    rows = [json.loads(line) for line in (tmp_path / "stage/judgements.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    for row in rows:
        ours, theirs = (len(answers[row["id"].replace("other", name)]) for name in ("other", "tiny"))
        expected = 0.5 if ours == theirs else float(ours > theirs)
        assert (row["judge"], row["as_first"], row["as_second"], row["preference"]) == ("people", *(expected,) * 3)
    found = json.loads((tmp_path / "stage/evaluation.json").read_text())["judges"]
    rate = found["other"]["people"]
    assert rate["rate"] == pytest.approx(sum(row["preference"] for row in rows) / 12)
    assert (rate["comparisons"], rate["unreadable"]) == (12, 0)
    judged = read_judgements(tmp_path / "stage/judgements.jsonl", found)  # as a gate reads them
    assert len(judged["people"]["other"]) == 12


def test_what_people_did_not_compare_is_left_out_where_a_part_is_enough(start: Start, tmp_path: Path) -> None:
    with pytest.raises(Waiting):
        start()
    done = people_label(tmp_path, most=6)
    start(enough=0.2)
    rate = json.loads((tmp_path / "stage/evaluation.json").read_text())["judges"]["other"]["people"]
    assert rate["comparisons"] - rate["unreadable"] >= done == 6
    assert rate["unreadable"] > 0


def test_labels_are_told_by_the_arithmetic() -> None:
    judge = {"kind": "people", "project": "shop", "wanted": 3}
    given = {"kind": "evaluate", "models": ["a", "b", "c"], "prompts": "p", "answers": 2, "judge": judge}
    lines = explain(EvaluateSettings.model_validate(given))
    assert lines[1] == "people of shop: 12 labels for each prompt; the run waits (exit code 4)"
