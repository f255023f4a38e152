"""`too_long` for conversations, pairs and comparisons: left out and counted, cut from the beginning, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kedge.core.errors import DataError
from kedge.models.loading.tiny import tiny_tokenizer
from kedge.stages.preference.preferences import read_preferences
from kedge.stages.reward.comparisons import read_comparisons
from kedge.stages.shared.encoding import Encoder, encode_demonstrations

TOKENIZER = tiny_tokenizer()
LIMIT = 90
TURNS = [
    {"role": "system", "content": "Kind."},
    {"role": "user", "content": "a" * 60},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "cd"},
    {"role": "assistant", "content": "ef"},
]
SHORT = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
Save = Callable[..., str]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def save(*rows: Mapping[str, Any]) -> str:
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / "data.jsonl")

    return save


def text(tokens: Any) -> str:
    """One token is one byte here; control tokens are left out."""
    return bytes(token for token in tokens if token < 128).decode()


def test_a_long_conversation_loses_its_oldest_turns_and_keeps_its_system_message(save: Save) -> None:
    file = save({"messages": TURNS}, {"messages": SHORT})
    whole = encode_demonstrations(file, TOKENIZER, max_length=500)
    dropped = encode_demonstrations(file, TOKENIZER, max_length=LIMIT)
    assert (len(whole.sequences), len(dropped.sequences), dropped.num_too_long, dropped.num_cut) == (2, 1, 1, 0)
    cut = encode_demonstrations(file, TOKENIZER, max_length=LIMIT, too_long="cut", samples=1)
    assert (len(cut.sequences), cut.num_too_long, cut.num_cut) == (2, 0, 1)
    assert len(cut.sequences[0].tokens) <= LIMIT
    found = text(cut.sequences[0].tokens)
    assert "Kind." in found
    assert "cd" in found
    assert "ef" in found
    assert "aaa" not in found
    assert sum(cut.sequences[0].counted) < sum(whole.sequences[0].counted)  # the answer `b` went with its turn
    assert len(cut.prompts[0]) < len(whole.sequences[0].tokens)


def test_one_long_message_loses_its_beginning_and_a_long_answer_is_left_out(save: Save) -> None:
    file = save({"prompt": "a" * 80 + "z", "completion": "ef"}, {"prompt": "x", "completion": "y" * 200})
    cut = encode_demonstrations(file, TOKENIZER, max_length=LIMIT, too_long="cut")
    assert (len(cut.sequences), cut.num_too_long, cut.num_cut) == (1, 1, 1)
    assert "az" in text(cut.sequences[0].tokens)
    assert 70 < len(cut.sequences[0].tokens) <= LIMIT


def test_plain_text_loses_its_beginning(save: Save) -> None:
    cut = encode_demonstrations(save({"text": "a" * 200 + "z"}), TOKENIZER, max_length=50, too_long="cut")
    (sequence,) = cut.sequences
    assert len(sequence.tokens) == len(sequence.counted) == 50
    assert "az" in text(sequence.tokens)


def test_refused_conversations_are_named_with_what_to_do(save: Save) -> None:
    file = save({"messages": SHORT}, {"messages": TURNS})
    with pytest.raises(DataError, match=r"1 of 2 conversations is longer than max_length 90; .*data\.jsonl:2.*or cut"):
        encode_demonstrations(file, TOKENIZER, max_length=LIMIT, too_long="refuse")


def test_the_prompt_of_a_pair_is_cut_alike_for_both_answers(save: Save) -> None:
    file = save({"prompt": "a" * 100 + "z", "chosen": "yes", "rejected": "no, " * 5})
    (item,) = read_preferences(file, TOKENIZER, max_length=LIMIT, wants_thumbs=False, too_long="cut").items
    chosen, rejected = (text(sequence.tokens) for sequence in item.answers.sequences)
    assert chosen.replace("yes", "") == rejected.replace("no, " * 5, "")
    assert max(len(sequence.tokens) for sequence in item.answers.sequences) <= LIMIT
    assert item.prompt[-1].content.endswith("az")
    with pytest.raises(DataError, match="1 of 1 preference is longer than max_length 90"):
        read_preferences(file, TOKENIZER, max_length=LIMIT, wants_thumbs=False, too_long="refuse")


def test_comparisons_are_cut_left_out_or_refused(save: Save) -> None:
    rows = [{"prompt": "p" * size, "chosen": "yes", "rejected": "no"} for size in (5, 100)]
    file, encoder = save(*rows), Encoder(tokenizer=TOKENIZER, max_length=LIMIT, truncate="left")
    counts: list[int] = []
    cut = read_comparisons([file], encoder, use_margin=False, report=counts.append)
    dropped = read_comparisons([file], encoder, use_margin=False, too_long="drop", report=counts.append)
    assert (len(cut), len(dropped), counts) == (2, 1, [1, 1])
    assert max(len(answer) for item in cut for answer in item.ranked.answers) == LIMIT
    with pytest.raises(DataError, match=r"1 of 2 comparisons is longer than max_length 90; .*data\.jsonl:2"):
        read_comparisons([file], encoder, use_margin=False, too_long="refuse")
    with pytest.raises(DataError, match="all 1 comparisons are longer than 90 tokens"):
        read_comparisons([save(rows[1])], encoder, use_margin=False, too_long="drop")
