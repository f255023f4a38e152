"""The reward `instructions`: shares, strict and loose, and a guard that answers which say nothing do not pass."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from kedge.core.answers import Answer
from kedge.core.errors import ConfigError
from kedge.rewards.context import RewardContext
from kedge.rewards.settings import InstructionsSource
from kedge.rewards.verifiable import make_instructions

RECORD = {
    "instruction_id_list": ["punctuation:no_comma", "detectable_format:number_bullet_lists"],
    "kwargs": [{}, {"num_bullets": 2}],
    "request": "How do I get red wine out of a carpet?",
}
GOOD = "Blot the wine first and then do this:\n- pour cold water on it\n- rub salt into the carpet"
DEGENERATE = {
    "empty": "",
    "short": "- wine\n- carpet",
    "loop": "- wine carpet salt water\n- " + "wine carpet salt water " * 12,
    "beside the point": "It is always a pleasure to be of help to you:\n- enjoy your day\n- be happy",
}


def score(text: str, record: dict[str, Any], **options: Any) -> float:
    settings = InstructionsSource(kind="instructions", **options)
    source = make_instructions(settings, RewardContext(folder=Path(), seed=1))
    answer = Answer(prompt=(("user", "?"),), text=text, is_finished=True, extra=record)
    return source.score([answer])[0]


def test_it_is_the_share_of_instructions_or_all_of_them() -> None:
    half = GOOD.replace("first and", "first, and")
    assert [score(text, RECORD) for text in (GOOD, half)] == [1.0, 0.5]
    assert [score(text, RECORD, give="all") for text in (GOOD, half)] == [1.0, 0.0]


def test_loose_forgives_a_greeting() -> None:
    greeted = f"Sure, of course!\n{GOOD}"
    assert [score(greeted, RECORD), score(greeted, RECORD, loose=True)] == [0.5, 1.0]


@pytest.mark.parametrize("name", DEGENERATE)
def test_an_answer_that_says_nothing_scores_nothing(name: str) -> None:
    off: dict[str, Any] = {"min_words": 0, "max_repetition": 1.0, "relevant": False}
    text = DEGENERATE[name]
    assert score(text, RECORD) == 0.0
    assert score(text, RECORD, **off) == (1.0 if text else 0.0)


def test_an_answer_in_another_language_need_not_have_the_words_of_the_request() -> None:
    record = {
        "instruction_id_list": ["language:response_language"],
        "kwargs": [{"language": "de"}],
        "request": RECORD["request"],
    }
    assert score("Nehmen Sie kaltes Wasser und etwas Salz und tupfen Sie den Fleck vorsichtig ab.", record) == 1.0


@pytest.mark.parametrize(
    "record",
    [{}, {"instruction_id_list": ["no:such"]}, {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [5]}],
)
def test_a_record_that_cannot_be_checked_has_no_score(record: dict[str, Any]) -> None:
    assert math.isnan(score(GOOD, record))


def test_prompts_without_instructions_are_refused_before_anything_is_sampled() -> None:
    context = RewardContext(folder=Path(), seed=1, fields=frozenset({"instruction_ids"}))
    with pytest.raises(ConfigError, match="kedge data instructions"):
        make_instructions(InstructionsSource(kind="instructions"), context)
