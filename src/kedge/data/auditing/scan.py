"""One pass over one file: everything that the audit needs of it, as typed columns instead of text.

An item costs about a hundred bytes here (and its prompt a signature on disk), so a million of them fit easily. Texts
are not kept: offenders are read again from the file when they are shown.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import Literal

from jinja2 import TemplateError
from xxhash import xxh3_64_intdigest

from kedge.core.errors import KedgeError
from kedge.data.auditing.minhash import Sketches
from kedge.data.auditing.ngrams import GramCollector, Overlap
from kedge.data.auditing.result import Part
from kedge.data.auditing.role_order import NamedAnswers, prompt_and_answers, role_problems
from kedge.data.auditing.rules import EXAMPLES_PER_FINDING
from kedge.data.auditing.text_matching import REPLACEMENT, LiteralFinder, collapse_spaces, text_key, words
from kedge.data.examples import Demonstration, Example, Kind, Messages, Pair, Prompt, Ranking, Thumb
from kedge.data.reading import prompt_key

Measure = Callable[[Messages], int]
"""How many tokens these messages are for the model, chat template included."""

_EMPTY_CODES = {"prompt": "empty.prompt", "chosen": "empty.chosen", "rejected": "empty.rejected"}
_KINDS: dict[type[Example], Kind] = {
    Pair: "pairs",
    Ranking: "rankings",
    Thumb: "thumbs",
    Demonstration: "demonstrations",
    Prompt: "prompts",
}
_THREE = Struct("<QQQ")
_SAME_WORDS_GAP = 16
"""Answers whose lengths differ by more characters than this differ in more than punctuation; so few are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """Which checks are done, the same for every file."""

    measure: Measure | None
    window: int | None
    known_tokens: LiteralFinder
    model_tokens: LiteralFinder
    transcript_markers: LiteralFinder
    seed: int


@dataclass(slots=True)
class Side:
    """Lengths of one side, item after item."""

    characters: array[int] = field(default_factory=lambda: array("I"))
    words: array[int] = field(default_factory=lambda: array("I"))
    tokens: array[int] = field(default_factory=lambda: array("I"))


@dataclass(slots=True)
class Marks:
    """How many items break a rule, and the rows of the first of them."""

    count: int = 0
    rows: list[int] = field(default_factory=list[int])


@dataclass(slots=True, kw_only=True)
class Distinct:
    """Distinct texts with the row where each first occurs, and their MinHash signatures."""

    sketches: Sketches
    rows: array[int] = field(default_factory=lambda: array("q"))


@dataclass(slots=True, kw_only=True)
class Scan:
    """The columns of one file. `pair_*` has one entry for each strict preference (a ranking holds several)."""

    source: str | Path
    part: Part
    prompts: Distinct
    conversations: Distinct
    kind: Kind | None = None
    format: str = ""
    note: str = ""
    without: int = 0
    broken: int = 0
    broken_places: list[str] = field(default_factory=list[str])
    files: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])  # (first row, file)
    lines: array[int] = field(default_factory=lambda: array("q"))
    prompt_keys: array[int] = field(default_factory=lambda: array("Q"))
    item_keys: array[int] = field(default_factory=lambda: array("Q"))
    item_characters: array[int] = field(default_factory=lambda: array("I"))
    pair_keys: array[int] = field(default_factory=lambda: array("Q"))
    pair_directions: array[int] = field(default_factory=lambda: array("b"))
    pair_rows: array[int] = field(default_factory=lambda: array("q"))
    preferences: int = 0
    longer: Counter[Literal["wins", "losses", "ties"]] = field(default_factory=Counter)
    sides: dict[str, Side] = field(default_factory=lambda: defaultdict(Side))
    marks: dict[str, Marks] = field(default_factory=lambda: defaultdict(Marks))
    literals: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """By rule, the strings that do not belong in a message, and in how many items each occurs."""

    def mark(self, code: str, row: int) -> None:
        marks = self.marks[code]
        marks.count += 1
        if len(marks.rows) < EXAMPLES_PER_FINDING:
            marks.rows.append(row)

    def where(self, row: int) -> str:
        _, file = self.files[bisect_right(self.files, row, key=lambda start: start[0]) - 1]
        return f"{file}:{self.lines[row]}"


