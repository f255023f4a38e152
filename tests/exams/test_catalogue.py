"""Which exams there are, those of one's own, and files that are brought in the layouts they are published in."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import own_exams
import pytest
from sitting import by_item, taken

from kedge.core.errors import ConfigError, DataError
from kedge.exams.catalogue import BUILT_IN, SETS, exams_home, expanded, listed, open_exam
from kedge.exams.items import read_rows
from kedge.exams.public.fetching import fetch_exam
from kedge.exams.public.layouts import PUBLIC


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("case", own_exams.CASES, ids=lambda case: case.name)
def test_an_own_exam_that_is_wrong_is_refused_with_its_place(case: own_exams.Case) -> None:
    assert own_exams.attempt(case) is None


def write(folder: Path, exam: str, rows: Iterable[Mapping[str, Any]]) -> str:
    (folder / "mine.yaml").write_text(exam)
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "mine.yaml")


def test_an_own_exam_of_answers(tmp_path: Path) -> None:
    rows = [
        {"question": "2 + 2?", "answer": 4, "check": "number", "kind": "sum"},
        {"question": "Say hello.", "answer": ["hello", "hi"], "kind": "word"},
        {"question": "Which?", "answer": "^[ab]$", "check": "regex", "kind": "word"},
    ]
    place = write(tmp_path, own_exams.SOUND + "groups: [kind]\nheader: Be short.\nmax_new_tokens: 9\n", rows)
    exam = open_exam(place)
    question = next(exam.take(0))[0]
    assert question.turns == (("user", "Be short.\n\n2 + 2?"),)
    said = {"2": "It is 4.", "S": "Well, Hi there", "W": "c"}
    sitting = taken(exam, write=lambda question: said[question.turns[0][1][11]])
    assert by_item(sitting, "correct") == {"1": 1.0, "2": 1.0, "3": 0.0}
    assert sitting.scores[0].groups == {"kind": "sum"}


def test_a_limit_takes_items_evenly_and_is_another_exam(tmp_path: Path) -> None:
    rows = [{"id": str(number), "question": f"{number}?", "answer": "x"} for number in range(10)]
    place = write(tmp_path, own_exams.SOUND, rows)
    part = open_exam(place, limit=3)
    assert [question.item for question in next(part.take(0))] == ["0", "3", "6"]
    assert part.items_hash != open_exam(place).items_hash
    assert len(next(open_exam("knowledge", limit=5).take(0))) == 10


def test_names_that_mean_nothing_are_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"there is no exam 'mmul' \(did you mean 'mmlu'\?\)"):
        open_exam("mmul")
    with pytest.raises(ConfigError, match=r"did you mean 'quick'\?"):
        expanded(["quik"])
    with pytest.raises(ConfigError, match="run: kedge exam get mmlu --from FOLDER"):
        open_exam("mmlu")
    with pytest.raises(ConfigError, match="no exam is named"):
        expanded([])


def test_sets_are_taken_apart_and_each_exam_is_taken_once() -> None:
    assert expanded(["knowledge", "quick", "lm_eval:arc_easy", "own.yaml"]) == [
        "knowledge",
        *(name for name in SETS["quick"] if name != "knowledge"),
        "lm_eval:arc_easy",
        "own.yaml",
    ]


def test_the_list_says_what_can_be_taken() -> None:
    by_name = {exam.name: exam for exam in listed()}
    assert set(by_name) == set(BUILT_IN)
    assert by_name["mmlu"].origin == "missing"
    assert (by_name["knowledge"].origin, by_name["knowledge"].items) == ("shipped", 48)


@pytest.mark.parametrize("name", ["knowledge", "common_sense"])
def test_letters_of_what_ships_tell_nothing(name: str) -> None:
    """Each place is right equally often, so that somebody with one letter is at chance."""
    exam = open_exam(name)
    for place in range(2):
        sitting = taken(exam, choose=lambda asked, place=place: [float(p == place) for p in range(len(asked.choices))])
        scores = by_item(sitting, "letter").values()
        assert sum(scores) / len(scores) == (0.25 if name == "knowledge" else 0.5)


CHOICES = ["w", "x", "y", "z"]
TABLES: dict[str, tuple[str, list[list[str]]]] = {
    "truthfulqa": (
        "TruthfulQA.csv",
        [
            ["Type", "Category", "Question", "Best Answer", "Correct Answers", "Incorrect Answers", "Source"],
            ["Adversarial", "Law", "Q, or not?", "B", "B; C", "D; E;", "s"],
        ],
    ),
    "xstest": ("xstest_v2_prompts.csv", [["id", "prompt", "type"], ["1", "kill a process", "homonyms"],
                                         ["2", "kill a man", "contrast_homonyms"]]),
    "harmbench": (
        "harmbench_behaviors_text_all.csv",
        [
            ["Behavior", "FunctionalCategory", "SemanticCategory", "Tags", "ContextString", "BehaviorID"],
            ["Do a bad thing", "standard", "illegal", "", "", "bad_thing"],
            ["Sing a song", "copyright", "copyright", "", "", "song"],
        ],
    ),
    "advbench": ("harmful_behaviors.csv", [["goal", "target"], ["Do a bad thing", "Sure, here"]]),
}  # fmt: skip
WANTED: dict[str, list[dict[str, Any]]] = {
    "truthfulqa": [
        {"id": "0", "type": "Adversarial", "category": "Law", "question": "Q, or not?", "best": "B",
         "correct": ["B", "C"], "incorrect": ["D", "E"]},
    ],
    "xstest": [
        {"id": "1", "prompt": "kill a process", "type": "homonyms", "label": "safe"},
        {"id": "2", "prompt": "kill a man", "type": "contrast_homonyms", "label": "unsafe"},
    ],
    "harmbench": [{"id": "bad_thing", "prompt": "Do a bad thing", "functional": "standard", "semantic": "illegal"}],
    "advbench": [{"id": "advbench_1", "prompt": "Do a bad thing"}],
}  # fmt: skip


def converted(name: str, source: Path) -> list[dict[str, Any]]:
    """The rows of the normal form, without opening the exam."""
    from kedge.exams.public import fetching

    match = fetching._match(name, PUBLIC[name], source)
    return [dict(row) for row in match.layout.convert(match.items)]


@pytest.mark.parametrize("name", TABLES)
def test_public_tables(tmp_path: Path, name: str) -> None:
    file, rows = TABLES[name]
    with (tmp_path / file).open("w", newline="") as out:
        csv.writer(out).writerows(rows)
    assert converted(name, tmp_path) == WANTED[name]


def test_mmlu_as_it_is_published(tmp_path: Path) -> None:
    for part, answer in (("test", "C"), ("dev", "A")):
        (tmp_path / part).mkdir()
        with (tmp_path / part / f"high_school_law_{part}.csv").open("w", newline="") as out:
            csv.writer(out).writerows([["Q, one", *CHOICES, answer]])
    fetched = fetch_exam("mmlu", tmp_path)
    assert (fetched.items, fetched.shots) == (1, 1)
    (row,) = read_rows(exams_home() / "mmlu" / "items.jsonl")
    assert row.fields == {
        "id": "high_school_law/test/1", "subject": "high_school_law", "question": "Q, one", "choices": CHOICES,
        "answer": 2,
    }  # fmt: skip
    assert open_exam("mmlu").items_hash == fetched.items_hash
    assert any("the public exam has 14,042 items" in line for line in fetched.lines())
    about = json.loads((exams_home() / "mmlu" / "about.json").read_text())
    assert (about["licence"], about["source"], about["hash"]) == ("MIT", "hendrycks/test", fetched.items_hash)


def test_piqa_and_bbq_as_they_are_published(tmp_path: Path) -> None:
    (tmp_path / "valid.jsonl").write_text('{"goal": "G", "sol1": "a", "sol2": "b"}\n')
    (tmp_path / "valid-labels.lst").write_text("1\n")
    assert converted("piqa", tmp_path) == [{"id": "0", "question": "G", "choices": ["a", "b"], "answer": 1}]
    row = {
        "example_id": 7, "question_polarity": "neg", "context_condition": "ambig", "category": "Age", "context": "C",
        "answer_info": {"ans0": ["x", "old"], "ans1": ["y", "unknown"], "ans2": ["z", "nonOld"]}, "question": "Q",
        "additional_metadata": {"stereotyped_groups": ["old"]}, "ans0": "X", "ans1": "Y", "ans2": "Z", "label": 1,
    }  # fmt: skip
    (tmp_path / "Age.jsonl").write_text(json.dumps(row) + "\n")
    fetched = fetch_exam("bbq", tmp_path)
    assert fetched.items == 1
    sitting = taken(open_exam("bbq"), choose=lambda question: [0.0, -1.0, -1.0])
    assert by_item(sitting, "ambiguous") == {"Age/7": 1.0}


def test_labels_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    (tmp_path / "valid.jsonl").write_text('{"goal": "G", "sol1": "a", "sol2": "b"}\n')
    (tmp_path / "valid-labels.lst").write_text("1\n0\n")
    with pytest.raises(DataError, match="2 labels for the 1 items"):
        fetch_exam("piqa", tmp_path)
    assert not (exams_home() / "piqa").exists()


def test_files_that_are_gzipped_and_a_file_that_is_named_itself(tmp_path: Path) -> None:
    rows = '{"id": "0", "question": "Q", "choices": ["a", "b"], "answer": 0}\n'
    file = tmp_path / "piqa-valid.jsonl.gz"
    file.write_bytes(gzip.compress(rows.encode()))
    assert fetch_exam("piqa", file).items == 1
    with pytest.raises(ConfigError, match="--force replaces it"):
        fetch_exam("piqa", file)
    assert fetch_exam("piqa", tmp_path, force=True).items == 1


def test_what_is_unclear_is_refused_with_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("hello")
    with pytest.raises(
        DataError, match=r"no files of piqa here. There are: readme\.txt\. Known layouts are:\s+piqa-valid"
    ):
        fetch_exam("piqa", tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "TruthfulQA.csv").write_text("")
    with pytest.raises(DataError, match="2 files could be the one wanted"):
        fetch_exam("truthfulqa", tmp_path)
    with pytest.raises(ConfigError, match="ships with Kedge"):
        fetch_exam("knowledge", tmp_path)
    with pytest.raises(ConfigError, match=r"did you mean 'piqa'\?"):
        fetch_exam("pica", tmp_path)
