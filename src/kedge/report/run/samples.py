"""Samples of a run: the same prompt before, during and after training, with the words that changed marked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal

from kedge.report import words
from kedge.report.chat import Turn, answer_text, turns
from kedge.report.run.run_records import Record
from kedge.report.words import short

MOST_PROMPTS = 8
_MOST_WORDS = 2000
"""Matching takes time with the square of the words; longer texts are shown whole, as gone and come."""
_TEXT_CHARACTERS = 2400
_TITLE_CHARACTERS = 110
_WORDS = re.compile(r"\S+\s*|^\s+")
"""Blanks belong to the word before them."""
_MANY_LINES = re.compile(r"\n\s*\n\s*\n\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of two texts: in both, only in the earlier one, or only in the later one."""

    kind: Literal["same", "gone", "new"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer, as its difference from the one before it on the same prompt."""

    when: str
    step: int
    pieces: tuple[Piece, ...]
    facts: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    title: str
    """The last message of the prompt in one line."""
    turns: tuple[Turn, ...]
    """All of them, where there are more than the title says."""
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """`left_out` prompts were sampled too and are not shown."""

    comparisons: tuple[Comparison, ...]
    left_out: int


def compare(samples: Sequence[Record]) -> Samples:
    """Prompts that were answered at several steps first; then the others, those of the last steps first."""
    places: dict[str, dict[int, int]] = {}
    """By prompt and step, where the sample is: a long run has more of them than fit into memory with ease."""
    for place, sample in enumerate(samples):
        places.setdefault(str(sample.get("prompt", "")), {}).setdefault(int(sample["step"]), place)
    repeated = [prompt for prompt, by_step in places.items() if len(by_step) > 1]
    once = [prompt for prompt, by_step in places.items() if len(by_step) == 1]
    once.sort(key=lambda prompt: -max(places[prompt]))
    order = [*repeated, *once]
    shown = tuple(
        Comparison(title=_title(prompt), turns=shown_turns(prompt), answers=_answers(samples, places[prompt]))
        for prompt in order[:MOST_PROMPTS]
    )
    return Samples(comparisons=shown, left_out=len(order) - len(shown))


def _answers(samples: Sequence[Record], places: Mapping[int, int]) -> tuple[Answer, ...]:
    steps = sorted(places)
    chosen = list(dict.fromkeys((steps[0], steps[len(steps) // 2], steps[-1])))
    names = {1: ("seen once",), 2: ("before", "after"), 3: ("before", "during", "after")}[len(chosen)]
    by_step = {step: samples[places[step]] for step in chosen}
    texts = [shown_answer(by_step[step]) for step in chosen]
    return tuple(
        Answer(
            when=when,
            step=step,
            pieces=word_diff(texts[at - 1], text) if at else (Piece(kind="same", text=text),),
            facts=answer_facts(by_step[step]),
        )
        for at, (when, step, text) in enumerate(zip(names, chosen, texts, strict=True))
    )


def answer_facts(sample: Mapping[str, Any]) -> str:
    """
    >>> answer_facts({"reward": 1.25, "kl": 3.0, "length": 40, "finished": False, "gold": None})
    'reward 1.25 · KL 3 · 40 tokens · cut off'
    """
    names = {"reward": "reward", "gold": "gold", "kl": "KL"}
    facts = [f"{name} {short(sample[key])}" for key, name in names.items() if sample.get(key) is not None]
    if sample.get("length") is not None:
        facts.append(f"{sample['length']} tokens")
    if sample.get("finished") is False:
        facts.append("cut off")
    return " · ".join(facts)


def _title(prompt: str) -> str:
    """
    >>> _title("<|im_start|>system\\nBe kind.<|im_end|><|im_start|>user\\nHow  much?<|im_end|><|im_start|>assistant\\n")
    'How much?'
    >>> _title("plain text, " + "x" * 200)[-9:]
    'xxxxxxxx…'
    """
    last = next((" ".join(turn.text.split()) for turn in reversed(turns(prompt))), "(empty)")
    return last if len(last) <= _TITLE_CHARACTERS else f"{last[:_TITLE_CHARACTERS]}…"


def shown_turns(prompt: str) -> tuple[Turn, ...]:
    """The turns of a prompt, long ones with their middle left out."""
    return tuple(Turn(role=turn.role, text=cut(turn.text)) for turn in turns(prompt))


def shown_answer(sample: Mapping[str, Any]) -> str:
    return cut(answer_text(str(sample.get("answer", ""))))


def cut(text: str) -> str:
    """The beginning and the end of a long text, with how much was left out; many empty lines as their number.

    >>> cut("a\\n\\n\\n\\n\\nb\\n\\nc")
    'a\\n⏎ × 5\\nb\\n\\nc'
    """
    folded = _MANY_LINES.sub(lambda blank: f"\n⏎ × {blank.group().count(chr(10))}\n", text)
    return words.cut(folded, _TEXT_CHARACTERS)


def word_diff(before: str, after: str) -> tuple[Piece, ...]:
    """The pieces of both texts in reading order.

    >>> [(piece.kind, piece.text) for piece in word_diff("the old cat sat", "the cat sat down")]
    [('same', 'the '), ('gone', 'old '), ('same', 'cat sat '), ('new', 'down')]
    """
    old, new = _WORDS.findall(before), _WORDS.findall(after)
    if len(old) + len(new) > _MOST_WORDS:
        return _pieces([("gone", before), ("new", after)] if before != after else [("same", after)])
    changes: list[tuple[Literal["same", "gone", "new"], str]] = []
    bare = [word.strip() for word in old], [word.strip() for word in new]
    for change, i, j, k, m in SequenceMatcher(None, *bare, autojunk=False).get_opcodes():
        if change == "equal":
            changes.append(("same", "".join(new[k:m])))
        else:
            changes.append(("gone", _spaced("".join(old[i:j]))))
            changes.append(("new", "".join(new[k:m])))
    return _pieces(changes)


def _spaced(text: str) -> str:
    """The last word of a text has no blank of its own; beside the words that replace it, it needs one."""
    return text if not text or text[-1].isspace() else f"{text} "


def _pieces(changes: list[tuple[Literal["same", "gone", "new"], str]]) -> tuple[Piece, ...]:
    return tuple(Piece(kind=kind, text=text) for kind, text in changes if text)