class Scanner:
    """Adds items to a scan. It keeps only the keys that tell first occurrences from repeats."""

    def __init__(self, scan: Scan, checks: Checks, *, overlap: Overlap | None, grams: GramCollector | None) -> None:
        self._scan = scan
        self._checks = checks
        self._overlap = overlap
        self._grams = grams
        self._prompt_numbers = dict[int, int]()
        self._conversation_keys = set[int]()

    def add(self, example: Example) -> None:
        scan = self._scan
        row = len(scan.lines)
        scan.lines.append(example.origin.line)
        if not scan.files or scan.files[-1][1] != example.origin.file:
            scan.files.append((row, example.origin.file))
        if scan.kind is None:
            scan.kind = _KINDS[type(example)]
        prompt, answers = prompt_and_answers(example)
        prompt_text = contents(prompt)
        answer_texts = [contents(answer) for _, answer in answers]

        prompt_id = self._length(row, "prompt", prompt_text)
        answer_ids = [self._length(row, side, text) for (side, _), text in zip(answers, answer_texts, strict=True)]
        scan.item_characters.append(len(prompt_text) + sum(map(len, answer_texts)))
        self._keys(example, row, prompt_id, answer_ids, prompt_text)
        _preferences(scan, example, row, prompt_id, answer_ids, answer_texts)
        for code in role_problems(example, prompt, answers):
            scan.mark(code, row)
        self._strings(row, "\0".join([prompt_text, *answer_texts]))
        if isinstance(example, Demonstration):
            self._conversation(row, "\n".join([prompt_text, *answer_texts]))
        if self._checks.measure is not None:
            _tokens(scan, self._checks, self._checks.measure, row, prompt, answers)
        if self._overlap is not None:
            self._overlap.add(row, prompt_text, answer_texts)
        if self._grams is not None:
            self._grams.add(self._prompt_numbers[scan.prompt_keys[row]], prompt_text, answer_texts)

    def _length(self, row: int, side: str, text: str) -> int:
        """Note the length of one side; the key of its text is what identity goes by."""
        squeezed, num_words = collapse_spaces(text)
        lengths = self._scan.sides[side]
        lengths.characters.append(len(text))
        lengths.words.append(num_words)
        if not num_words:
            self._scan.mark(_EMPTY_CODES.get(side, "empty.answer"), row)
        return text_key(squeezed)

    def _keys(self, example: Example, row: int, prompt_id: int, answer_ids: list[int], prompt_text: str) -> None:
        scan = self._scan
        label = example.rank if isinstance(example, Ranking) else getattr(example, "is_good", None)
        solution = example.answer if isinstance(example, Prompt) else None
        scan.item_keys.append(text_key(f"{prompt_id} {answer_ids} {label} {solution}"))
        key = prompt_key(example)
        scan.prompt_keys.append(key)
        if key not in self._prompt_numbers:
            self._prompt_numbers[key] = len(self._prompt_numbers)
            scan.prompts.rows.append(row)
            scan.prompts.sketches.add(prompt_text)

    def _conversation(self, row: int, text: str) -> None:
        key = self._scan.item_keys[row]
        if key not in self._conversation_keys:
            self._conversation_keys.add(key)
            self._scan.conversations.rows.append(row)
            self._scan.conversations.sketches.add(text)

    def _strings(self, row: int, text: str) -> None:
        checks = self._checks
        for code, find in (
            ("tokens.special", checks.known_tokens),
            ("tokens.model", checks.model_tokens),
            ("template.transcript", checks.transcript_markers),
        ):
            if literals := find(text):
                self._scan.mark(code, row)
                self._scan.literals[code].update(literals)
        if REPLACEMENT in text:
            self._scan.mark("text.replacement", row)


def contents(messages: Messages) -> str:
    return messages[0].content if len(messages) == 1 else "\n".join([message.content for message in messages])


def _preferences(
    scan: Scan, example: Example, row: int, prompt_id: int, answer_ids: list[int], answer_texts: list[str]
) -> None:
    """Note each preference of this item: same text on both sides, which way round, whether the longer one won."""
    if isinstance(example, Thumb):
        _note_pair(scan, row, _THREE.pack(prompt_id, answer_ids[0], 0), direction=example.is_good)
    for better, worse in strict_preferences(example):
        scan.preferences += 1
        better_id, worse_id = answer_ids[better], answer_ids[worse]
        if better_id == worse_id:
            scan.mark("pairs.identical", row)
            scan.longer["ties"] += 1
            continue
        pair = _THREE.pack(prompt_id, min(better_id, worse_id), max(better_id, worse_id))
        _note_pair(scan, row, pair, direction=better_id < worse_id)
        gap = len(answer_texts[better]) - len(answer_texts[worse])
        if abs(gap) <= _SAME_WORDS_GAP and words(answer_texts[better]) == words(answer_texts[worse]):
            scan.mark("pairs.same_words", row)
        scan.longer["wins" if gap > 0 else "losses" if gap < 0 else "ties"] += 1


def _note_pair(scan: Scan, row: int, pair: bytes, *, direction: bool) -> None:
    scan.pair_keys.append(xxh3_64_intdigest(pair))
    scan.pair_directions.append(direction)
    scan.pair_rows.append(row)


def strict_preferences(example: Example) -> Iterator[tuple[int, int]]:
    """(better, worse) as positions among the answers; ties of a ranking say nothing."""
    if isinstance(example, Pair):
        yield 0, 1
    elif isinstance(example, Ranking):
        for better, rank in enumerate(example.rank):
            for worse, other in enumerate(example.rank):
                if rank < other:
                    yield better, worse


def _tokens(scan: Scan, checks: Checks, measure: Measure, row: int, prompt: Messages, answers: NamedAnswers) -> None:
    """Tokens by side, and whether the item fits the window. An answer has as many tokens as it adds to its prompt."""
    try:
        prompt_tokens = measure(prompt) if prompt else 0
        totals = [measure((*prompt, *answer)) for _, answer in answers]
    except (KedgeError, TemplateError):
        scan.mark("template.refused", row)
        return
    scan.sides["prompt"].tokens.append(prompt_tokens)
    for (side, _), total in zip(answers, totals, strict=True):
        scan.sides[side].tokens.append(max(0, total - prompt_tokens))
    if checks.window is not None:
        if prompt_tokens >= checks.window:
            scan.mark("length.prompt_over_window", row)
        elif max(totals, default=0) > checks.window:
            scan.mark("length.over_window", row)
