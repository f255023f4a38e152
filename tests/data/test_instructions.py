"""Prompts with checkable instructions: what is asked can be done, kinds and subjects are kept apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from kedge.core.errors import ConfigError
from kedge.core.instructions.checkers import INSTRUCTIONS
from kedge.core.instructions.following import complaint_about, follows
from kedge.data.instructions.generate import generate
from kedge.data.instructions.requests import questions, requests
from kedge.data.instructions.wordings import COMMON, TRAINED, UNTRAINED, WORDINGS, WORDS

SENTENCE = "The sun rises over a quiet town and nobody hurries to go outside"


def follow(prompt: str, asked: Mapping[str, Mapping[str, Any]]) -> str:
    """An answer that follows instructions of the trained kinds, built by hand: so they can all be met at once."""
    words = asked.get("length_constraints:number_words", {})
    sentences = asked.get("length_constraints:number_sentences", {})
    count = sentences["num_sentences"] if sentences.get("relation") == "at least" else 1
    count = max(count, words["num_words"] // 12 + 1) if words.get("relation") == "at least" else count
    body = [f"{SENTENCE}." for _ in range(count)]
    extra = list(asked.get("keywords:existence", {}).get("keywords", []))
    if repeated := asked.get("keywords:frequency"):
        extra += [repeated["keyword"]] * repeated["frequency"]
    extra += ["[name]"] * asked.get("detectable_content:number_placeholders", {}).get("num_placeholders", 0)
    stars = asked.get("detectable_format:number_highlighted_sections", {}).get("num_highlights", 0)
    extra += ["*sun*"] * stars
    body[0] = f"So {' '.join(extra)} {body[0]}"
    text = " ".join(body)
    if paragraphs := asked.get("length_constraints:number_paragraphs"):
        text += "\n***\nmore of it." * (paragraphs["num_paragraphs"] - 1)
    if bullets := asked.get("detectable_format:number_bullet_lists"):
        text += "\n- sun" * bullets["num_bullets"]
    if "detectable_format:title" in asked:
        text = f"<<sun>>\n{text}"
    if postscript := asked.get("detectable_content:postscript"):
        text += f"\n{postscript['postscript_marker']} sun"
    if ending := asked.get("startend:end_checker"):
        text += f" {ending['end_phrase']}"
    text = f'"{text}"' if "startend:quotation" in asked else text
    text = text.lower() if "change_case:english_lowercase" in asked else text
    return text.upper() if "change_case:english_capital" in asked else text


def test_instructions_of_one_prompt_can_all_be_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The case kinds look at the language too, which is not what is asked here and takes long."""
    monkeypatch.setattr("kedge.core.instructions.checkers.language_of", lambda text: "en")
    for row in generate(1500, seed=3):
        asked = dict(zip(row["instruction_id_list"], row["kwargs"], strict=True))
        answer = follow(row["prompt"], asked)
        broken = [kind for kind, given in asked.items() if not follows(kind, given, row["prompt"], answer)]
        assert not broken, (row, answer)


def test_kinds_are_known_and_divided() -> None:
    assert set(TRAINED) | set(UNTRAINED) == set(INSTRUCTIONS)
    assert not set(TRAINED) & set(UNTRAINED)
    assert len(UNTRAINED) >= 8
    assert not set(WORDS) & set(COMMON)


@pytest.mark.parametrize("kinds", [TRAINED, UNTRAINED, WORDINGS], ids=["trained", "untrained", "all"])
def test_rows_are_sound_and_kinds_come_up_evenly(kinds: Mapping[str, Any]) -> None:
    rows = generate(400, seed=1, kinds=list(kinds))
    counts = Counter(kind for row in rows for kind in row["instruction_id_list"])
    assert set(counts) == set(kinds)
    assert min(counts.values()) >= 400 / len(kinds) / 2
    for row in rows:
        asked = list(zip(row["instruction_id_list"], row["kwargs"], strict=True))
        assert not [complaint for kind, given in asked if (complaint := complaint_about(kind, given))]
        assert len(set(row["instruction_id_list"])) == len(asked) <= 3
        assert row["request"] in row["prompt"]


def test_heldout_subjects_are_new() -> None:
    for make in (requests, questions):
        assert not {request.subject for request in make("train")} & {request.subject for request in make("heldout")}
    train, heldout = generate(300, seed=1), generate(300, seed=1, part="heldout")
    assert not {row["request"] for row in train} & {row["request"] for row in heldout}


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no_coma.*did you mean 'punctuation:no_comma'"):
        generate(5, seed=1, kinds=["punctuation:no_coma"])
    with pytest.raises(ConfigError, match="different prompts"):
        generate(500, seed=1, kinds=["detectable_format:constrained_response"])
