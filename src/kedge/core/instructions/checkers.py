"""Instructions whose following can be checked without a judge: the 25 kinds of IFEval (Zhou et al. 2023).

A kind has a name as in IFEval's files, the arguments that its items must give, and a rule. The rules decide as Google's
code does, which `benchmarks/ifeval_against_google.py` measures, but for three points, where that code depends on data
that must be downloaded or on chance:

- sentences are counted by the rule of `count_sentences`, not by nltk's trained splitter
- words in capitals are those of `capital_words`, not of nltk's tokenizer
- `letter_frequency` of a sign that is no letter counts that sign; Google's code draws a letter at random

Keywords are taken as they are written, never as patterns. An empty answer follows nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from kedge.core.instructions.languages import language_of

Arguments = Mapping[str, Any]
ArgumentKind = Literal["count", "text", "texts", "relation"]

RELATIONS: Final = ("at least", "less than")
OPTIONS: Final = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""What a constrained response may say."""
_FENCES: Final = ("```json", "```Json", "```JSON", "```")
_BEFORE_NAMES: Final = "mr mrs ms dr prof st mt gov sen rep rev hon sgt capt lt vs e.g i.e cf"
_BEFORE_NUMBERS: Final = "no nos fig vol pp approx est ca ch sec jan feb mar apr jun jul aug sep sept oct nov dec"
_CLOSING: Final = "\"'”’»)]*_"
_SENTENCE_END: Final = re.compile(rf"[.!?…]+[{re.escape(_CLOSING)}]*(?=\s|$)|[。！？]+")
_WORD_OF_CAPITALS: Final = re.compile(r"[^\W_](?:[\w'’./&-]*[^\W_])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One kind: what its items must say, and whether an answer follows (arguments, prompt, answer)."""

    follows: Callable[[Arguments, str, str], bool]
    arguments: Mapping[str, ArgumentKind] = field(default_factory=dict[str, ArgumentKind])
    optional: Mapping[str, ArgumentKind] = field(default_factory=dict[str, ArgumentKind])
    needs_language: bool = False
    """Whether the language of the answer is detected, which needs the package langdetect."""


def count_sentences(text: str) -> int:
    """How many sentences a text has.

    A sentence ends with a run of . ! ? … and closing quotes or brackets, before white space or at the end of the text.
    Full stops do not end one before a small letter, nor after a title ("Dr."), an initial, the number of a list item,
    or a word like "fig." before a number. Line breaks count as spaces, and words after the last end are one more
    sentence.

    >>> count_sentences("Dr. Smith came at 5 p.m. on Monday. He left!  Why?")
    3
    >>> count_sentences("1. Wash it.\\n2. Dry it.\\nThat is all")
    3
    """
    count, start = 0, 0
    for end in _SENTENCE_END.finditer(text):
        if _ends_sentence(text, start, end):
            count += any(map(str.isalnum, text[start : end.start()]))
            start = end.end()
    return count + any(map(str.isalnum, text[start:]))


def _ends_sentence(text: str, start: int, end: re.Match[str]) -> bool:
    stops = end[0].rstrip(_CLOSING)
    if set(stops) - {".", "…"}:
        return True
    rest = text[end.end() :].lstrip()
    if rest[:1].islower():
        return False
    words = text[start : end.start()].split()
    if not rest or not words or stops != ".":
        return True
    last = words[-1].lstrip("\"'“‘«([*_").lower()
    is_list_number = len(words) == 1 and last.isdigit()
    is_initial = len(last) == 1 and last.isalpha() and last != "i"
    is_before_number = last in _BEFORE_NUMBERS.split() and rest[0].isdigit()
    return not (is_list_number or is_initial or is_before_number or last in _BEFORE_NAMES.split())


def capital_words(text: str) -> list[str]:
    """The words without a small letter, "I" and "U.S." among them; hyphens, apostrophes and slashes join a word.

    >>> capital_words("NASA and the U.S. said: I AM NOT-SURE 42 (OK?)")
    ['NASA', 'U.S', 'I', 'AM', 'NOT-SURE', 'OK']
    """
    return [word for word in _WORD_OF_CAPITALS.findall(text) if word.isupper()]


def _compare(count: int, relation: str, bound: int) -> bool:
    return count < bound if relation == "less than" else count >= bound


def _find(words: str, text: str) -> list[str]:
    return re.findall(re.escape(words.strip()), text, flags=re.IGNORECASE)


def _contains_all(arguments: Arguments, prompt: str, answer: str) -> bool:
    return all(re.search(re.escape(word), answer, flags=re.IGNORECASE) for word in arguments["keywords"])


def _keyword_count(arguments: Arguments, prompt: str, answer: str) -> bool:
    return _compare(len(_find(arguments["keyword"], answer)), arguments["relation"], arguments["frequency"])


def _without_words(arguments: Arguments, prompt: str, answer: str) -> bool:
    return not any(
        re.search(rf"\b{re.escape(word)}\b", answer, flags=re.IGNORECASE) for word in arguments["forbidden_words"]
    )


def _letter_count(arguments: Arguments, prompt: str, answer: str) -> bool:
    letter: str = arguments["letter"].strip().lower()
    return _compare(answer.lower().count(letter), arguments["let_relation"], arguments["let_frequency"])


def _in_language(arguments: Arguments, prompt: str, answer: str) -> bool:
    return language_of(answer) in (arguments["language"], None)  # a text of numbers alone is in every language


def _sentence_count(arguments: Arguments, prompt: str, answer: str) -> bool:
    return _compare(count_sentences(answer), arguments["relation"], arguments["num_sentences"])


def _word_count(arguments: Arguments, prompt: str, answer: str) -> bool:
    return _compare(len(re.findall(r"\w+", answer)), arguments["relation"], arguments["num_words"])


def _starred_paragraphs(arguments: Arguments, prompt: str, answer: str) -> bool:
    """Divided by ***; an empty one is allowed at either end alone."""
    paragraphs = [paragraph.strip() for paragraph in re.split(r"\s?\*\*\*\s?", answer)]
    inner = paragraphs[1:-1]
    outer = [paragraph for paragraph in (paragraphs[:1] + paragraphs[1:][-1:]) if paragraph]
    return all(inner) and len(inner) + len(outer) == arguments["num_paragraphs"]


def _first_word_of_paragraph(arguments: Arguments, prompt: str, answer: str) -> bool:
    """Divided by empty lines. Empty ones do not count, but have a place when the n-th is looked up, as with Google."""
    paragraphs = answer.split("\n\n")
    count = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    place: int = arguments["nth_paragraph"]
    if count != arguments["num_paragraphs"] or place > count or not paragraphs[place - 1].strip():
        return False
    word = paragraphs[place - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == arguments["first_word"].lower()


def _placeholder_count(arguments: Arguments, prompt: str, answer: str) -> bool:
    return len(re.findall(r"\[.*?\]", answer)) >= arguments["num_placeholders"]


def _has_postscript(arguments: Arguments, prompt: str, answer: str) -> bool:
    """P.S. and P.P.S may have spaces between their letters."""
    marker: str = arguments["postscript_marker"].strip()
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return bool(re.search(patterns.get(marker, re.escape(marker.lower())), answer.lower()))


def _bullet_count(arguments: Arguments, prompt: str, answer: str) -> bool:
    """Lines that start with - or with a * that no other follows."""
    stars = re.findall(r"^\s*\*[^*].*$", answer, flags=re.MULTILINE)
    dashes = re.findall(r"^\s*-.*$", answer, flags=re.MULTILINE)
    return len(stars) + len(dashes) == arguments["num_bullets"]


def _is_option(arguments: Arguments, prompt: str, answer: str) -> bool:
    return any(option in answer for option in OPTIONS)


def _highlight_count(arguments: Arguments, prompt: str, answer: str) -> bool:
    """*one star* and **two**: what stands between two stars of a pair counts, as long as it is not empty."""
    single = [part for part in re.findall(r"\*([^\n*]*)\*", answer) if part.strip()]
    double = [part for part in re.findall(r"\*\*([^\n*]*)\*\*", answer) if part.strip()]
    return len(single) + len(double) >= arguments["num_highlights"]


def _section_count(arguments: Arguments, prompt: str, answer: str) -> bool:
    mark = re.escape(arguments["section_spliter"].strip())
    return len(re.findall(rf"{mark}\s?\d+", answer)) >= arguments["num_sections"]


def _is_json(arguments: Arguments, prompt: str, answer: str) -> bool:
    text = answer.strip()
    for fence in _FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _has_title(arguments: Arguments, prompt: str, answer: str) -> bool:
    titles: Sequence[str] = re.findall(r"<<[^\n]+>>", answer)
    return any(title.lstrip("<").rstrip(">").strip() for title in titles)


def _two_responses(arguments: Arguments, prompt: str, answer: str) -> bool:
    """Two different ones, divided by ******; an empty one is allowed at either end alone."""
    parts = [part.strip() for part in answer.split("******")]
    responses = [part for part in parts if part]
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


def _repeats_prompt(arguments: Arguments, prompt: str, answer: str) -> bool:
    request: str = arguments.get("prompt_to_repeat") or prompt
    return answer.strip().lower().startswith(request.strip().lower())


def _ends_with(arguments: Arguments, prompt: str, answer: str) -> bool:
    return answer.strip().strip('"').lower().endswith(arguments["end_phrase"].strip().lower())


def _capital_word_count(arguments: Arguments, prompt: str, answer: str) -> bool:
    return _compare(len(capital_words(answer)), arguments["capital_relation"], arguments["capital_frequency"])


def _in_capitals(arguments: Arguments, prompt: str, answer: str) -> bool:
    return answer.isupper() and language_of(answer) in ("en", None)


def _in_small_letters(arguments: Arguments, prompt: str, answer: str) -> bool:
    return answer.islower() and language_of(answer) in ("en", None)


def _without_comma(arguments: Arguments, prompt: str, answer: str) -> bool:
    return "," not in answer


def _is_quoted(arguments: Arguments, prompt: str, answer: str) -> bool:
    text = answer.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


INSTRUCTIONS: Final[Mapping[str, Instruction]] = {
    "keywords:existence": Instruction(follows=_contains_all, arguments={"keywords": "texts"}),
    "keywords:frequency": Instruction(
        follows=_keyword_count, arguments={"keyword": "text", "frequency": "count", "relation": "relation"}
    ),
    "keywords:forbidden_words": Instruction(follows=_without_words, arguments={"forbidden_words": "texts"}),
    "keywords:letter_frequency": Instruction(
        follows=_letter_count, arguments={"letter": "text", "let_frequency": "count", "let_relation": "relation"}
    ),
    "language:response_language": Instruction(
        follows=_in_language, arguments={"language": "text"}, needs_language=True
    ),
    "length_constraints:number_sentences": Instruction(
        follows=_sentence_count, arguments={"num_sentences": "count", "relation": "relation"}
    ),
    "length_constraints:number_paragraphs": Instruction(
        follows=_starred_paragraphs, arguments={"num_paragraphs": "count"}
    ),
    "length_constraints:number_words": Instruction(
        follows=_word_count, arguments={"num_words": "count", "relation": "relation"}
    ),
    "length_constraints:nth_paragraph_first_word": Instruction(
        follows=_first_word_of_paragraph,
        arguments={"num_paragraphs": "count", "nth_paragraph": "count", "first_word": "text"},
    ),
    "detectable_content:number_placeholders": Instruction(
        follows=_placeholder_count, arguments={"num_placeholders": "count"}
    ),
    "detectable_content:postscript": Instruction(follows=_has_postscript, arguments={"postscript_marker": "text"}),
    "detectable_format:number_bullet_lists": Instruction(follows=_bullet_count, arguments={"num_bullets": "count"}),
    "detectable_format:constrained_response": Instruction(follows=_is_option),
    "detectable_format:number_highlighted_sections": Instruction(
        follows=_highlight_count, arguments={"num_highlights": "count"}
    ),
    "detectable_format:multiple_sections": Instruction(
        follows=_section_count, arguments={"section_spliter": "text", "num_sections": "count"}
    ),
    "detectable_format:json_format": Instruction(follows=_is_json),
    "detectable_format:title": Instruction(follows=_has_title),
    "combination:two_responses": Instruction(follows=_two_responses),
    "combination:repeat_prompt": Instruction(follows=_repeats_prompt, optional={"prompt_to_repeat": "text"}),
    "startend:end_checker": Instruction(follows=_ends_with, arguments={"end_phrase": "text"}),
    "change_case:capital_word_frequency": Instruction(
        follows=_capital_word_count, arguments={"capital_frequency": "count", "capital_relation": "relation"}
    ),
    "change_case:english_capital": Instruction(follows=_in_capitals, needs_language=True),
    "change_case:english_lowercase": Instruction(follows=_in_small_letters, needs_language=True),
    "punctuation:no_comma": Instruction(follows=_without_comma),
    "startend:quotation": Instruction(follows=_is_quoted),
}
