"""What is read of preferences: strict pairs, thumbs, what is left out, and answers beside other prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kedge.core.errors import DataError
from kedge.data.batching import TokenSequence
from kedge.models.loading.tiny import tiny_tokenizer
from kedge.stages.preference.preferences import Preferences, mismatched, read_preferences
from kedge.stages.shared.held_out import hold_out

Read = Callable[..., Preferences]
TOKENIZER = tiny_tokenizer()
START, END = 257, 258


@pytest.fixture
def found(tmp_path: Path) -> Read:
    def read(rows: Sequence[Mapping[str, Any]], *, max_length: int = 200, wants_thumbs: bool = False) -> Preferences:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_preferences(str(file), TOKENIZER, max_length=max_length, wants_thumbs=wants_thumbs)

    return read


def text(one: TokenSequence) -> str:
    return str(TOKENIZER.decode(list(one.tokens)))


def counted(one: TokenSequence) -> str:
    return str(TOKENIZER.decode([token for token, on in zip(one.tokens, one.counted, strict=True) if on]))


def shown(prompt: str, answer: str) -> str:
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


PAIRS = [
    {"prompt": "Why?", "chosen": "So.", "rejected": "No idea."},
    {"prompt": "Who?", "chosen": "Me, I think.", "rejected": "You."},
    {"prompt": "why? ", "chosen": "Thus.", "rejected": "Go."},
]


def test_a_pair_is_two_conversations_of_which_the_answer_counts(found: Read) -> None:
    first = found(PAIRS).items[0]
    assert [text(one) for one in first.answers.sequences] == [shown("Why?", "So."), shown("Why?", "No idea.")]
    assert [counted(one) for one in first.answers.sequences] == ["So.<|im_end|>", "No idea.<|im_end|>"]
    assert first.answers.is_good == (True, False)
    assert first.answers.ref_logp == (0.0, 0.0)


def test_an_earlier_answer_in_the_prompt_is_context(found: Read) -> None:
    prompt = [
        {"role": "user", "content": "A?"},
        {"role": "assistant", "content": "B."},
        {"role": "user", "content": "C?"},
    ]
    (one,) = found([{"prompt": prompt, "chosen": "D.", "rejected": "E."}]).items
    assert [counted(side) for side in one.answers.sequences] == ["D.<|im_end|>", "E.<|im_end|>"]


def test_a_ranking_is_all_its_strict_pairs(found: Read) -> None:
    rows = [{"prompt": "Why?", "answers": ["a", "b", "c", "d"], "rank": [2, 1, 2, 3]}]
    sides = [tuple(counted(side)[0] for side in one.answers.sequences) for one in found(rows).items]
    assert sorted(sides) == [("a", "d"), ("b", "a"), ("b", "c"), ("b", "d"), ("c", "d")]


def test_a_pair_that_ties_prefers_nothing(found: Read) -> None:
    rows = [PAIRS[0] | {"certainty": 0.5}, *PAIRS[1:]]
    assert len(found(rows).items) == len(PAIRS) - 1
    assert len(found(rows, wants_thumbs=True).items) == 2 * (len(PAIRS) - 1)


def test_thumbs_are_single_answers_and_pairs_are_two_of_them(found: Read) -> None:
    rows = [
        {"prompt": "Why?", "completion": "So.", "label": True},
        {"prompt": "Who?", "completion": "X", "label": False},
    ]
    single = found(rows, wants_thumbs=True).items
    assert [(counted(one.answers.sequences[0]), one.answers.is_good) for one in single] == [
        ("So.<|im_end|>", (True,)),
        ("X<|im_end|>", (False,)),
    ]
    of_pairs = found(PAIRS[:1], wants_thumbs=True).items
    assert [(counted(one.answers.sequences[0]), one.answers.is_good) for one in of_pairs] == [
        ("So.<|im_end|>", (True,)),
        ("No idea.<|im_end|>", (False,)),
    ]


def test_what_is_too_long_or_prefers_nothing_is_left_out_and_counted(found: Read) -> None:
    rows = [
        *PAIRS,
        {"prompt": "W", "chosen": "x", "rejected": "x"},
        {"prompt": "W", "chosen": "x" * 90, "rejected": "y"},
    ]
    longest = len(shown("Who?", "Me, I think.").replace("<|im_start|>", "S").replace("<|im_end|>", "E"))
    kept = found(rows, max_length=longest)
    assert (len(kept.items), kept.num_identical, kept.num_too_long) == (3, 1, 1)
    assert found(rows, max_length=longest - 1).num_too_long == 2
    with pytest.raises(DataError, match=r"nothing to learn from: 5 preferences are longer than 9 tokens .* and 0 are"):
        found(rows, max_length=9)


def test_the_wrong_kind_of_data_is_refused_with_what_to_do(found: Read) -> None:
    with pytest.raises(DataError, match=r"holds no pairs or rankings.*method kto learns from thumbs"):
        found([{"prompt": "Why?", "completion": "So.", "label": True}])
    with pytest.raises(DataError, match="kto learns from nothing else; of rankings make pairs first: kedge data conv"):
        found([{"prompt": "Why?", "answers": ["a", "b", "c"], "rank": [1, 2, 3]}], wants_thumbs=True)


def test_held_out_prompts_are_not_trained_on(found: Read) -> None:
    rows = [{"prompt": f"Number {n // 2}?", "chosen": f"yes {n}", "rejected": "no"} for n in range(40)]
    train, held_out = hold_out(found(rows).items, share=0.25, seed=1)
    keys = [{item.prompt_key for item in part} for part in (train, held_out)]
    assert (len(train), len(held_out)) == (30, 10)
    assert keys[0] & keys[1] == set()
    with pytest.raises(DataError, match="nothing to split: 1 distinct prompt"):
        hold_out(found(PAIRS[:1]).items, share=0.1, seed=1)


def test_a_mismatched_answer_belongs_to_the_next_other_prompt(found: Read) -> None:
    items = found([*PAIRS[:1], PAIRS[2], PAIRS[1]], wants_thumbs=True).items  # why, why (spelt otherwise), who
    made = [one.sequences[0] for one in mismatched(items, max_length=200)]
    assert [text(one) for one in made] == [
        shown("Why?", "Me, I think."),
        shown("Why?", "Me, I think."),
        shown("why? ", "Me, I think."),
        shown("why? ", "Me, I think."),
        shown("Who?", "So."),
        shown("Who?", "So."),
    ]
    assert counted(made[0]) == "Me, I think.<|im_end|>"
    cut = mismatched(items, max_length=len(made[4].tokens))[0].sequences[0]
    assert text(cut) == shown("Why?", "Me, I")[: -len("<|im_end|>\n")]  # as long as "So." with its end and new line
    assert len(cut.counted) == len(cut.tokens) == len(made[4].tokens)
    with pytest.raises(DataError, match="all of these have the same prompt"):
        mismatched(found(PAIRS[:1], wants_thumbs=True).items, max_length=200)
