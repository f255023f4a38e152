"""Every foreign layout on rows of our own in it: what it becomes, which judgement counts, what is refused by name."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from kedge.core.errors import DataError
from kedge.data.examples import Demonstration, Example, Pair, Prompt, Ranking, Thumb
from kedge.data.foreign.table import LAYOUTS
from kedge.data.reading import load, read

sys.path.insert(0, str(Path(__file__).parent))

from foreign_rows import CASES, GOOD_OVER_BAD, GPT, PKU, STEER, USER

Write = Any


def brief(example: Example) -> Any:
    """An example in as few words as tell it from its neighbours: the last question, then the answers."""
    match example:
        case Pair(prompt=prompt, chosen=chosen, rejected=rejected):
            return prompt[-1].content, chosen[-1].content, rejected[-1].content
        case Ranking(prompt=prompt, answers=answers, rank=rank):
            return prompt[-1].content, tuple(answer[-1].content for answer in answers), rank
        case Thumb(prompt=prompt, answer=answer, is_good=is_good):
            return prompt[-1].content, answer[-1].content, is_good
        case Demonstration(messages=messages):
            return tuple((message.role, message.content) for message in messages)
        case Prompt(prompt=prompt, answer=answer):
            return prompt[-1].content, answer


@pytest.mark.parametrize(("name", "kind", "rows", "expected"), CASES, ids=[case[0] for case in CASES])
def test_layout(name: str, kind: str, rows: list[Any], expected: list[Any], write_lines: Write) -> None:
    reading = read(write_lines("a.jsonl", rows))
    assert [brief(example) for example in reading] == expected
    assert (reading.format.name, reading.kind) == (name, kind)


def test_every_layout_is_tried_here_and_in_the_docs() -> None:
    names = {layout.name for layout in LAYOUTS}
    assert names == {case[0] for case in CASES}
    docs = (Path(__file__).parents[2] / "docs/data.md").read_text()
    assert [name for name in names if name not in docs] == []


def test_layout_of_gathered_rows_keeps_what_belongs_together(write_lines: Write) -> None:
    rows = [{"prompt": f"Q{number % 2}", "response": f"A{number}", **STEER} for number in range(4)]
    assert [brief(example) for example in load(write_lines("a.jsonl", rows))] == [
        ("Q0", ("A0", "A2"), (1, 1)),
        ("Q1", ("A1", "A3"), (1, 1)),
    ]


def test_steer_prompts_of_several_turns(write_lines: Write) -> None:
    prompt = "Hi\n<extra_id_1>Assistant\nHello\n<extra_id_1>User\nWhy?"
    row = {"prompt": prompt, "response_1": "good", "response_2": "bad", "preference_strength": -3}
    (pair,) = load(write_lines("a.jsonl", [row]))
    assert [message.role for message in pair.prompt] == ["user", "assistant", "user"]  # type: ignore[union-attr]
    assert brief(pair) == GOOD_OVER_BAD[0]


def test_two_preferences_must_be_decided_between(write_lines: Write) -> None:
    file = write_lines("a.jsonl", [{**PKU, "better_response_id": 0, "safer_response_id": 1}])
    with pytest.raises(
        DataError, match=r"columns: \{better: better_response_id\} or columns: \{better: safer_response_id\}"
    ):
        read(file)
    assert [brief(e) for e in read(file, columns={"better": "safer_response_id"})] == GOOD_OVER_BAD
    assert [brief(e) for e in read(file, columns={"better": "better_response_id"})] == [("Why?", "bad", "good")]
    assert [brief(e) for e in read(file, kind="prompts")] == [("Why?", None)]
    with pytest.raises(DataError, match=r"PKU-SafeRLHF has no 'prompt'.*; one of better_response_id, safer"):
        read(file, columns={"better": "prompt"})


@pytest.mark.parametrize("truth", [{"target": ["4", "four"]}, ["4", "four"], {"inputs": "1"}, True])
def test_verl_answer_that_is_not_one_is_named(truth: Any, write_lines: Write) -> None:
    file = write_lines("a.jsonl", [{"prompt": "2 + 2?", "reward_model": {"style": "rule", "ground_truth": truth}}])
    with pytest.raises(DataError, match=r"'reward_model\.ground_truth' is .*columns: \{ignore: \[reward_model\]\}"):
        load(file)
    assert [brief(e) for e in load(file, columns={"ignore": ["reward_model"]})] == [("2 + 2?", None)]


def test_another_rating_can_decide(write_lines: Write) -> None:
    rows = [
        {"prompt": "Why?", "response": "a", **STEER, "helpfulness": 4, "correctness": 0},
        {"prompt": "Why?", "response": "b", **STEER},
    ]
    file = write_lines("a.jsonl", rows)
    assert [brief(e) for e in read(file)] == [("Why?", ("a", "b"), (1, 2))]
    assert [brief(e) for e in read(file, columns={"score": "correctness"})] == [("Why?", ("a", "b"), (2, 1))]


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"info": {"post": "x"}, "summary": {"text": "y", "axes": {"overall": 3}}}, "summarize_from_feedback (axis)"),
        ({"question": {"problem": "x"}, "label": {"steps": []}}, "PRM800K"),
        ({"input": "Step 1: x ки", "label": "Step 1: x +", "task": "own"}, "Math-Shepherd"),
    ],
)
def test_layout_that_cannot_be_read_is_refused_by_name(row: dict[str, Any], name: str, write_lines: Write) -> None:
    with pytest.raises(DataError, match=re.escape(f"this is {name} data, which Kedge does not read: ")):
        read(write_lines("a.jsonl", [row]))


LABELS = [
    ("good", "bad"),
    ("yes", "no"),
    ("Positive", "negative"),
    ("👍", "👎"),
    ("👍🏽", "👎🏿"),
    ("chosen", "rejected"),
    ("up", "down"),
    ("thumbs up", "thumbs-down"),
    ("TRUE", "FALSE"),
    (True, False),
    (1, 0),
    (1, -1),
    ("1", "-1"),
    ("like", "dislike"),
]


@pytest.mark.parametrize(("good", "bad"), LABELS, ids=str)
@pytest.mark.parametrize("column", ["label", "kto_tag"])
def test_labels_make_thumbs(column: str, good: Any, bad: Any, write_lines: Write) -> None:
    rows = [{"prompt": "Why?", "response": "a", column: label} for label in (good, bad)]
    assert [brief(e) for e in load(write_lines("a.jsonl", rows))] == [("Why?", "a", True), ("Why?", "a", False)]


def test_numbers_on_a_scale_are_no_thumbs(write_lines: Write) -> None:
    rows = [{"prompt": "Why?", "response": "a", "rating": 1}]
    with pytest.raises(DataError, match=r"column 'rating' .* looks like a verdict"):
        read(write_lines("a.jsonl", rows))
    words = [{"prompt": "Why?", "response": "a", "rating": "bad"}]
    assert [brief(e) for e in load(write_lines("b.jsonl", words))] == [("Why?", "a", False)]


@pytest.mark.parametrize("own", [{"as_of": 4}, {"judges": ["small"]}], ids=["people", "judges"])
def test_the_number_of_labels_of_an_export_is_no_verdict(own: dict[str, Any], write_lines: Write) -> None:
    row = {"prompt": "Why?", "chosen": "So.", "rejected": "No.", "labels": 1}
    assert len(load(write_lines("a.jsonl", [row | own]))) == 1
    with pytest.raises(DataError, match=r"column 'labels' .* looks like a verdict"):
        read(write_lines("b.jsonl", [row]))


def test_three_verdicts_are_not_two(write_lines: Write) -> None:
    rows = [{"prompt": "Why?", "response": "a", "label": label} for label in (1, 0, -1)]
    with pytest.raises(DataError, match="'label' has -1 and 0 beside 1"):
        read(write_lines("a.jsonl", rows))


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"prompt": "Q", "response": "a", "score": 0.5}, "score"),
        ({"prompt": "Q", "response": "a", "label": "neutral"}, "label"),
        ({"prompt": "Q", "completion": "a", "response": "b"}, "response"),
        ({"prompt": "Q", "completion": "a", "is_correct": False}, "is_correct"),
        ({"messages": [USER, GPT], "reward": -3.0}, "reward"),
        ({"messages": [USER, GPT], "upvotes": 3}, "upvotes"),
        ({"instruction": "Q", "output": "a", "worse_output": "b"}, "worse_output"),
        ({"prompt": "Q", "response_1": "a", "response_2": "b"}, "response_1"),
        ({"prompt": "Q", "generations": ["a", "b"]}, "generations"),
        ({"prompt": "Q", "candidateA": "a"}, "candidateA"),
        ({"prompt": "Q", "chosen": "a", "rejected": "b", "winner": "b"}, "winner"),
        ({"text": "whole", "sentiment": "negative"}, "sentiment"),
        ({"prompt": "Q", "response": "a", "chosen": False}, "chosen"),
        ({"prompt": "Q", "response": "a", "ratings": {"helpful": 1}}, "ratings"),
        ({"problem": "Q", "generated_solution": "a"}, "generated_solution"),
    ],
)
def test_column_that_looks_like_a_verdict_or_an_answer_is_named(
    row: dict[str, Any], column: str, write_lines: Write
) -> None:
    file = write_lines("a.jsonl", [row])
    with pytest.raises(DataError, match=f"column '{column}' .*columns: {{ignore: \\[{column}\\]}}"):
        read(file)
    others = [name for name in row if name != column and name.startswith("response_")]
    assert load(file, columns={"ignore": [column, *others]})
    if "prompt" in row:
        assert [brief(e)[0] for e in load(file, kind="prompts")] == ["Q"]


def test_column_that_comes_late_breaks_its_row(write_lines: Write) -> None:
    rows = [{"prompt": "Q", "response": "a"}] * 150 + [{"prompt": "Q", "response": "a", "score": 1}]
    reading = read(write_lines("a.jsonl", rows))
    assert len(list(reading)) == 150
    assert "column 'score'" in reading.broken[0].reason


@pytest.mark.parametrize(
    "fields",
    [
        {"chosen_score": 3, "rejected_score": 1},
        {"score_chosen": 3.0, "score_rejected": 1.0},
        {"response": "good"},
        {"scores": [1.5, 0.5]},
        {"prompt_id": "x", "source": "y", "chosen_model": "m", "labelling_model": "gpt"},
    ],
)
def test_what_says_the_same_again_is_kept(fields: dict[str, Any], write_lines: Write) -> None:
    (pair,) = load(write_lines("a.jsonl", [{"prompt": "Why?", "chosen": "good", "rejected": "bad", **fields}]))
    assert brief(pair) == GOOD_OVER_BAD[0]
    assert dict(pair.extra) == fields


def test_history_and_system_prompt_are_context(write_lines: Write) -> None:
    row = {"instruction": "And?", "input": "", "output": "c", "system": "S", "history": [["Why?", "a"], ["How?", "b"]]}
    orca = {"system_prompt": "S", "question": "Why?", "response": "a"}
    alpaca, demo = load(write_lines("a.jsonl", [row])) + load(write_lines("b.jsonl", [orca]))
    turns = ("system", "S"), ("user", "Why?"), ("assistant", "a"), ("user", "How?"), ("assistant", "b")
    assert brief(alpaca) == (*turns, ("user", "And?"), ("assistant", "c"))
    assert brief(demo) == turns[:3]
    with pytest.raises(DataError, match="field 'history' is"):
        load(write_lines("c.jsonl", [{**row, "history": [["only a question"]]}]))


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        (
            "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|>\n",
            (("user", "Why?"), ("assistant", "So.")),
        ),
        ("### Human: Why?### Assistant: So.", (("user", "Why?"), ("assistant", "So."))),
        ("\n\nHuman: Why?\n\nAssistant: So.", (("user", "Why?"), ("assistant", "So."))),
        ("Once upon a time.", (("text", "Once upon a time."),)),
    ],
)
def test_text_is_a_conversation_where_it_was_one(text: str, turns: Any, write_lines: Write) -> None:
    assert [brief(e) for e in load(write_lines("a.jsonl", [{"text": text}]))] == [turns]
