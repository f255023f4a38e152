"""Prompts over the limit: refused by place, left out, or cut at their beginning."""

from __future__ import annotations

import pytest

from kedge.core.errors import DataError
from kedge.data.examples import Message, Origin, Prompt
from kedge.data.long_prompts import cut_prompt, fit_prompts
from kedge.data.template import encode_prompt
from kedge.models.loading.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def prompt(*turns: tuple[str, str], line: int = 1) -> Prompt:
    messages = tuple(Message(role, content) for role, content in turns)  # pyright: ignore[reportArgumentType]
    return Prompt(prompt=messages, origin=Origin("p.jsonl", line))


def size(given: Prompt) -> int:
    return len(encode_prompt(TOKENIZER, given.prompt))


SHORT = prompt(("user", "Hi"))
LONG = prompt(("user", "abcdefghij" * 5), line=2)


def test_refused_is_the_default_of_nobody_else() -> None:
    with pytest.raises(DataError, match=r"p\.jsonl: 1 of 2 prompts is longer than max_prompt_tokens 40; .*p\.jsonl:2"):
        fit_prompts(TOKENIZER, [SHORT, LONG], source="p.jsonl", max_tokens=40, too_long="refuse")
    whole = fit_prompts(TOKENIZER, [SHORT, LONG], source="p.jsonl", max_tokens=size(LONG), too_long="refuse")
    assert (whole.prompts, bool(whole.long)) == ([SHORT, LONG], False)


def test_dropping_leaves_the_others_and_never_none() -> None:
    fitted = fit_prompts(TOKENIZER, [LONG, SHORT], source="p.jsonl", max_tokens=40, too_long="drop")
    assert fitted.prompts == [SHORT]
    assert fitted.tokens == [encode_prompt(TOKENIZER, SHORT.prompt)]
    assert fitted.long.places == (("p.jsonl:2", size(LONG)),)
    with pytest.raises(DataError, match="too_long: drop leaves none"):
        fit_prompts(TOKENIZER, [LONG], source="p.jsonl", max_tokens=40, too_long="drop")


def test_cutting_keeps_the_end_of_a_text_and_fills_the_limit() -> None:
    fitted = fit_prompts(TOKENIZER, [SHORT, LONG], source="p.jsonl", max_tokens=40, too_long="cut")
    (first, cut), overhead = fitted.prompts, size(prompt(("user", "")))
    assert first == SHORT
    assert cut.prompt[0].content == ("abcdefghij" * 5)[-(40 - overhead) :]
    assert len(fitted.tokens[1]) == 40


def test_of_a_conversation_the_oldest_turns_go_first_and_the_system_message_stays() -> None:
    talk = prompt(("system", "Be kind."), ("user", "one"), ("assistant", "two"), ("user", "three"))
    without_oldest = prompt(("system", "Be kind."), ("user", "three"))
    assert cut_prompt(TOKENIZER, talk, max_tokens=size(talk) - 1) == without_oldest.prompt
    shorter = cut_prompt(TOKENIZER, talk, max_tokens=size(without_oldest) - 2)
    assert shorter == (Message("system", "Be kind."), Message("user", "ree"))


def test_no_half_character_is_left_at_the_cut() -> None:
    given = prompt(("user", "é" * 20))
    for limit in range(size(given) - 3, size(given)):
        (message,) = cut_prompt(TOKENIZER, given, max_tokens=limit)
        assert set(message.content) == {"é"}


def test_a_template_that_alone_is_too_long_cannot_be_cut() -> None:
    with pytest.raises(DataError, match=r"p\.jsonl:2: too_long: cut cannot make this prompt fit"):
        cut_prompt(TOKENIZER, LONG, max_tokens=5)
