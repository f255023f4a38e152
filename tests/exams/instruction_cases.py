"""Answers that follow an instruction, and answers that just miss it: worked out by hand from the rule of each kind."""

from __future__ import annotations

from typing import Any, NamedTuple

from kedge.core.instructions.following import follows


class Case(NamedTuple):
    kind: str
    kwargs: dict[str, Any]
    answer: str
    followed: bool


FIRST_WORD = {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Boats"}
LETTER = {"letter": "e", "let_frequency": 3, "let_relation": "at least"}
SENTENCES = {"num_sentences": 3, "relation": "less than"}
CAPITALS = {"capital_frequency": 2, "capital_relation": "at least"}

CASES = [
    Case("keywords:existence", {"keywords": ["Night", "owl"]}, "owls fly at NIGHT", True),
    Case("keywords:existence", {"keywords": ["night", "owl"]}, "an owl by day", False),
    Case("keywords:existence", {"keywords": ["c++"]}, "I like C++.", True),
    Case("keywords:frequency", {"keyword": "step ", "frequency": 2, "relation": "at least"}, "Steps, one step", True),
    Case("keywords:frequency", {"keyword": "step", "frequency": 2, "relation": "less than"}, "Steps, one step", False),
    Case("keywords:forbidden_words", {"forbidden_words": ["cold"]}, "colder than before", True),
    Case("keywords:forbidden_words", {"forbidden_words": ["warm", "cold"]}, "It is COLD.", False),
    Case("keywords:letter_frequency", LETTER, "Every bee", True),
    Case("keywords:letter_frequency", LETTER, "Seven", False),
    Case(
        "keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "less than"}, "# # one", False
    ),
    Case("length_constraints:number_sentences", SENTENCES, "Dr. Smith came at 5 p.m. yesterday. He left!", True),
    Case("length_constraints:number_sentences", SENTENCES, "One. Two? Three", False),
    Case("length_constraints:number_sentences", SENTENCES, "1. Wash it.\n2. Dry it.", True),
    Case("length_constraints:number_sentences", SENTENCES, "Well... maybe. I said “No.” He left.", False),
    Case("length_constraints:number_sentences", SENTENCES, "See fig. 3 and J. R. Smith (e.g. page 4). Done.", True),
    Case("length_constraints:number_sentences", SENTENCES, "今日は。明日も。終わり。", False),
    Case("length_constraints:number_words", {"num_words": 4, "relation": "at least"}, "It's a dog", True),
    Case("length_constraints:number_words", {"num_words": 4, "relation": "less than"}, "a well-fed dog", False),
    Case("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo\n***", True),
    Case("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\n***\ntwo", False),
    Case("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n\ntwo", False),
    Case("length_constraints:nth_paragraph_first_word", FIRST_WORD, 'Sea.\n\n"Boats", they said.', True),
    Case("length_constraints:nth_paragraph_first_word", FIRST_WORD, "Sea.\n\nThe boats.", False),
    Case("length_constraints:nth_paragraph_first_word", FIRST_WORD, "Sea.\n\nBoats.\n\nMore.", False),
    Case("length_constraints:nth_paragraph_first_word", FIRST_WORD, "Sea.\n\n\n\nBoats.", False),
    Case("detectable_content:number_placeholders", {"num_placeholders": 2}, "Dear [name], at [place]", True),
    Case("detectable_content:number_placeholders", {"num_placeholders": 2}, "Dear [name\nor], at [place]", False),
    Case("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\np. s. Call me", True),
    Case("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP.S. Call me", False),
    Case("detectable_content:postscript", {"postscript_marker": "NB:"}, "Bye.\nnb: call me", True),
    Case("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two\n**bold**", True),
    Case("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n* two\n* three", False),
    Case("detectable_format:constrained_response", {}, "Well: My answer is maybe.", True),
    Case("detectable_format:constrained_response", {}, "my answer is yes", False),
    Case("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and *two*", True),
    Case("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and **  **", False),
    Case(
        "detectable_format:multiple_sections", {"section_spliter": "Day", "num_sections": 2}, "Day 1\nx\nDay2\ny", True
    ),
    Case("detectable_format:multiple_sections", {"section_spliter": "Day", "num_sections": 2}, "Day 1\nday 2", False),
    Case("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', True),
    Case("detectable_format:json_format", {}, 'Here: {"a": 1}', False),
    Case("detectable_format:title", {}, "<<A title>>\ntext", True),
    Case("detectable_format:title", {}, "<< >> <<a\nb>>", False),
    Case("combination:two_responses", {}, "one\n******\ntwo", True),
    Case("combination:two_responses", {}, "one\n******\none", False),
    Case("combination:two_responses", {}, "one\n******\ntwo\n******\nthree", False),
    Case("combination:repeat_prompt", {"prompt_to_repeat": "Why so?"}, " why so? Because.", True),
    Case("combination:repeat_prompt", {"prompt_to_repeat": "Why so?"}, "You ask: why so?", False),
    Case("combination:repeat_prompt", {}, "The prompt. Then more.", True),
    Case("startend:end_checker", {"end_phrase": "The end."}, 'So. the END."', True),
    Case("startend:end_checker", {"end_phrase": "The end."}, "The end. Bye.", False),
    Case("startend:quotation", {}, ' "yes"\n', True),
    Case("startend:quotation", {}, '"yes', False),
    Case("punctuation:no_comma", {}, "one and two", True),
    Case("punctuation:no_comma", {}, "one, two", False),
    Case("change_case:capital_word_frequency", CAPITALS, "I say NO to the", True),
    Case("change_case:capital_word_frequency", CAPITALS, "Say NO-NO, Nato.", False),
    Case("change_case:capital_word_frequency", CAPITALS, "The U.S. (OK?)", True),
    Case("punctuation:no_comma", {}, "  \n", False),
    Case("keywords:forbidden_words", {"forbidden_words": ["cold"]}, "", False),
]
LANGUAGES = [
    Case("language:response_language", {"language": "de"}, "Das ist ein kurzer Satz über den Regen im Herbst.", True),
    Case("language:response_language", {"language": "fr"}, "Das ist ein kurzer Satz über den Regen im Herbst.", False),
    Case("language:response_language", {"language": "fr"}, "12345", True),
    Case("change_case:english_lowercase", {}, "this is a short sentence about the rain in autumn", True),
    Case("change_case:english_lowercase", {}, "This is a short sentence about the rain in autumn", False),
    Case("change_case:english_lowercase", {}, "das ist ein kurzer satz über den regen im herbst", False),
    Case("change_case:english_capital", {}, "THIS IS A SHORT SENTENCE ABOUT THE RAIN IN AUTUMN", True),
    Case("change_case:english_capital", {}, "THIS IS a SHORT SENTENCE", False),
]


def attempt(case: Case) -> str | None:
    if follows(case.kind, case.kwargs, "The prompt.", case.answer) == case.followed:
        return None
    return f"{case.kind} {case.kwargs}: {case.answer!r} is said to be {'missed' if case.followed else 'followed'}"
