"""A shop's help desk: small, readable synthetic data whose true preference is a known rule.

A prompt states two facts about an article and asks for one of them. `true_score` is the rule that people would follow
here: give the asked fact, name the article, be courteous, never rude, do not pad. All ASCII, a prompt and an answer
together at most 120 characters, so that a byte-level model learns it in minutes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product
from pathlib import Path
from random import Random
from typing import Any

from kedge.core.errors import ConfigError, DataError
from kedge.core.files import write_text
from kedge.core.seeds import seed_for

ARTICLES = ("chair", "clock", "desk", "fan", "lamp", "mug", "pan", "radio", "rug", "scarf", "tent", "vase")
COURTESIES = ("Thank you!", "Happy to help!", "Kind regards!", "Most welcome!")
RUDENESSES = ("Read the label.", "Not my problem.", "Stop asking.", "Use your eyes.")
PADDINGS = ("as you know,", "you see,", "basically,", "all in all,")
EVASIONS = ("{article} is a good choice", "that is on the label", "I have to look that up")

MOST_ROWS = 50_000
_FREE_LENGTH = 60
_LENGTH_COST = 0.02


@dataclass(frozen=True, slots=True)
class Topic:
    """One kind of fact: how it is stated, its possible values, and two questions for it."""

    states: str
    values: tuple[str, ...]
    questions: tuple[str, str]


TOPICS = (
    Topic(
        "ships {}",
        ("Monday", "Tuesday", "Friday", "Sunday"),
        ("When does it ship?", "Which day?"),
    ),
    Topic("costs {}", tuple(f"{n} euro" for n in range(5, 45)), ("What is the price?", "How much is it?")),
    Topic(
        "comes in {}",
        ("black", "blue", "brown", "green", "grey", "pink", "red", "white"),
        ("What colour is it?", "Which colour?"),
    ),
    Topic("is in {}", tuple(f"aisle {n}" for n in range(1, 26)), ("Where do I find it?", "Where is it?")),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt with the article, topic and value that it asks for."""

    article: str
    topic: Topic
    value: str
    prompt: str


def _cases(n: int, rng: Random) -> Iterator[Case]:
    """`n` cases in random order, no prompt twice."""
    if n > MOST_ROWS:
        raise ConfigError(f"{n} rows were asked for; the toy shop has enough different prompts for {MOST_ROWS}")
    frames = list(product(ARTICLES, permutations(TOPICS, 2), (0, 1), (True, False)))
    used: set[str] = set()
    while len(used) < n:
        rng.shuffle(frames)
        for article, (topic, other), wording, is_topic_first in frames:
            value, other_value = rng.choice(topic.values), rng.choice(other.values)
            facts = [topic.states.format(value), other.states.format(other_value)]
            first, second = facts if is_topic_first else reversed(facts)
            prompt = f"The {article} {first} and {second}. {topic.questions[wording]}"
            if prompt not in used and len(used) < n:
                used.add(prompt)
                yield Case(article, topic, value, prompt)


@dataclass(frozen=True, slots=True)
class Style:
    """What an answer does right and wrong."""

    fact: str  # "right", "wrong" or "missing"
    is_named: bool
    closing: str
    padding: str


def _style(rng: Random, *, is_honest: bool) -> Style:
    """A random style; honest ones give the right fact and are never rude, but may pad and lack courtesy."""
    fact = "right" if is_honest else rng.choices(("right", "wrong", "missing"), (0.6, 0.2, 0.2))[0]
    rude = 0.0 if is_honest else 0.2
    closings = ("", rng.choice(COURTESIES), rng.choice(RUDENESSES))
    closing = rng.choices(closings, (0.5 - rude / 2, 0.5 - rude / 2, rude))[0]
    padding = rng.choice(PADDINGS) if rng.random() < 0.35 else ""
    return Style(fact, rng.random() < 0.75, closing, padding)


def _answer(case: Case, style: Style, rng: Random) -> str:
    subject = f"the {case.article}" if style.is_named else "it"
    if style.fact == "missing":
        clause = rng.choice(EVASIONS).format(article=subject)
    else:
        wrong = rng.choice([value for value in case.topic.values if value != case.value])
        clause = f"{subject} {case.topic.states.format(case.value if style.fact == 'right' else wrong)}"
    sentence = f"{style.padding} {clause}".strip()
    return f"{sentence[0].upper()}{sentence[1:]}. {style.closing}".strip()


