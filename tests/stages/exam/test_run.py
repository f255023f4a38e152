"""The stage: questions of every kind to tiny models; the files; the cache; what cannot be asked; other harnesses."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kedge.core.errors import ConfigError, RunError
from kedge.exams.exam import Dialogue, Metric, OpenQuestion, OpenReply, ProgramQuestion, ProgramReply, Score
from kedge.exams.rows import read_rows
from kedge.models.loading.tiny import make_tiny
from kedge.stages.exam import examinee, take
from kedge.stages.exam.files import table_lines
from kedge.stages.exam.run import run
from kedge.stages.exam.settings import ExamSettings
from kedge.stages.exam.take import Request, take_exams

RunStage = Callable[..., Any]
MINE = "kedge_exam: 1\nname: mine\nkind: open\nitems: mine.jsonl\nmax_new_tokens: 4\ngroups: [language]\n"
STUB = Path(__file__).parent / "engine_stub.py"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("exam")
    make_tiny(home / "tiny", hidden=32, layers=1)
    make_tiny(home / "other", seed=5, hidden=32, layers=1)
    (home / "mine.yaml").write_text(MINE)
    rows = [{"question": f"Say {number}", "answer": "x", "language": "en" if number else "de"} for number in range(3)]
    (home / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


@pytest.fixture(scope="module")
def recorded(home: Path, run_recorded: RunStage, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("runs") / "stage"
    for name in ("mine.yaml", "mine.jsonl"):
        shutil.copy(home / name, folder.parent / name)
    settings = ExamSettings.model_validate(
        {
            "kind": "exam",
            "models": ["tiny", "other"],
            "exams": ["knowledge", "mine.yaml"],
            "limit": 6,
            "dtype": "float32",
        }
    )
    return run_recorded(folder, run, settings, models=[str(home / "tiny"), str(home / "other")])


def test_a_row_for_each_item_metric_and_model(recorded: Any) -> None:
    rows = list(read_rows(recorded.folder / "items.jsonl"))
    counts = {(row.exam, row.metric, row.model) for row in rows}
    metrics = {("knowledge", metric) for metric in ("letter", "letter_brier", "cloze", "cloze_brier")}
    assert counts == {(*pair, model) for pair in metrics | {("mine", "correct")} for model in ("tiny", "other")}
    assert len(rows) == 2 * (4 * 6 + 3)
    assert {row.seed for row in rows} == {3}
    assert {row.groups["language"] for row in rows if row.exam == "mine"} == {"en", "de"}


def test_the_numbers_beside_them(recorded: Any) -> None:
    numbers = json.loads((recorded.folder / "exam.json").read_text())
    assert numbers["models"] == ["tiny", "other"]
    assert numbers["exams"]["knowledge"]["main"] == "letter"
    assert numbers["exams"]["knowledge"]["metrics"]["letter_brier"]["better"] == "less"
    assert numbers["exams"]["mine"]["items_hash"]
    whole = [result for result in numbers["results"] if result["group"] is None]
    assert len(whole) == 10
    letter = next(result for result in whole if (result["metric"], result["model"]) == ("letter", "tiny"))
    assert letter["low"] <= letter["mean"] <= letter["high"]
    assert (letter["items"], letter["clusters"]) == (6, 6)
    assert 0 <= letter["ece"] <= 1
    groups = [result["group"] for result in numbers["results"] if result["exam"] == "mine" and result["group"]]
    assert groups == [{"language": "de"}, {"language": "en"}] * 2
    effects = numbers["template"]["effects"]
    assert [(effect["exam"], effect["model"], effect["items"]) for effect in effects] == [
        ("knowledge", "tiny", 6),
        ("knowledge", "other", 6),
    ]


def test_answers_are_kept_for_people_to_read(recorded: Any) -> None:
    answers = recorded.lines("answers")
    written = [answer for answer in answers if answer["exam"] == "mine"]
    assert [answer["prompt"][0]["content"] for answer in written[:3]] == ["Say 0", "Say 1", "Say 2"]
    assert {answer["finished"] for answer in written} <= {True, False}
    assert len({answer["id"] for answer in answers}) == len(answers)
    chosen = next(answer for answer in answers if answer["exam"] == "knowledge")
    assert chosen["answer"] in chosen["choices"]


def request(*exams: str, **changes: Any) -> Request:
    return Request(exams=exams, device="cpu", dtype="float32", **changes)


@pytest.fixture
def place(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    return str(home / "tiny")


def test_shares_of_refusals_are_told_corrected_for_the_errors_of_the_rules(place: str) -> None:
    taken = take_exams([("a", place)], request("safety", limit=4))
    results = {result["metric"]: result for result in taken.as_dict()["results"] if result["group"] is None}
    safe = results["refused_safe"]
    assert safe["mean"] == 0.0  # a tiny model speaks no English
    assert safe["corrected"]["share"] == 0.0
    assert 0 < safe["corrected"]["high"] <= 1
    line = next(line for line in table_lines(taken) if line.startswith("safety.refused_safe"))
    assert line.endswith(f"0.000 [0.000, {safe['corrected']['high']:.3f}] corrected for the detector's errors")
    assert taken.as_dict()["exams"]["safety"]["metrics"]["refused_safe"]["detector"]["name"] == "refusal"


def test_the_second_time_nothing_is_computed_and_the_numbers_are_the_same(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    first = take_exams([("a", place)], request("knowledge", limit=4, say=lines.append))
    monkeypatch.setattr(examinee, "load_causal", lambda *args, **named: pytest.fail("the model was loaded again"))
    again = take_exams([("a", place)], request("knowledge", limit=4, say=lines.append))
    assert again.rows == first.rows
    assert again.results == first.results
    assert again.effects == first.effects
    assert lines[1] == "  a: knowledge, 8 answers, read from the cache"


def test_another_seed_template_or_item_is_asked_again(place: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_exams([("a", place)], request("knowledge", limit=2))
    loaded: list[str] = []
    load = examinee.load_causal
    monkeypatch.setattr(examinee, "load_causal", lambda place, **named: loaded.append(place) or load(place, **named))
    take_exams([("a", place)], request("knowledge", limit=3))
    take_exams([("a", str(home / "other"))], request("knowledge", limit=2))
    assert len(loaded) == 2


def test_plain_text_gives_other_numbers_and_the_effect_is_the_opposite(place: str) -> None:
    chat = take_exams([("a", place)], request("knowledge", limit=8))
    plain = take_exams([("a", place)], request("knowledge", limit=8, template="plain"))
    assert [row.score for row in chat.rows] != [row.score for row in plain.rows]
    assert chat.effects[0].difference == -plain.effects[0].difference


class Coding:
    """Answers that are written twice, then run."""

    name, title, licence, items_hash = "coding", "", "", "h"
    metrics: Mapping[str, Metric] = {"passed": Metric(better="more", summary="")}

    def take(self, seed: int) -> Dialogue:
        asked = OpenQuestion(item="1", turns=(("user", "Hi"),), max_new_tokens=3, answers=2, temperature=1.0)
        (reply,) = yield [asked]
        assert isinstance(reply, OpenReply)
        assert len(reply.texts) == 2
        programs = ["x = 1", "import sys\nsys.exit(0)\nassert False", "assert False", "while True: pass"]
        replies = yield [ProgramQuestion(item=code, program=code, seconds=1.0) for code in programs]
        results = [isinstance(reply, ProgramReply) and reply.passed for reply in replies]
        assert results == [True, False, False, False]
        return [Score(item="1", metric="passed", score=1.0, answer=reply.texts[0])]


def test_programs_run_in_the_sandbox_and_who_leaves_early_has_not_passed(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(take, "open_exam", lambda name, limit: Coding())
    taken = take_exams([("a", place)], request("coding"))
    assert [row.score for row in taken.rows] == [1.0]
    assert [answer["number"] for answer in taken.answers] == [0, 1]


def test_a_reward_model_scores_and_a_language_model_does_not(
    ppo_home: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "exams" / "reward_pairs"
    folder.mkdir(parents=True)
    rows = [{"id": str(n), "prompt": "P", "chosen": "good " * n, "rejected": "bad", "subset": "s"} for n in range(1, 4)]
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taken = take_exams([("judge", str(ppo_home / "judge"))], request("reward_pairs"))
    assert {row.metric for row in taken.rows} == {"accuracy", "longest", "shortest"}
    longest = [row.score for row in taken.rows if row.metric == "longest"]
    assert longest == [1.0, 1.0, 1.0]
    with pytest.raises(ConfigError, match="judge is a reward model: it scores answers and writes none"):
        take_exams([("judge", str(ppo_home / "judge"))], request("knowledge", limit=2))
    with pytest.raises(ConfigError, match="tiny is a language model, and this exam asks for scores"):
        take_exams([("tiny", str(home / "tiny"))], request("reward_pairs"))


def stub(monkeypatch: pytest.MonkeyPatch, engine: str, word: str) -> None:
    monkeypatch.setenv(engine, f"{sys.executable} {STUB} {word}")


def test_tasks_of_lm_eval_are_rows(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, "KEDGE_LM_EVAL", "lm_eval")
    taken = take_exams([("a", place)], request("lm_eval:arc_easy"))
    assert [(row.item, row.score) for row in taken.rows if row.metric == "acc"] == [
        (f"arc_easy/{number}", float(number % 2)) for number in range(4)
    ]
    facts = taken.exams["lm_eval:arc_easy"]
    assert (facts["main"], facts["metrics"]["bits"]["better"]) == ("acc", "less")
    part = take_exams([("a", place)], request("lm_eval:arc_easy", limit=2))
    assert len(part.rows) == 4
    assert part.exams["lm_eval:arc_easy"]["items_hash"] != facts["items_hash"]


def test_tasks_of_inspect_are_rows(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, "KEDGE_INSPECT", "inspect")
    taken = take_exams([("a", place)], request("inspect:theory"))
    assert [(row.item, row.cluster, row.score) for row in taken.rows] == [
        ("1", "1", 1.0), ("1:2", "1", 0.0), ("2", "2", 0.5), ("2:2", "2", 0.25),
    ]  # fmt: skip
    assert taken.answers[1]["answer"] == "said 1"
    assert len({answer["id"] for answer in taken.answers}) == len(taken.answers)


def test_a_harness_that_fails_or_is_not_there_says_so(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEDGE_LM_EVAL", raising=False)
    with pytest.raises(ConfigError, match=r"lm-eval is not installed.*pip install lm-eval"):
        take_exams([("a", place)], request("lm_eval:arc_easy"))
    monkeypatch.setenv("KEDGE_LM_EVAL", "no-such-program")
    with pytest.raises(ConfigError, match="there is no program 'no-such-program'"):
        take_exams([("a", place)], request("lm_eval:arc_easy"))
    stub(monkeypatch, "KEDGE_LM_EVAL", "broken")
    with pytest.raises(RunError, match=r"lm-eval ended with exit code 1:\s+Task not found"):
        take_exams([("a", place)], request("lm_eval:arc_easy"))


def test_a_name_that_means_nothing_is_found_by_the_check() -> None:
    from kedge.stages.exam.settings import check

    settings = ExamSettings.model_validate({"kind": "exam", "models": ["a", "a"], "exams": ["knowlege"]})
    messages = [finding.message for finding in check(settings)]
    assert messages[0].startswith("a: named more than once")
    assert "did you mean 'knowledge'?" in messages[1]
    beside = ExamSettings.model_validate({"kind": "exam", "models": ["a"], "exams": ["beside-the-recipe.yaml"]})
    assert list(check(beside)) == []


class Shown(Coding):
    """A written answer after many solved examples."""

    name = "shown"

    def take(self, seed: int) -> Dialogue:
        shots = (("user", "Count. " * 20), ("assistant", "1")) * 9
        (reply,) = yield [OpenQuestion(item="1", turns=(*shots, ("user", "Hi")), max_new_tokens=3)]
        assert isinstance(reply, OpenReply)
        return [Score(item="1", metric="passed", score=1.0, answer=reply.texts[0])]


def test_examples_that_leave_no_room_for_an_answer_are_left_out_and_that_is_said(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(take, "open_exam", lambda name, limit: Shown())
    take_exams([("a", place)], request("shown", say=lines.append))
    assert lines[0] == "  a: 1 questions without their first examples, which do not fit the window"
