"""The true preference of the demo's world: a pure function of prompt and reply, and never shown to training.

It reads any text, as a model may write anything. Reward models learn it from labels alone; PPO, DPO and the other
methods are evaluated by it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from kedge.core.errors import DataError
from kedge.demo.phrases import CLOSINGS, COURTESIES, FACTS, ITEMS, PADDINGS, REMEDIES, RUDENESSES

Kind = Literal["fact", "courtesy", "rudeness", "padding", "closing", "nonsense"]
FactState = Literal["right", "wrong", "missing"]
"""How a reply states a fact."""

FREE_WORDS = 32
"""Words that a reply may have; the longest perfect one has 28."""

_VALUES: Mapping[str, str] = {
    "order": r"\border (\d+)\b",
    "item": rf"\b({'|'.join(ITEMS)})\b",
    "remedy": rf"\b({'|'.join(REMEDIES)})\b",
}
_SENTENCE = re.compile(r"[^.!?]*[.!?]+|[^.!?]+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A reply, analysed: how it states each fact, its sentences by kind, and what is wrong with its form."""

    facts: Mapping[str, FactState]
    counts: Counter[Kind]
    is_signed: bool
    """A closing, and nothing after it."""
    num_repeated: int
    """Sentences that stand earlier in the same reply."""
    num_words: int
    is_finished: bool


def facts_of(prompt: str) -> dict[str, str]:
    """The facts of a customer's message: order, item and remedy."""
    matches = {name: re.search(pattern, prompt) for name, pattern in _VALUES.items()}
    absent = [name for name, match in matches.items() if match is None]
    if absent:
        raise DataError(
            f"not a message of the demo's world, it names no {' and no '.join(absent)}: {prompt!r}; "
            "make messages with kedge.demo.world"
        )
    return {name: match[1] for name, match in matches.items() if match is not None}


def read_reply(prompt: str, reply: str) -> Reading:
    """Analyse `reply` by its text alone."""
    sentences = [_plain(sentence) for sentence in _SENTENCE.findall(reply) if sentence.strip()]
    kinds: list[Kind] = [_kind(sentence) for sentence in sentences]
    return Reading(
        facts={name: _fact_state(name, value, reply) for name, value in facts_of(prompt).items()},
        counts=Counter(kinds),
        is_signed=kinds[-1:] == ["closing"],
        num_repeated=len(sentences) - len(set(sentences)),
        num_words=len(reply.split()),
        is_finished=reply.rstrip().endswith((".", "!", "?")),
    )


def true_preference(prompt: str, reply: str) -> float:
    """How good a reply is: 5 when everything is right, -1 when it is empty, less when it is worse than nothing.

    Each of order, item and remedy: +1 right, -1 where another value is named, 0 missing. Courtesy: +1 for the first
    phrase, +0.5 for the second, -1 for each one more, because three is fawning. A closing at the end +0.5. Rudeness -2,
    padding -0.75, a repeated sentence -1, one that makes no sense here -0.5, each. -0.1 for each word beyond 32, and
    -1 when it does not end with a full stop or the like.

    >>> message = "The kettle of order 101 smells of fish. May I have a refund?"
    >>> fact = "For the kettle of order 101 you get a refund."
    >>> true_preference(message, f"We are very sorry. {fact} Thank you for writing. Yours, the shop.")
    5.0
    >>> true_preference(message, "We booked a voucher for the kettle. Do not write again.")
    -2.0
    """
    reading = read_reply(prompt, reply)
    counts = reading.counts
    score = sum({"right": 1.0, "wrong": -1.0, "missing": 0.0}[state] for state in reading.facts.values())
    score += _courtesy(counts["courtesy"]) + 0.5 * reading.is_signed
    score -= 2.0 * counts["rudeness"] + 0.75 * counts["padding"] + 0.5 * counts["nonsense"]
    score -= 1.0 * reading.num_repeated + 1.0 * (not reading.is_finished)
    return round(score - 0.1 * max(0, reading.num_words - FREE_WORDS), 6)


def _courtesy(count: int) -> float:
    return 1.0 * (count >= 1) + 0.5 * (count >= 2) - 1.0 * max(0, count - 2)


def _fact_state(name: str, value: str, reply: str) -> FactState:
    stated = {text.lower() for text in re.findall(_VALUES[name], reply, re.IGNORECASE)}
    if not stated:
        return "missing"
    return "right" if stated == {value} else "wrong"


def _plain(sentence: str) -> str:
    return " ".join(sentence.lower().split())


def _kind(sentence: str) -> Kind:
    kind = _kinds_of_phrases().get(sentence)
    if kind is not None:
        return kind
    return "fact" if any(pattern.fullmatch(sentence) for pattern in _fact_patterns()) else "nonsense"


@cache
def _kinds_of_phrases() -> dict[str, Kind]:
    kinds: dict[Kind, tuple[str, ...]] = {
        "courtesy": COURTESIES,
        "rudeness": RUDENESSES,
        "padding": PADDINGS,
        "closing": CLOSINGS,
    }
    return {_plain(phrase): kind for kind, phrases in kinds.items() for phrase in phrases}


@cache
def _fact_patterns() -> tuple[re.Pattern[str], ...]:
    values = {"order": r"\d+", "item": f"(?:{'|'.join(ITEMS)})", "remedy": f"(?:{'|'.join(REMEDIES)})"}
    sentences = [_plain(sentence) for group in FACTS.values() for sentence in group]
    escaped = map(re.escape, sentences)
    return tuple(re.compile(re.sub(r"\\{(\w+)\\}", lambda match: values[match[1]], text)) for text in escaped)
