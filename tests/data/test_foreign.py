"""Every foreign layout on rows of our own in it: what it becomes, which judgement counts, what is refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kedge.core.errors import DataError
from kedge.data.examples import Demonstration, Example, Pair, Prompt, Ranking, Thumb
from kedge.data.foreign.table import LAYOUTS
from kedge.data.reading import load, read

Write = Any
USER, GPT = {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}


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


GOOD_OVER_BAD = [("Why?", "good", "bad")]
STEER = {"helpfulness": 3, "correctness": 1, "coherence": 4, "complexity": 1, "verbosity": 2}
PKU = {"prompt": "Why?", "response_0": "bad", "response_1": "good"}
TREE = {
    "message_id": "1",
    "text": "Why?",
    "role": "prompter",
    "replies": [
        {"message_id": "2", "text": "bad", "role": "assistant", "rank": 1, "replies": []},
        {
            "message_id": "3",
            "text": "good",
            "role": "assistant",
            "rank": 0,
            "replies": [{"message_id": "4", "text": "And?", "role": "prompter", "replies": []}],
        },
    ],
}


def flat(node: Mapping[str, Any], parent: str | None = None) -> list[dict[str, Any]]:
    own = {key: value for key, value in node.items() if key != "replies"}
    row = {**own, "parent_id": parent, "message_tree_id": "1"}
    return [row, *(child for reply in node["replies"] for child in flat(reply, node["message_id"]))]


CASES: list[tuple[str, str, list[dict[str, Any]], list[Any]]] = [
    ("PKU-SafeRLHF", "pairs", [{**PKU, "better_response_id": 1, "safer_response_id": 1}], GOOD_OVER_BAD),
    (
        "HelpSteer3 (preference)",
        "pairs",
        [
            {
                "domain": "stem",
                "context": [{"role": "user", "content": "Why?"}],
                "response1": "bad",
                "response2": "good",
                "overall_preference": 2,
            }
        ],
        GOOD_OVER_BAD,
    ),
    (
        "HelpSteer2 (preference)",
        "pairs",
        [{"prompt": "Why?", "response_1": "good", "response_2": "bad", "preference_strength": -1, "split": "train"}],
        GOOD_OVER_BAD,
    ),
    (
        "HelpSteer",
        "rankings",
        [
            {"prompt": "Why?", "response": "bad", **STEER},
            {"prompt": "Alone?", "response": "x", **STEER},
            {"prompt": "Why?", "response": "good", **STEER, "helpfulness": 4},
        ],
        [("Why?", ("bad", "good"), (2, 1))],
    ),
    (
        "SHP",
        "pairs",
        [{"history": "Why?", "human_ref_A": "bad", "human_ref_B": "good", "labels": 0, "score_A": 3, "score_B": 9}],
        GOOD_OVER_BAD,
    ),
    (
        "question with response_j and response_k",
        "pairs",
        [{"qid": 1, "question": "Why?", "response_j": "good", "response_k": "bad"}],
        GOOD_OVER_BAD,
    ),
    (
        "arena conversations",
        "pairs",
        [
            {
                "model_a": "x",
                "model_b": "y",
                "winner": winner,
                "conversation_a": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "bad"}],
                "conversation_b": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "good"}],
            }
            for winner in ("model_b", "tie", "tie (bothbad)")
        ],
        GOOD_OVER_BAD,
    ),
    (
        "arena answers",
        "pairs",
        [
            {
                "prompt": '["Why?"]',
                "response_a": '["good"]',
                "response_b": '["bad"]',
                "winner_model_a": 1,
                "winner_model_b": 0,
                "winner_tie": 0,
            }
        ],
        GOOD_OVER_BAD,
    ),
    (
        "AlpacaFarm",
        "pairs",
        [{"instruction": "Why?", "input": "", "output_1": "bad", "output_2": "good", "preference": 2}],
        GOOD_OVER_BAD,
    ),
    (
        "summarize_from_feedback (comparisons)",
        "pairs",
        [
            {
                "info": {"subreddit": "kedges", "title": "Anchors", "post": "A long post."},
                "summaries": [{"text": " bad"}, {"text": " good"}],
                "choice": 1,
            }
        ],
        [("SUBREDDIT: r/kedges\n\nTITLE: Anchors\n\nPOST: A long post.\n\nTL;DR:", "good", "bad")],
    ),
    (
        "WebGPT comparisons",
        "pairs",
        [
            {
                "question": {"id": "1", "full_text": "Why?"},
                "answer_0": "bad",
                "answer_1": "good",
                "score_0": -0.5,
                "score_1": 0.5,
            },
            {"question": {"full_text": "Tie?"}, "answer_0": "x", "answer_1": "y", "score_0": 0, "score_1": 0},
        ],
        GOOD_OVER_BAD,
    ),
    (
        "OpenAI preference",
        "pairs",
        [
            {
                "input": {"messages": [{"role": "user", "content": "Why?"}], "tools": [], "parallel_tool_calls": True},
                "preferred_output": [{"role": "assistant", "content": "good"}],
                "non_preferred_output": [{"role": "assistant", "content": "bad"}],
            }
        ],
        GOOD_OVER_BAD,
    ),
    (
        "LLaMA-Factory ShareGPT pairs",
        "pairs",
        [
            {
                "conversations": [USER],
                "chosen": {"from": "gpt", "value": "good"},
                "rejected": {"from": "gpt", "value": "bad"},
            }
        ],
        GOOD_OVER_BAD,
    ),
    (
        "ms-swift pairs",
        "pairs",
        [
            {
                "messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "good"}],
                "rejected_response": "bad",
            }
        ],
        GOOD_OVER_BAD,
    ),
    (
        "Alpaca pairs (output: [better, worse])",
        "pairs",
        [{"instruction": "Why?", "input": "", "output": ["good", "bad"]}],
        GOOD_OVER_BAD,
    ),
    (
        "TRL pairs with the prompt in both texts",
        "pairs",
        [{"chosen": "The sea is blue.", "rejected": "The sea is beige."}],
        [("The sea is", "blue.", "beige.")],
    ),
    (
        "UltraFeedback",
        "rankings",
        [
            {
                "source": "own",
                "instruction": "Why?",
                "models": ["a", "b"],
                "completions": [
                    {"model": "a", "response": "bad", "overall_score": 9, "fine-grained_score": 2.5},
                    {"model": "b", "response": "good", "overall_score": 7, "fine-grained_score": 4.0},
                ],
            }
        ],
        [("Why?", ("bad", "good"), (2, 1))],
    ),
    (
        "Nectar",
        "rankings",
        [
            {
                "prompt": "\n\nHuman: Why?\n\nAssistant: ",
                "answers": [
                    {"answer": "good", "model": "a", "rank": 1.0},
                    {"answer": "bad", "model": "b", "rank": 2.0},
                ],
                "turns": 1,
            }
        ],
        [("Why?", ("good", "bad"), (1, 2))],
    ),
    (
        "BeaverTails",
        "thumbs",
        [
            {"prompt": "Why?", "response": "bad", "category": {"harm": True}, "is_safe": False},
            {"prompt": "Why?", "response": "good", "category": {"harm": False}, "is_safe": True},
        ],
        [("Why?", "bad", False), ("Why?", "good", True)],
    ),
    (
        "stepwise supervision",
        "thumbs",
        [
            {"prompt": "Why?", "completions": ["one", "two"], "labels": [True, True]},
            {"prompt": "Why?", "completions": ["one", "oops"], "labels": [True, False]},
        ],
        [("Why?", "one\ntwo", True), ("Why?", "one\noops", False)],
    ),
    (
        "OASST trees",
        "rankings",
        [{"message_tree_id": "1", "tree_state": "ready_for_export", "prompt": TREE}],
        [("Why?", ("bad", "good"), (2, 1))],
    ),
    ("OASST messages", "rankings", flat(TREE), [("Why?", ("bad", "good"), (2, 1))]),
    (
        "verl",
        "prompts",
        [
            {
                "data_source": "own",
                "prompt": [{"role": "user", "content": "2 + 2?"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "4"},
                "extra_info": {"index": 0},
            }
        ],
        [("2 + 2?", "4")],
    ),
]


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
