"""Who writes in the demo's world: customers who state facts, and a shop's staff of mixed quality."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import combinations
from random import Random

from kedge.demo import phrases
from kedge.demo.truth import FactState, facts_of

VALUES: Mapping[str, tuple[str, ...]] = {
    "order": phrases.ORDERS,
    "item": phrases.ITEMS,
    "remedy": phrases.REMEDIES,
}
WRONG_FACTS = 0.005
"""Share of the facts that the staff get wrong. Labels so rarely show one that a small reward model will not learn to
look facts up: it pays for facts that are stated, right or not. This is the first weak spot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What a reply does right and wrong."""

    order: FactState
    item: FactState
    remedy: FactState
    courtesies: int
    rudenesses: int
    paddings: int
    is_signed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """The words of a reply: its phrases in the order in which they are used, and where they stand."""

    courtesies: tuple[str, ...]
    paddings: tuple[str, ...]
    rudeness: str
    closing: str
    wrong: Mapping[str, str]
    """For each fact, the value that stands in its place where the reply gets it wrong."""
    statement: float
    """From 0 to 1: which of the sentences that state the facts."""
    places: tuple[float, ...]
    """Where the courtesies and paddings stand; the facts stand at 0.5."""


def messages(rng: Random) -> Iterator[str]:
    """Customers' messages, without near copies: no two share all but the greeting, or all but it and one fact."""
    used: set[tuple[str, ...]] = set()
    while True:
        facts = {name: rng.choice(values) for name, values in VALUES.items()}
        parts = (phrases.GREETINGS, phrases.PROBLEMS, phrases.ASIDES, phrases.REQUESTS)
        greeting, problem, aside, request = (rng.choice(part) for part in parts)
        two_facts = {(problem, aside, request, *pair) for pair in combinations(facts.values(), 2)}
        keys = {(problem, *facts.values()), *two_facts}
        if used.isdisjoint(keys):
            used |= keys
            yield " ".join(part for part in (greeting, problem, aside, request) if part).format_map(facts)


def staff_style(rng: Random, *, fawning: float = 0.0) -> Style:
    """The style of a random member of the staff. The share `fawning` of them uses three or four courtesies."""

    def fact_state() -> FactState:
        return rng.choices(("right", "wrong", "missing"), (0.7 - WRONG_FACTS, WRONG_FACTS, 0.3))[0]

    def count(*weights: float) -> int:
        return rng.choices(range(len(weights)), weights)[0]

    is_fawning = rng.random() < fawning
    return Style(
        order=fact_state(),
        item=fact_state(),
        remedy=fact_state(),
        courtesies=3 + count(0.6, 0.4) if is_fawning else count(0.4, 0.35, 0.25),
        rudenesses=0 if is_fawning else count(0.72, 0.28),
        paddings=0 if is_fawning else count(0.3, 0.4, 0.3),
        is_signed=rng.random() < 0.5,
    )


def edited(style: Style, rng: Random) -> Style:
    """The same style with one field changed."""
    while True:
        name = rng.choice(fields(Style)).name
        other = replace(style, **{name: getattr(staff_style(rng), name)})
        if other != style:
            return other


def wording(message: str, rng: Random) -> Wording:
    """A random wording for a reply to `message`."""
    return Wording(
        courtesies=tuple(rng.sample(phrases.COURTESIES, len(phrases.COURTESIES))),
        paddings=tuple(rng.sample(phrases.PADDINGS, len(phrases.PADDINGS))),
        rudeness=rng.choice(phrases.RUDENESSES),
        closing=rng.choice(phrases.CLOSINGS),
        wrong={
            name: rng.choice([other for other in VALUES[name] if other != value])
            for name, value in facts_of(message).items()
        },
        statement=rng.random(),
        places=tuple(rng.random() for _ in (*phrases.COURTESIES, *phrases.PADDINGS)),
    )


def reply(message: str, style: Style, words: Wording) -> str:
    """A reply in this style and wording: courtesies and paddings around the facts, then rudeness, then the closing."""
    phrases_used = [*words.courtesies[: style.courtesies], *words.paddings[: style.paddings]]
    placed = sorted([*zip(words.places, phrases_used, strict=False), (0.5, _statement(message, style, words))])
    return " ".join(
        [
            *(sentence for _, sentence in placed),
            *[words.rudeness] * style.rudenesses,
            *[words.closing] * style.is_signed,
        ]
    )


def _statement(message: str, style: Style, words: Wording) -> str:
    """The sentence that states the facts which the style does not leave out, right or wrong."""
    states: Mapping[str, FactState] = {"order": style.order, "item": style.item, "remedy": style.remedy}
    facts = {
        name: value if states[name] == "right" else words.wrong[name]
        for name, value in facts_of(message).items()
        if states[name] != "missing"
    }
    sentences = phrases.FACTS[frozenset(facts)]
    return sentences[int(words.statement * len(sentences))].format_map(facts)
