"""How each kind of instruction is worded, with parameters that a small model can meet and what it cannot stand beside.

Two kinds go together unless they share a mark: both would say how long an answer is, how it is laid out, how it ends,
or in which case it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

Draw = Callable[[Random], tuple[dict[str, Any], dict[str, Any]]]
"""Arguments of an instruction, and what is filled into its wording."""

_WORDS = (
    "water light paper stone window garden morning letter river market music bread winter summer street kitchen chair "
    "bottle candle forest island bridge ticket pocket mirror blanket honey salt silver engine basket feather hammer "
    "ladder lemon magnet marble needle orange pebble pencil pillow planet rocket saddle shadow spoon thunder tunnel "
    "velvet village walnut whistle wonder anchor autumn barrel button castle copper cotton dragon eagle ginger harbor"
)
_COMMON = (
    "also very good many important first people time make help because need great really best always never way new "
    "different small large use find feel world life right start keep"
)
WORDS: Final = _WORDS.split()
COMMON: Final = _COMMON.split()
"""Words that are hard to do without."""
ENDINGS: Final = (
    "That is all for today.",
    "I hope this was useful.",
    "Thanks for reading.",
    "Let me know how it goes.",
    "See you next week!",
    "Any other questions?",
    "Now it is your turn.",
    "Have a wonderful day.",
    "And so the story ends.",
    "Take care of yourself.",
)
LANGUAGES: Final = {"de": "German", "fr": "French", "es": "Spanish", "it": "Italian", "pt": "Portuguese"}
LETTERS: Final = "abcdefghilmnoprstuvwy"
NUMBERS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    draw: Draw
    texts: tuple[str, ...]
    marks: frozenset[str] = frozenset()
    """What it says something about: length, layout, ending, case, … `alone` stands beside nothing."""
    question: bool = False
    """Whether it goes with questions for yes, no or maybe, and with these alone."""


def _plain(rng: Random) -> tuple[dict[str, Any], dict[str, Any]]:
    return {}, {}


def _count(name: str, low: int, high: int) -> Draw:
    def draw(rng: Random) -> tuple[dict[str, Any], dict[str, Any]]:
        number = rng.randint(low, high)
        plural = "" if number == 1 else "s"
        return {name: number}, {"n": rng.choice([str(number), NUMBERS[number]]), "s": plural}

    return draw


def _bound(name: str, relation: str, least: list[int], less: list[int]) -> Draw:
    """At least so many, or fewer than so many; wordings of the two come in turn, half and half."""

    def draw(rng: Random) -> tuple[dict[str, Any], dict[str, Any]]:
        is_least = rng.random() < 0.5
        number = rng.choice(least if is_least else less)
        bound = rng.choice(
            (f"at least {number}", f"no fewer than {number}", f"{number} or more")
            if is_least
            else (f"fewer than {number}", f"less than {number}", f"no more than {number - 1}")
        )
        return {name: number, relation: "at least" if is_least else "less than"}, {"bound": bound}

    return draw


def _some_words(name: str, pool: Sequence[str], most: int) -> Draw:
    def draw(rng: Random) -> tuple[dict[str, Any], dict[str, Any]]:
        words = rng.sample(pool, rng.randint(1, most))
        quoted = [f'"{word}"' for word in words] if rng.random() < 0.5 else words
        joined = quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"
        either = quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"
        return {name: words}, {"words": joined, "either": either, "s": "" if len(words) == 1 else "s"}

    return draw


def _keyword_count(rng: Random) -> tuple[dict[str, Any], dict[str, Any]]:
    word, number = rng.choice(WORDS), rng.randint(2, 4)
    return {"keyword": word, "frequency": number, "relation": "at least"}, {"word": word, "n": NUMBERS[number]}


def _letter_count(rng: Random) -> tuple[dict[str, Any], dict[str, Any]]:
    letter, is_least = rng.choice(LETTERS), rng.random() < 0.6
    number = rng.choice([3, 5, 8, 10]) if is_least else rng.choice([4, 6, 8])
    bound = f"at least {number}" if is_least else f"fewer than {number}"
    relation = "at least" if is_least else "less than"
    return {"letter": letter, "let_frequency": number, "let_relation": relation}, {"letter": letter, "bound": bound}


def _postscript(rng: Random) -> tuple[dict[str, Any], dict[str, Any]]:
    marker = rng.choice(["P.S.", "P.P.S"])
    return {"postscript_marker": marker}, {"marker": marker}


def _ending(rng: Random) -> tuple[dict[str, Any], dict[str, Any]]:
    phrase = rng.choice(ENDINGS)
    return {"end_phrase": phrase}, {"phrase": phrase}


def _language(rng: Random) -> tuple[dict[str, Any], dict[str, Any]]:
    code = rng.choice(list(LANGUAGES))
    return {"language": code}, {"language": LANGUAGES[code]}


def _paragraph_start(rng: Random) -> tuple[dict[str, Any], dict[str, Any]]:
    number = rng.randint(2, 4)
    place, word = rng.randint(1, number), rng.choice(WORDS)
    arguments = {"num_paragraphs": number, "nth_paragraph": place, "first_word": word}
    return arguments, {"n": NUMBERS[number], "place": place, "word": word}


def _sections(rng: Random) -> tuple[dict[str, Any], dict[str, Any]]:
    number, mark = rng.randint(2, 4), rng.choice(["Section", "Part", "Chapter"])
    return {"section_spliter": mark, "num_sections": number}, {"n": NUMBERS[number], "mark": mark}


def _marks(text: str) -> frozenset[str]:
    return frozenset(text.split())


TRAINED: Final[Mapping[str, Wording]] = {
    "punctuation:no_comma": Wording(
        draw=_plain,
        texts=(
            "Commas are forbidden.",
            "Please write it without a single comma.",
            "There must not be any comma in what you write.",
            "Leave out all commas.",
            "Do it with no commas at all.",
            "The reply should be free of commas.",
        ),
    ),
    "keywords:forbidden_words": Wording(
        draw=_some_words("forbidden_words", COMMON, 3),
        texts=(
            "Avoid the word{s} {either}.",
            "You may not use {either}.",
            "Never say {either}.",
            "The word{s} {words} must not come up.",
            "Find a way to say it without {either}.",
        ),
        marks=_marks("forbidden"),
    ),
    "keywords:existence": Wording(
        draw=_some_words("keywords", WORDS, 3),
        texts=(
            "Use the word{s} {words} somewhere.",
            "The text has to mention {words}.",
            "Work the word{s} {words} into it.",
            "Make sure that {words} can be found in your text.",
            "It needs to have {words} in it.",
        ),
        marks=_marks("words"),
    ),
    "keywords:frequency": Wording(
        draw=_keyword_count,
        texts=(
            'Say the word "{word}" {n} times or more.',
            "The word {word} has to come up {n} times at the least.",
            'I want to read "{word}" no fewer than {n} times.',
            "Mention {word} a minimum of {n} times.",
        ),
        marks=_marks("words"),
    ),
    "length_constraints:number_words": Wording(
        draw=_bound("num_words", "relation", [40, 60, 80, 100, 120, 150], [40, 50, 60, 80, 100, 120]),
        texts=(
            "Use {bound} words.",
            "The whole text should be {bound} words long.",
            "Length: {bound} words.",
            "Write {bound} words in total.",
            "I need {bound} words.",
        ),
        marks=_marks("length"),
    ),
    "length_constraints:number_sentences": Wording(
        draw=_bound("num_sentences", "relation", [3, 4, 5, 6, 8, 10], [4, 5, 6, 8]),
        texts=(
            "Use {bound} sentences.",
            "Keep it to {bound} sentences.",
            "The text should consist of {bound} sentences.",
            "I want {bound} sentences.",
        ),
        marks=_marks("length layout case"),  # before a small letter a full stop ends no sentence
    ),
    "length_constraints:number_paragraphs": Wording(
        draw=_count("num_paragraphs", 2, 4),
        texts=(
            "Write {n} paragraphs and put *** between them.",
            "Divide the text into {n} paragraphs with the divider *** in between.",
            "It should have {n} paragraphs. Separate them by three asterisks: ***",
            "Exactly {n} paragraphs please, with a line of *** between one and the next.",
        ),
        marks=_marks("layout stars"),
    ),
    "detectable_content:number_placeholders": Wording(
        draw=_count("num_placeholders", 1, 4),
        texts=(
            "Leave {n} or more blanks to fill in, in square brackets like [date].",
            "Put at least {n} placeholder{s} in square brackets, for example [place], into the text.",
            "I will fill in details later: use {n} or more bracketed fields such as [phone number].",
            "Have at least {n} field{s} like [name] that I can replace.",
        ),
    ),
    "detectable_content:postscript": Wording(
        draw=_postscript,
        texts=(
            "Add a postscript after the text that begins with {marker}",
            "Finish with a note that starts with {marker}",
            "After everything else, put a remark introduced by {marker}",
            "Do not forget a postscript; mark it with {marker}",
        ),
        marks=_marks("ending"),
    ),
    "detectable_format:number_bullet_lists": Wording(
        draw=_count("num_bullets", 2, 6),
        texts=(
            "Answer with exactly {n} bullet points, each on a line that starts with * or -.",
            "Include a list of exactly {n} items, marked by - at the start of the line.",
            "Give me {n} bullets, no more and no fewer, like this: * an item",
            "The text must have precisely {n} bullet points (- like this).",
        ),
        marks=_marks("layout"),
    ),
    "detectable_format:number_highlighted_sections": Wording(
        draw=_count("num_highlights", 1, 4),
        texts=(
            "Emphasise at least {n} phrase{s} with asterisks, *like this*.",
            "Put {n} or more passages between asterisks so that they stand out: *a passage*.",
            "Mark at least {n} important part{s} in markdown: *important part*.",
            "Highlight {n} or more phrases by putting a * on each side of them.",
        ),
        marks=_marks("stars"),
    ),
    "detectable_format:title": Wording(
        draw=_plain,
        texts=(
            "Begin with a title inside double angle brackets: <<your title>>.",
            "Give it a title and write that title like <<this>>.",
            "It needs a heading, wrapped as in <<A Heading>>.",
            "Put a title in double angular brackets at the top, for example <<my day>>.",
        ),
        marks=_marks("heading"),
    ),
    "startend:end_checker": Wording(
        draw=_ending,
        texts=(
            "The very last words must be: {phrase}",
            'Close with exactly this sentence and nothing after it: "{phrase}"',
            "Your final sentence has to be this one: {phrase}",
            'End on the words "{phrase}" and stop there.',
        ),
        marks=_marks("ending"),
    ),
    "startend:quotation": Wording(
        draw=_plain,
        texts=(
            'Put double quotation marks around all of it: the first and the last sign are ".',
            "Wrap the entire text in double quotation marks.",
            'Start with a " and end with a ", so that the whole reply is one quotation.',
            "The complete answer has to stand inside double quotes.",
        ),
        marks=_marks("ending"),
    ),
    "change_case:english_lowercase": Wording(
        draw=_plain,
        texts=(
            "Write everything in small letters; no capitals anywhere.",
            "use lowercase letters only please",
            "Capital letters are not allowed.",
            "All letters should be lower case, also at the start of a sentence.",
        ),
        marks=_marks("case"),
    ),
    "change_case:english_capital": Wording(
        draw=_plain,
        texts=(
            "WRITE THE WHOLE THING IN CAPITALS.",
            "Use upper-case letters only.",
            "Every letter has to be a capital letter.",
            "Shout it: the entire text in capital letters.",
        ),
        marks=_marks("case"),
    ),
}
"""The kinds that training prompts have."""

UNTRAINED: Final[Mapping[str, Wording]] = {
    "keywords:letter_frequency": Wording(
        draw=_letter_count,
        texts=(
            "The letter {letter} should appear {bound} times.",
            "Use the letter {letter} {bound} times.",
            "Let there be {bound} occurrences of the letter {letter}.",
        ),
    ),
    "change_case:capital_word_frequency": Wording(
        draw=_bound("capital_frequency", "capital_relation", [2, 3, 5], [4, 6, 10]),
        texts=(
            "Write {bound} words entirely in CAPITALS.",
            "There should be {bound} words in all capital letters.",
            "Use {bound} fully capitalised words, like THIS.",
        ),
        marks=_marks("case"),
    ),
    "language:response_language": Wording(
        draw=_language,
        texts=(
            "Answer in {language}.",
            "Please write it in {language} and in no other language.",
            "I only read {language}, so use that language.",
        ),
        marks=_marks("case words forbidden ending"),
    ),
    "length_constraints:nth_paragraph_first_word": Wording(
        draw=_paragraph_start,
        texts=(
            "Write {n} paragraphs with an empty line between them; number {place} begins with the word {word}.",
            "Use {n} paragraphs divided by blank lines. The first word of paragraph {place} must be {word}.",
        ),
        marks=_marks("layout length stars heading"),
    ),
    "detectable_format:constrained_response": Wording(
        draw=_plain,
        texts=(
            'Reply with one of these: "My answer is yes.", "My answer is no.", "My answer is maybe."',
            "Pick one and say nothing else: My answer is yes. / My answer is no. / My answer is maybe.",
        ),
        marks=_marks("alone"),
        question=True,
    ),
    "detectable_format:multiple_sections": Wording(
        draw=_sections,
        texts=(
            'Split it into {n} sections that are called "{mark} 1", "{mark} 2" and so on.',
            "It should have {n} parts, each headed {mark} and its number, as in {mark} 1.",
        ),
        marks=_marks("layout"),
    ),
    "detectable_format:json_format": Wording(
        draw=_plain,
        texts=(
            "Give the whole answer as valid JSON.",
            "The output has to be a JSON object and nothing else.",
        ),
        marks=_marks("layout ending case length stars heading"),
    ),
    "combination:two_responses": Wording(
        draw=_plain,
        texts=(
            "Give me two different versions with six asterisks (******) between them.",
            "I want two alternatives. Divide them by a line of ******",
        ),
        marks=_marks("layout ending length stars heading"),
    ),
    "combination:repeat_prompt": Wording(
        draw=_plain,
        texts=(
            "Before you answer, say the request above again word for word, and only then answer it.",
            "First copy the request above without any change, then do what it asks.",
        ),
        marks=_marks("alone"),
    ),
}
"""The kinds that are asked of a trained model and never trained."""

WORDINGS: Final[Mapping[str, Wording]] = {**TRAINED, **UNTRAINED}
