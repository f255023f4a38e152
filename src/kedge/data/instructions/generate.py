"""Prompts with checkable instructions: a request and one to three instructions that do not contradict each other.

Rows have the form of IFEval's files (`key`, `prompt`, `instruction_id_list`, `kwargs`), and the `request` alone, so
that the same file is read as prompts for the reward `instructions` and as the items of an exam.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from random import Random
from typing import Any

from kedge.core.errors import ConfigError
from kedge.core.suggest import did_you_mean
from kedge.data.instructions.requests import Part, Request, questions, requests
from kedge.data.instructions.wordings import TRAINED, WORDINGS

Row = dict[str, Any]
MOST = 3
_SHARES = (0.5, 0.3, 0.2)
"""Of prompts with one, two and three instructions."""
_AS_LIST, _BEFORE = 0.15, 0.15
"""Shares of prompts whose instructions come as a list, and of those where they come before the request."""


def generate(count: int, *, seed: int, kinds: Collection[str] = tuple(TRAINED), part: Part = "train") -> list[Row]:
    """So many different prompts; each kind comes about equally often.

    >>> rows = generate(50, seed=1, kinds=["punctuation:no_comma", "detectable_format:title"])
    >>> rows == generate(50, seed=1, kinds=["punctuation:no_comma", "detectable_format:title"])
    True
    >>> len({row["prompt"] for row in rows})
    50
    """
    if unknown := [kind for kind in kinds if kind not in WORDINGS]:
        raise ConfigError(f"there is no kind of instruction '{unknown[0]}'{did_you_mean(unknown[0], WORDINGS)}")
    if not kinds:
        raise ConfigError("no kind of instruction is named")
    rng, rows, seen = Random(f"instructions {seed} {part}"), list[Row](), set[str]()
    for row in _drawn(rng, list(kinds), part, most=100 * count):
        if row["prompt"] not in seen:
            seen.add(row["prompt"])
            rows.append({"key": f"{part}-{seed}-{len(rows)}", **row})
        if len(rows) == count:
            return rows
    raise ConfigError(f"these kinds of instructions make only {len(rows):,} different prompts, {count:,} are asked for")


def _drawn(rng: Random, kinds: Sequence[str], part: Part, *, most: int) -> Iterator[Row]:
    """The first instruction of each prompt goes through the kinds in turn, so that rare ones come as often."""
    all_requests, all_questions = requests(part), questions(part)
    turn: list[str] = []
    for _ in range(most):
        if not turn:
            turn = rng.sample(kinds, len(kinds))
        first = turn.pop()
        request = rng.choice(all_questions if WORDINGS[first].question else all_requests)
        yield _row(rng, request, _beside(rng, first, kinds, rng.choices(range(1, MOST + 1), _SHARES)[0]))


def _beside(rng: Random, first: str, kinds: Sequence[str], count: int) -> list[str]:
    """A kind with others that may stand beside it, in any order."""
    chosen, marks = [first], set(WORDINGS[first].marks)
    others = [kind for kind in rng.sample(kinds, len(kinds)) if kind != first]
    for kind in others:
        wording = WORDINGS[kind]
        is_free = marks.isdisjoint(wording.marks) and "alone" not in marks | wording.marks
        if len(chosen) < count and is_free and wording.question == WORDINGS[first].question:
            chosen.append(kind)
            marks |= wording.marks
    return rng.sample(chosen, len(chosen))


def _row(rng: Random, request: Request, kinds: Sequence[str]) -> Row:
    texts: list[str] = []
    arguments: list[Row] = []
    for kind in kinds:
        given, slots = WORDINGS[kind].draw(rng)
        texts.append(rng.choice(WORDINGS[kind].texts).format(**slots))
        arguments.append({"prompt_to_repeat": request.text} if kind == "combination:repeat_prompt" else given)
    is_after_all = any(kind == "combination:repeat_prompt" for kind in kinds)
    return {
        "prompt": _prompt(rng, request.text, texts, is_after=is_after_all),
        "request": request.text,
        "instruction_id_list": list(kinds),
        "kwargs": arguments,
    }


def _prompt(rng: Random, request: str, texts: Sequence[str], *, is_after: bool) -> str:
    layout = rng.random()
    if len(texts) > 1 and layout < _AS_LIST:
        return f"{request}\n\n" + "\n".join(f"{number}. {text}" for number, text in enumerate(texts, start=1))
    between = rng.choice([" ", " ", "\n", "\n\n"])
    told = " ".join(texts)
    if not is_after and layout > 1 - _BEFORE:
        return f"{told}{between}{request}"
    return f"{request}{between}{told}"
