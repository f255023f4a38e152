"""Instructions by hand-checked cases, loose variants, and the exam from its file to its scores."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from instruction_cases import CASES, LANGUAGES, Case, attempt
from sitting import by_item, taken

from kedge.core.errors import ConfigError, DataError, PluginError
from kedge.core.instructions import languages
from kedge.core.instructions.checkers import INSTRUCTIONS
from kedge.core.instructions.following import follows, follows_loosely
from kedge.data.instructions.generate import generate
from kedge.exams import ifeval
from kedge.exams.catalogue import open_exam
from kedge.exams.exam import OpenQuestion, OpenReply, Score
from kedge.exams.ifeval import exam, instructions
from kedge.exams.written import WrittenExam


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{case.followed}")
def test_what_follows(case: Case) -> None:
    assert attempt(case) is None


@pytest.mark.parametrize("case", LANGUAGES, ids=lambda case: f"{case.kind}-{case.followed}")
def test_what_follows_in_a_language(case: Case) -> None:
    pytest.importorskip("langdetect")
    assert attempt(case) is None


def test_every_kind_has_a_case_that_follows_and_one_that_does_not() -> None:
    assert {(case.kind, case.followed) for case in CASES + LANGUAGES} == {
        (kind, followed) for kind in INSTRUCTIONS for followed in (True, False)
    }
    assert len(INSTRUCTIONS) == 25


def test_languages_are_told_the_same_way_every_time() -> None:
    pytest.importorskip("langdetect")
    mixed = "radio video"  # unseeded, this is Italian or Spanish from call to call
    assert len({languages.language_of(mixed) for _ in range(20)}) == 1


@pytest.mark.parametrize(
    ("answer", "strict", "loose"),
    [
        ('Sure!\n{"a": 1}', False, True),
        ('{"a": 1}\nI hope this helps.', False, True),
        ('Sure!\n{"a": 1}\nBye.', False, True),
        ('*{"a": 1}*', False, True),
        ('Sure!\nHere:\n{"a": 1}', False, False),
    ],
)
def test_loose_forgives_a_first_line_a_last_line_and_stars(answer: str, strict: bool, loose: bool) -> None:
    kind = "detectable_format:json_format"
    assert (follows(kind, {}, "", answer), follows_loosely(kind, {}, "", answer)) == (strict, loose)


SHIPPED = Path(ifeval.__file__).parent / "shipped"
ROW = {
    "key": 7,
    "prompt": "Two points, no comma.",
    "instruction_id_list": ["detectable_format:number_bullet_lists", "punctuation:no_comma"],
    "kwargs": [{"num_bullets": 2, "num_words": None}, {}],
}


def folder_with(folder: Path, **changes: object) -> Path:
    (folder / "items.jsonl").write_text(json.dumps({**ROW, **changes}) + "\n")
    return folder


def grades(taken: WrittenExam, answer: str) -> list[Score]:
    dialogue = taken.take(0)
    questions = next(dialogue)
    with pytest.raises(StopIteration) as end:
        dialogue.send([OpenReply(texts=(answer,), is_finished=(True,)) for _ in questions])
    return end.value.value


def test_a_prompt_counts_if_all_of_its_instructions_do(tmp_path: Path) -> None:
    scores = {
        (score.metric, score.item): score for score in grades(exam(folder_with(tmp_path)), "Sure, here:\n- a\n- b")
    }
    assert {place: score.score for place, score in scores.items()} == {
        ("prompt_strict", "7"): 0.0,
        ("prompt_loose", "7"): 1.0,
        ("instruction_strict", "7:0"): 1.0,
        ("instruction_strict", "7:1"): 0.0,
        ("instruction_loose", "7:0"): 1.0,
        ("instruction_loose", "7:1"): 1.0,
    }
    assert scores["instruction_strict", "7:1"].cluster == "7"
    assert scores["instruction_strict", "7:1"].groups == {"kind": "punctuation:no_comma"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"instruction_id_list": ["punctuation:no_coma"], "kwargs": [{}]},
            r"items\.jsonl:1: no instruction .*no_comma'\?",
        ),
        ({"kwargs": [{"num_bullets": 2}]}, r"items\.jsonl:1: kwargs: expected a list of 2 objects"),
        ({"kwargs": [{"num_bullets": "2"}, {}]}, r"num_bullets: expected a whole number, 0 or more, found '2'"),
        ({"kwargs": [{}, {}]}, r"num_bullets: expected a whole number, 0 or more, found None"),
        ({"kwargs": [{"num_bullets": 2, "bullets": 2}, {}]}, r"no argument 'bullets' \(did you mean 'num_bullets'\?\)"),
        ({"kwargs": [{"num_bullets": 2}, 3]}, r"expected an object with the arguments"),
    ],
)
def test_a_wrong_item_is_named_before_anything_is_asked(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        exam(folder_with(tmp_path, **changes))


def test_an_unknown_instruction_of_a_caller_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'startend:quotation'"):
        follows("startend:quotations", {}, "", "text")


def test_without_langdetect_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langdetect", None)
    assert exam(folder_with(tmp_path)).name == "ifeval"
    folder = folder_with(tmp_path, instruction_id_list=["change_case:english_capital"], kwargs=[{}])
    with pytest.raises(PluginError, match=r"needs 'langdetect': pip install 'kedge\[exams\]'"):
        exam(folder)


def test_the_set_that_ships_needs_no_package_and_covers_the_other_kinds() -> None:
    shipped = instructions(SHIPPED / "instructions")
    kinds = {score.groups["kind"] for score in grades(shipped, "text") if score.metric == "instruction_strict"}
    assert kinds == {kind for kind, instruction in INSTRUCTIONS.items() if not instruction.needs_language}
    assert len(shipped.questions) == 40


def test_an_exam_of_ones_own_may_ask_for_instructions(tmp_path: Path) -> None:
    """Rows as `kedge data instructions` writes them; the longest answer is what the YAML file says."""
    rows = generate(6, seed=1, kinds=["punctuation:no_comma"])
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = "kedge_exam: 1\nname: mine\nkind: instructions\nitems: mine.jsonl\nmax_new_tokens: 77\n"
    (tmp_path / "mine.yaml").write_text(head)
    exam = open_exam(str(tmp_path / "mine.yaml"), limit=4)
    asked: list[OpenQuestion] = []
    sitting = taken(exam, write=lambda question: asked.append(question) or "Without one.")
    assert [question.max_new_tokens for question in asked] == [77] * 4
    assert set(by_item(sitting, "prompt_strict").values()) == {1.0}
    assert by_item(taken(exam, write=lambda _: "With, one."), "instruction_loose").keys() == {
        f"{row['key']}:0" for row in (rows[0], rows[1], rows[3], rows[4])
    }
