"""Judges and groups in an evaluation: what is asked, counted, written, printed and shown; and what resuming costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tests.stages.judge_server import JudgeServer, longer

from kedge.core.errors import DataError, RewardError
from kedge.models.loading.tiny import make_tiny
from kedge.report.run.tables import evaluation_table, group_table
from kedge.stages.evaluate.run import run
from kedge.stages.evaluate.settings import EvaluateSettings, check, explain

RunStage = Callable[..., Any]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("judges")
    make_tiny(home / "tiny", hidden=32, layers=1)
    make_tiny(home / "other", seed=5, hidden=32, layers=1)
    # Small random weights are nearly uniform: both models would give the same answers, which nobody is asked about.
    weights = load_file(home / "other/model.safetensors")
    save_file(
        {name: 40 * tensor for name, tensor in weights.items()},
        home / "other/model.safetensors",
        metadata={"format": "pt"},
    )
    rows = [{"prompt": f"P{number}?", "language": ("de", "en")[number % 2]} for number in range(6)]
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


def judge(server: JudgeServer, model: str, **more: Any) -> dict[str, Any]:
    return {"kind": "judge", "url": f"http://127.0.0.1:{server.server_port}/v1", "model": model, "retries": 0} | more


@pytest.fixture
def start(home: Path, run_recorded: RunStage, tmp_path: Path) -> Callable[..., Any]:
    def start(**changes: Any) -> Any:
        given = {"kind": "evaluate", "models": ["tiny", "other"], "prompts": "prompts", "max_new_tokens": 5}
        given |= {"answers": 2, "dtype": "float32"}
        settings = EvaluateSettings.model_validate(given | changes)
        models = [str(home / name) for name in settings.models]
        return run_recorded(tmp_path / "stage", run, settings, models=models, prompts=str(home / "prompts.jsonl"))

    return start


def test_a_panel_is_asked_in_both_orders_and_its_numbers_are_written(
    start: Callable[..., Any], judge_server: JudgeServer, tmp_path: Path
) -> None:
    panel = [judge(judge_server, "fair"), judge(judge_server, "place", name="biased"), judge(judge_server, "dumb")]
    recorded = start(judge=panel, groups=["language"])
    found = json.loads((tmp_path / "stage/evaluation.json").read_text())
    rates = found["judges"]["other"]
    assert list(rates) == ["fair", "biased", "majority"]  # nothing of `dumb` can be read
    rows = [json.loads(line) for line in (tmp_path / "stage/judgements.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 12
    answers = {row["id"]: row["answer"] for row in recorded.lines("answers")}
    for row in rows:
        ours, theirs = (answers[row["id"].replace("other", name)] for name in ("other", "tiny"))
        expected = 0.5 if ours == theirs else float(len(ours) > len(theirs))
        if row["judge"] == "fair" and len(ours) != len(theirs):
            assert (row["as_first"], row["as_second"], row["preference"]) == (expected,) * 3
        if row["judge"] == "biased" and ours != theirs:
            assert (row["as_first"], row["as_second"], row["preference"]) == (1, 0, 0.5)
    by_prompt = [
        sum(row["preference"] for row in rows if row["judge"] == "fair" and row["prompt"] == prompt) / 2
        for prompt in range(6)
    ]
    assert rates["fair"]["rate"] == pytest.approx(sum(by_prompt) / 6)
    assert (rates["biased"]["rate"], rates["biased"]["ties"], rates["biased"]["first_place"]) == (0.5, 1.0, 1.0)
    assert rates["biased"]["inconsistent"] == rates["biased"]["comparisons"] == 12
    events = [event["message"] for event in recorded.lines("events") if event["code"] == "evaluate.judge"]
    assert events == ["dumb: 12 of 12 comparisons of other name no winner: no win rate"]

    groups = found["groups"]["language"]
    assert {value: group["prompts"] for value, group in groups.items()} == {"de": 3, "en": 3}
    assert groups["de"]["judges"]["other"]["fair"]["rate"] == pytest.approx(sum(by_prompt[0::2]) / 3)
    table = {row[0]: row[1:] for row in evaluation_table(found).rows}
    assert table["judge biased: wins over tiny"][0] == "–"
    assert table["judge biased: wins over tiny"][1].startswith("50.0 % [")
    assert table["judge biased: orders disagree"] == ("–", "100.0 %")
    shown = group_table(found)
    assert shown is not None
    assert shown.head == ("field", "value", "prompts", "", "tiny", "other")
    assert [row[:4] for row in shown.rows][:3] == [
        ("language", "de", "3", "fair: wins"),
        ("language", "de", "3", "biased: wins"),
        ("language", "de", "3", "majority: wins"),
    ]


def test_what_was_judged_is_not_paid_for_again_after_a_crash(
    start: Callable[..., Any], judge_server: JudgeServer
) -> None:
    def failing(model: str, first: str, second: str) -> str:
        return longer(model, first, second) if judge_server.asked <= 5 else ""

    judge_server.verdict = failing
    with pytest.raises(RewardError, match=r"judge fair: \d+ of 6 comparisons could not be asked"):
        start(judge=judge(judge_server, "fair", workers=1), answers=1)
    asked = judge_server.asked
    judge_server.verdict = longer
    start(judge=judge(judge_server, "fair", workers=1), answers=1)
    # two calls for each comparison of unlike answers, five of which were answered before
    assert judge_server.asked - asked == asked - 5


def test_without_judges_and_groups_nothing_is_added(start: Callable[..., Any], tmp_path: Path) -> None:
    start()
    found = json.loads((tmp_path / "stage/evaluation.json").read_text())
    assert not {"judges", "groups"} & set(found)
    assert not (tmp_path / "stage/judgements.jsonl").exists()
    assert group_table(found) is None


def test_groups_have_scores_and_win_rates_of_their_own(
    start: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rules.py").write_text("def score(answer):\n    return float(len(answer.text))\n")
    start(reward={"kind": "function", "path": "rules.py:score"}, groups=["language"])
    found = json.loads((tmp_path / "stage/evaluation.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "stage/answers.jsonl").read_text().splitlines()]
    for place, value in enumerate(("de", "en")):
        own = [
            len(row["answer"]) for row in rows if row["model"] == "tiny" and int(row["id"].split("-")[1]) % 2 == place
        ]
        mean = found["groups"]["language"][value]["models"]["tiny"]["scores"]["reward"]["mean"]
        assert mean["mean"] == pytest.approx(sum(own) / len(own))
        assert mean["low"] <= mean["mean"] <= mean["high"]
        assert mean["prompts"] == 3


def test_a_field_that_no_prompt_has_is_refused_before_anything_is_sampled(start: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match=r"groups: no example has a field 'langage' \(did you mean 'language'\?\)"):
        start(groups=["langage"])


def settings(**changes: Any) -> EvaluateSettings:
    fields = {"kind": "evaluate", "models": ["a", "b"], "prompts": "p"} | changes
    return EvaluateSettings.model_validate(fields)


JUDGE = {"kind": "judge", "url": "http://localhost:1/v1", "model": "m"}


def test_judges_that_cannot_be_told_apart_are_refused() -> None:
    twice, taken, alone = (
        settings(judge=[JUDGE, JUDGE]),
        settings(judge=JUDGE | {"name": "majority"}),
        settings(judge=JUDGE, models=["a"]),
    )
    assert [next(check(one)).message for one in (twice, taken, alone)] == [
        "m: results are told apart by the judges' names, and 'majority' is all of them",
        "majority: results are told apart by the judges' names, and 'majority' is all of them",
        "a judge compares models with the first one, and there is no other",
    ]
    assert list(check(settings(judge=[JUDGE, JUDGE | {"name": "n"}]))) == []
    assert explain(settings(judge=[JUDGE, JUDGE | {"name": "n"}], answers=3))[-1] == (
        "2 judges: 12 calls for each prompt, both orders"
    )
    with pytest.raises(ValidationError):
        settings(judge=[])
