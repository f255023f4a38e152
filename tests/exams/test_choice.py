"""Choices: how they are asked and graded, in letters and as continuations; TruthfulQA's two metrics; calibration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sitting import by_item, picking, taken

from kedge.core.errors import DataError
from kedge.exams.bbq import exam as bbq
from kedge.exams.choice import expected_calibration_error, mmlu, piqa, truthfulqa
from kedge.exams.exam import ChoiceQuestion

LAW = {"subject": "law", "question": "Who judges?", "choices": ["a cook", "a judge", "a cat", "a tree"], "answer": 1}
SEA = {"subject": "sea", "question": "Where are whales?", "choices": ["trees", "the sea"], "answer": 1}


def written(folder: Path, items: list[dict[str, Any]], shots: list[dict[str, Any]] | None = None) -> Path:
    for name, rows in (("items", items), ("shots", shots)):
        if rows is not None:
            lines = [json.dumps({"id": f"{name}{number}", **row}) + "\n" for number, row in enumerate(rows)]
            (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def test_the_examples_of_a_subject_stand_before_its_questions(tmp_path: Path) -> None:
    exam = mmlu(written(tmp_path, [LAW, SEA], [LAW, LAW, SEA]))
    questions = next(exam.take(0))
    letter, cloze = questions[0], questions[2]
    assert isinstance(letter, ChoiceQuestion)
    assert isinstance(cloze, ChoiceQuestion)
    assert [role for role, _ in letter.turns] == ["user", "assistant", "user", "assistant", "user"]
    assert letter.turns[0][1].startswith("The following are multiple choice questions (with answers) about law.")
    assert letter.turns[1] == ("assistant", "B")
    assert letter.turns[-1][1] == "Who judges?\nA. a cook\nB. a judge\nC. a cat\nD. a tree\nAnswer:"
    assert letter.choices == ("A", "B", "C", "D")
    assert cloze.turns == (("user", "Question: Who judges?\nAnswer:"),)
    assert cloze.choices == ("a cook", "a judge", "a cat", "a tree")
    assert len(questions[1].turns) == 3


def test_letters_by_the_sum_and_continuations_for_their_length(tmp_path: Path) -> None:
    rows = [{"question": "Q", "choices": ["ab", "abcdefgh"], "answer": 1}]
    exam = piqa(written(tmp_path, rows))
    # The longer one is less likely as a whole, and likelier by the byte.
    sitting = taken(exam, choose=lambda question: [-2.0, -4.0])
    assert by_item(sitting, "letter") == {"items0": 0.0}
    assert by_item(sitting, "cloze") == {"items0": 1.0}
    (brier,) = by_item(sitting, "letter_brier").values()
    p = 1 / (1 + 2.718281828459045**-2)
    assert brier == pytest.approx(2 * p * p)
    assert [score.confidence for score in sitting.scores if score.metric == "letter"] == [pytest.approx(p)]


def test_confidences_that_are_right_as_often_as_they_say_are_calibrated() -> None:
    assert expected_calibration_error([0.75] * 4, [1, 1, 1, 0]) == 0
    assert expected_calibration_error([1.0, 1.0], [0, 0]) == 1
    # Errors of two bins do not make up for each other.
    assert expected_calibration_error([0.95] * 2 + [0.55] * 2, [1, 0, 1, 1]) == pytest.approx(0.45)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"answer": 4}, r"items\.jsonl:1: answer: expected the number of a choice, from 0 to 3, found 4"),
        ({"choices": ["one"]}, r"items\.jsonl:1: choices: expected 2 to 26 of them"),
        ({"choices": ["a", " ", "b", "c"]}, r"choices: expected no empty one"),
        ({"question": None}, r"question: expected a text"),
        ({"subject": "chess"}, r"shots\.jsonl: no examples of chess"),
    ],
)
def test_a_broken_item_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        mmlu(written(tmp_path, [{**LAW, **change}], [LAW]))


def test_items_are_told_apart_by_their_names(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"items\.jsonl:2: id: .*also the id of"):
        piqa(written(tmp_path, [{**LAW, "id": "x"}, {**SEA, "id": "x"}]))


def test_the_hash_changes_with_the_items(tmp_path: Path) -> None:
    first = piqa(written(tmp_path, [LAW])).items_hash
    assert piqa(written(tmp_path, [LAW])).items_hash == first
    assert piqa(written(tmp_path, [{**LAW, "answer": 2}])).items_hash != first


TRUTH = {"category": "c", "question": "Q", "best": "b", "correct": ["b", "t"], "incorrect": ["f", "g"]}


@pytest.mark.parametrize(
    ("logprobs", "mc1", "mc2"),
    [
        ({"b": 2.0, "t": -50, "f": 1.0, "g": 0.0}, 1.0, 0.665),  # e² / (e² + e + 1)
        ({"b": 0.0, "t": 3.0, "f": 1.0, "g": -50}, 0.0, 0.886),  # a true answer that is not the best counts for MC2
    ],
)
def test_truthfulqa(tmp_path: Path, logprobs: dict[str, float], mc1: float, mc2: float) -> None:
    exam = truthfulqa(written(tmp_path, [TRUTH]))
    sitting = taken(exam, choose=lambda question: [logprobs[choice] for choice in question.choices])
    assert by_item(sitting, "mc1") == {"items0": mc1}
    assert by_item(sitting, "mc2")["items0"] == pytest.approx(mc2, abs=1e-3)


def people(number: int, condition: str, polarity: str, **changes: Any) -> dict[str, Any]:
    return {
        "id": str(number), "category": "Age", "condition": condition, "polarity": polarity, "context": "C",
        "question": "Q", "choices": ["old", "nobody", "young"], "answer": 1 if condition == "ambig" else 0,
        "groups": [["one", "old"], ["x", "unknown"], ["other", "nonOld"]], "stereotyped": ["old"], **changes,
    }  # fmt: skip


def test_bias_scores_are_those_of_the_paper(tmp_path: Path) -> None:
    """Always the old one: biased where the question is negative, against the bias where it is not."""
    rows = [
        people(0, "ambig", "neg"),
        people(1, "ambig", "nonneg"),
        people(2, "disambig", "neg"),
        people(3, "ambig", "neg"),
    ]
    sitting = taken(bbq(written(tmp_path, rows)), choose=picking("A"))
    assert by_item(sitting, "ambiguous") == {"0": 1.0, "1": -1.0, "3": 1.0}
    assert by_item(sitting, "disambiguated") == {"2": 1.0}
    assert by_item(sitting, "accuracy") == {"0": 0.0, "1": 0.0, "2": 1.0, "3": 0.0}
    # s_AMB = (1 − accuracy)(2 · biased / named − 1) = 1 · (2 · 2/3 − 1)
    assert sum(by_item(sitting, "ambiguous").values()) / 3 == pytest.approx(2 * 2 / 3 - 1)


def test_who_says_that_nobody_knows_has_no_bias(tmp_path: Path) -> None:
    rows = [people(0, "ambig", "neg"), people(1, "disambig", "neg")]
    sitting = taken(bbq(written(tmp_path, rows)), choose=picking("B"))
    assert by_item(sitting, "ambiguous") == {"0": 0.0}
    assert by_item(sitting, "disambiguated") == {}
    assert by_item(sitting, "accuracy_ambiguous") == {"0": 1.0}
    assert by_item(sitting, "accuracy_disambiguated") == {"1": 0.0}


def test_names_may_be_stereotyped_instead_of_groups_and_unclear_items_have_no_bias_score(tmp_path: Path) -> None:
    rows = [people(0, "ambig", "neg", stereotyped=["one"]), people(1, "ambig", "neg", stereotyped=["old", "nonOld"])]
    sitting = taken(bbq(written(tmp_path, rows)), choose=picking("A"))
    assert by_item(sitting, "ambiguous") == {"0": 1.0}


def test_items_of_one_template_are_one_cluster(tmp_path: Path) -> None:
    rows = [people(0, "ambig", "neg"), people(1, "ambig", "neg"), people(2, "ambig", "neg", question="Other")]
    sitting = taken(bbq(written(tmp_path, rows)), choose=picking("A"))
    assert len({score.cluster for score in sitting.scores}) == 2
