"""What the stage hands to its parts: the temperature, the seed, and sources that leave answers without a score."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.core.errors import DataError
from kedge.models.loading.tiny import make_tiny
from kedge.stages.evaluate.run import run
from kedge.stages.evaluate.settings import EvaluateSettings
from kedge.stages.rl import candidates

RunStage = Callable[..., Any]
RULES = 'def score(answer):\n    return None if "2" in answer.prompt[-1][1] else float(len(answer.text))\n'


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("evaluate")
    make_tiny(home / "tiny", hidden=32, layers=1)
    shutil.copytree(home / "tiny", home / "copy")
    make_tiny(home / "other", seed=5, hidden=32, layers=1)
    (home / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"P{number}?"}) + "\n" for number in range(4)))
    return home


@pytest.fixture(scope="module")
def whole(home: Path, run_recorded: RunStage, tmp_path_factory: pytest.TempPathFactory) -> Any:
    settings = EvaluateSettings.model_validate(
        {
            "kind": "evaluate",
            "models": ["tiny", "copy", "other"],
            "prompts": "prompts",
            "reward": {"kind": "function", "path": "rules.py:score"},
            "answers": 2,
            "max_new_tokens": 5,
            "temperature": 0.5,
            "dtype": "float32",
        }
    )
    folder = tmp_path_factory.mktemp("runs") / "stage"
    (folder.parent / "rules.py").write_text(RULES)
    models = [str(home / name) for name in settings.models]
    return run_recorded(folder, run, settings, models=models, prompts=str(home / "prompts.jsonl"))


def by_model(recorded: Any, name: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for answer in recorded.lines("answers"):
        found.setdefault(answer["model"], []).append(answer[name])
    return found


def test_the_kl_is_taken_at_the_temperature_of_sampling(whole: Any) -> None:
    """A copy of the baseline is no nat away from it; at another temperature it would seem to be."""
    kl = by_model(whole, "kl")
    assert kl["tiny"] == [None] * 8
    assert kl["copy"] == pytest.approx([0.0] * 8, abs=1e-5)
    assert min(map(abs, kl["other"])) > 0.01


def test_all_models_draw_with_the_same_luck(whole: Any) -> None:
    answers = by_model(whole, "answer")
    assert answers["copy"] == answers["tiny"]
    assert answers["other"] != answers["tiny"]
    assert len(set(answers["tiny"])) > 1
    assert max(by_model(whole, "length")["tiny"]) <= 5


def test_answers_without_a_score_are_reported_once_for_each_source(whole: Any) -> None:
    events = [event["message"] for event in whole.lines("events") if event["code"] == "evaluate.unscored"]
    assert events == ["reward: 6 of 24 answers have no score so far: the function gave None (6x)"]


@pytest.fixture(scope="module")
def foreign(home: Path, run_recorded: RunStage, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A run with a model of another chat template beside two that read alike; nobody scores."""
    shutil.copytree(home / "other", home / "foreign")
    template = home / "foreign/chat_template.jinja"
    template.write_text(template.read_text() + "{# another #}")

    def start(models: list[str], **changes: Any) -> Any:
        given = {"kind": "evaluate", "models": models, "prompts": "prompts", "max_new_tokens": 2, "dtype": "float32"}
        folder = tmp_path_factory.mktemp("runs") / "stage"
        paths = [str(home / name) for name in models]
        settings = EvaluateSettings.model_validate({**given, **changes})
        return run_recorded(folder, run, settings, models=paths, prompts=str(home / "prompts.jsonl"))

    return start


def kl_events(recorded: Any) -> list[str]:
    return [event["message"] for event in recorded.lines("events") if event["code"] == "evaluate.kl"]


def test_a_model_that_reads_other_tokens_has_no_kl_and_that_is_told(foreign: Callable[..., Any]) -> None:
    recorded = foreign(["tiny", "foreign", "other"])
    why = "its tokenizer or template is not that of tiny"
    assert kl_events(recorded) == [f"KL of foreign is not measured: {why}"]
    kl = by_model(recorded, "kl")
    assert kl["tiny"] == kl["foreign"] == [None] * 4
    assert None not in kl["other"]


@pytest.mark.parametrize("cut", [{"top_p": 0.5}, {"top_k": 3}])
def test_a_cut_distribution_has_no_kl(foreign: Callable[..., Any], cut: dict[str, float]) -> None:
    recorded = foreign(["tiny", "copy"], **cut)
    assert kl_events(recorded) == ["KL is not measured: top_p or top_k cut the distribution"]
    assert by_model(recorded, "kl") == {"tiny": [None] * 4, "copy": [None] * 4}


def test_long_sampling_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no quiet time every part is told; with a long one none."""
    lines: list[str] = []
    context = type("Speaker", (), {"say": staticmethod(lines.append)})()
    progress = candidates._Progress(context, "tiny", 2000)
    progress.show(5)
    assert lines == []
    monkeypatch.setattr(candidates, "_QUIET_S", 0.0)
    progress.show(1000)
    assert lines == ["  tiny: 1,000 of 2,000 answers"]


@pytest.mark.parametrize(("too_long", "asked"), [("drop", ["P0?", "P1?"]), ("cut", ["P0?", "b" * 3, "P1?"])])
def test_every_model_is_asked_the_prompts_that_are_left(
    home: Path, run_recorded: RunStage, tmp_path: Path, too_long: str, asked: list[str]
) -> None:
    rows = ["P0?", "a" * 50 + "bbb", "P1?"]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    given = {"kind": "evaluate", "models": ["tiny", "other"], "prompts": "prompts", "max_new_tokens": 2}
    settings = EvaluateSettings.model_validate({**given, "max_prompt_tokens": 22, "too_long": too_long})
    models = [str(home / name) for name in settings.models]
    recorded = run_recorded(tmp_path / "stage", run, settings, models=models, prompts=str(tmp_path / "mixed.jsonl"))
    prompts = by_model(recorded, "prompt")
    for name in settings.models:
        assert [prompt[0]["content"] for prompt in prompts[name]] == asked
    events = [event for event in recorded.lines("events") if event["code"] == "prompts.too_long"]
    assert [event["evidence"] for event in events] == [{"count": 1, "total": 3}]


def test_a_prompt_without_room_for_an_answer_is_refused(home: Path, run_recorded: RunStage, tmp_path: Path) -> None:
    given = {"kind": "evaluate", "models": ["tiny"], "prompts": "prompts", "max_new_tokens": 1010}
    settings = EvaluateSettings.model_validate(given)
    with pytest.raises(DataError, match=r"4 of 4 prompts are longer than the window of 1,024 less max_new_tokens"):
        run_recorded(tmp_path / "s", run, settings, models=[str(home / "tiny")], prompts=str(home / "prompts.jsonl"))