@cache
def _pattern(phrases: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, phrases))})(?!\w)", re.IGNORECASE)


def _says(text: str, *phrases: str) -> bool:
    return _pattern(phrases).search(text) is not None


def _parse(prompt: str) -> tuple[str, Topic, str]:
    """The article, topic and value that a prompt asks for."""
    for topic in TOPICS:
        if prompt.endswith(topic.questions):
            fact = topic.states.format("(.+?)")
            stated = re.match(rf"The (\w+) (?:.+ and )?{fact}(?: and |\. )", prompt)
            if stated is not None:
                return stated[1], topic, stated[2]
    raise DataError(f"not a prompt of the toy shop: {prompt!r}; make prompts with kedge.testing.toy.prompts")


def true_score(prompt: str, answer: str) -> float:
    """How good an answer is, by rule: from 4 (everything right) down; an empty answer has 0.

    +2 for the asked fact, -2 for another value of its sort, +1 for the article's name, +1 for a courtesy, -2 for
    rudeness, -1 for each padding phrase, and -0.02 for each character beyond 60.

    >>> question = "The lamp costs 14 euro and is in aisle 3. Where do I find it?"
    >>> true_score(question, "The lamp is in aisle 3. Happy to help!")
    4.0
    >>> true_score(question, "You see, it is in aisle 9. Stop asking.")
    -5.0
    """
    article, topic, value = _parse(prompt)
    score = 2.0 * _says(answer, value) + _says(answer, article)
    score -= 2.0 * _says(answer, *(other for other in topic.values if other != value))
    score += _says(answer, *COURTESIES)
    score -= 2.0 * _says(answer, *RUDENESSES)
    score -= sum(answer.lower().count(phrase) for phrase in PADDINGS)
    return score - _LENGTH_COST * max(0, len(answer) - _FREE_LENGTH)


def demonstrations(n: int, seed: int) -> list[dict[str, Any]]:
    """Conversations that always give the right fact, but pad and lack courtesy often enough to leave room for RL."""
    rng = Random(seed_for(seed, "toy/demonstrations"))
    return [
        {
            "messages": [
                {"role": "user", "content": case.prompt},
                {"role": "assistant", "content": _answer(case, _style(rng, is_honest=True), rng)},
            ]
        }
        for case in _cases(n, rng)
    ]


def pairs(n: int, seed: int, *, flip: float = 0.0) -> list[dict[str, Any]]:
    """Two answers each, the better by `true_score` chosen; the share `flip` of the labels is flipped at random."""
    rng = Random(seed_for(seed, "toy/pairs"))
    flips = Random(seed_for(seed, "toy/flips"))
    rows: list[dict[str, Any]] = []
    for case in _cases(n, rng):
        worse, better = _two_answers(case, rng)
        if flips.random() < flip:
            worse, better = better, worse
        rows.append({"prompt": case.prompt, "chosen": better, "rejected": worse})
    return rows


def _two_answers(case: Case, rng: Random) -> tuple[str, str]:
    """Two answers whose scores differ by at least one, the worse first."""
    while True:
        first, second = (_answer(case, _style(rng, is_honest=False), rng) for _ in range(2))
        gap = true_score(case.prompt, first) - true_score(case.prompt, second)
        if abs(gap) >= 1:
            return (second, first) if gap > 0 else (first, second)


def prompts(n: int, seed: int) -> list[dict[str, Any]]:
    """Prompts with the asked fact as the checkable `answer`."""
    rng = Random(seed_for(seed, "toy/prompts"))
    return [{"prompt": case.prompt, "answer": case.value} for case in _cases(n, rng)]


def write(folder: Path, n: int, seed: int) -> dict[str, Path]:
    """Write `n` rows of each kind as JSON Lines; gives the paths by kind."""
    folder.mkdir(parents=True, exist_ok=True)
    rows_by_kind = {"demonstrations": demonstrations(n, seed), "pairs": pairs(n, seed), "prompts": prompts(n, seed)}
    return {kind: _write_rows(folder / f"{kind}.jsonl", rows) for kind, rows in rows_by_kind.items()}


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    return path
