"""The same prompt before, during and after training, with what changed marked; and prompts that were met only once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.report.run.records import Record
from kedge.report.run.worddiff import Piece, word_diff
from kedge.report.words import short

MOST_PROMPTS = 8
_TEXT_CHARACTERS = 2400
_TITLE_CHARACTERS = 110
_MARKS = re.compile(r"<\|[^|>]*\|>|</?s>|\[/?INST\]")
_ROLE = re.compile(r"^\s*(system|user|assistant)\s*(\n|$)")
_MANY_LINES = re.compile(r"\n\s*\n\s*\n\s*")


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
    """What was asked last, in one line, without the marks of a chat template."""
    prompt: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """`left_out` prompts were sampled too and are not shown."""

    comparisons: tuple[Comparison, ...]
    left_out: int


def compare(samples: Sequence[Record]) -> Samples:
    """Prompts that were answered at several steps first; of the others, those that were met last."""
    by_prompt: dict[str, dict[int, Record]] = {}
    for sample in samples:
        by_prompt.setdefault(str(sample.get("prompt", "")), {}).setdefault(int(sample["step"]), sample)
    repeated = [prompt for prompt, at in by_prompt.items() if len(at) > 1]
    once = sorted((prompt for prompt in by_prompt if prompt not in set(repeated)), key=lambda one: -max(by_prompt[one]))
    order = [*repeated, *once]
    shown = tuple(
        Comparison(title=_title(prompt), prompt=cut(prompt), answers=_answers(by_prompt[prompt]))
        for prompt in order[:MOST_PROMPTS]
    )
    return Samples(comparisons=shown, left_out=len(order) - len(shown))


def _answers(by_step: Mapping[int, Record]) -> tuple[Answer, ...]:
    steps = sorted(by_step)
    chosen = list(dict.fromkeys((steps[0], steps[len(steps) // 2], steps[-1])))
    names = {1: ("seen once",), 2: ("before", "after"), 3: ("before", "during", "after")}[len(chosen)]
    texts = [cut(str(by_step[step].get("answer", ""))) for step in chosen]
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
    told = [f"{name} {short(sample[key])}" for key, name in _NUMBERS.items() if sample.get(key) is not None]
    if sample.get("length") is not None:
        told.append(f"{sample['length']} tokens")
    if sample.get("finished") is False:
        told.append("cut off")
    return " · ".join(told)


_NUMBERS = {"reward": "reward", "gold": "gold", "kl": "KL"}


def _title(prompt: str) -> str:
    """
    >>> _title("<|im_start|>system\\nBe kind.<|im_end|><|im_start|>user\\nHow  much?<|im_end|><|im_start|>assistant\\n")
    'How much?'
    >>> _title("plain text, " + "x" * 200)[-9:]
    'xxxxxxxx…'
    """
    turns = [" ".join(_ROLE.sub("", part).split()) for part in _MARKS.split(prompt)]
    said = next((turn for turn in reversed(turns) if turn), "(empty)")
    return said if len(said) <= _TITLE_CHARACTERS else f"{said[:_TITLE_CHARACTERS]}…"


def cut(text: str) -> str:
    """The beginning and the end of a long text, with how much was left out; many empty lines as their number.

    >>> cut("a\\n\\n\\n\\n\\nb\\n\\nc")
    'a\\n⏎ × 5\\nb\\n\\nc'
    """
    text = _MANY_LINES.sub(lambda blank: f"\n⏎ × {blank.group().count(chr(10))}\n", text)
    left_out = len(text) - _TEXT_CHARACTERS
    if left_out <= 0:
        return text
    half = _TEXT_CHARACTERS // 2
    return f"{text[:half]}\n… {left_out:,} characters left out …\n{text[-half:]}"
