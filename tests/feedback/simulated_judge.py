"""Items with people's verdicts and a judge whose biases are planted, without a network."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from kedge.feedback.alt_test import Choice
from kedge.feedback.judge_figures import JudgedItem, Replies

OTHER: dict[Choice, Choice] = {"first": "second", "second": "first", "tie": "tie"}


@dataclass(frozen=True, kw_only=True)
class Planted:
    """As `kedge.testing.stub_judge.StubJudge` has them; `length` is a sd of the difference in length."""

    strength: float = 2.0
    position: float = 0.0
    length: float = 0.0
    garbage: float = 0.0
    own: float = 0.0
    """Log-odds for answers of its own family."""


def make_items(seed: int, count: int = 400, *, people: float = 0.9, prompts: int | None = None) -> list[JudgedItem]:
    """Items with three people who name the truth, first or second, with a probability; lengths are unrelated to it."""
    rng = np.random.default_rng(seed)
    items = list[JudgedItem]()
    for number in range(count):
        truth: Choice = "first" if rng.random() < 0.5 else "second"
        verdicts: dict[str, Choice] = {
            f"p{place}": truth if rng.random() < people else OTHER[truth] for place in range(3)
        }
        own = ("judge-small", "other-1") if rng.random() < 0.5 else ("other-2", "judge-large")
        lengths = (int(rng.integers(50, 900)), int(rng.integers(50, 900)))
        items.append(JudgedItem(prompt=number % (prompts or count), people=verdicts, lengths=lengths, models=own))
    return items


def reply(items: list[JudgedItem], planted: Planted, seed: int) -> Replies:
    """The judge in both orders; it sees what most people see."""
    rng = np.random.default_rng(seed)
    spread = float(np.std([item.lengths[0] - item.lengths[1] for item in items]))
    columns: list[list[Choice | None]] = [[], []]
    for item in items:
        votes = list(item.people.values())
        worth = (votes.count("first") - votes.count("second")) / len(votes)
        own = [model is not None and "judge" in model for model in item.models]
        log_odds = planted.strength * worth + planted.length * (item.lengths[0] - item.lengths[1]) / spread
        log_odds += planted.own * (own[0] - own[1])
        for column, is_first_a in zip(columns, (True, False), strict=True):
            if rng.random() < planted.garbage:
                column.append(None)
                continue
            is_first = rng.random() < 1 / (1 + math.exp(-log_odds))
            if rng.random() < 2 * planted.position:
                is_first = is_first_a
            column.append("first" if is_first else "second")
    return Replies(as_a=columns[0], as_b=columns[1])


def swapped(items: list[JudgedItem], replies: Replies) -> tuple[list[JudgedItem], Replies]:
    """The same with first and second exchanged."""
    turned = [
        replace(
            item,
            people={person: OTHER[verdict] for person, verdict in item.people.items()},
            lengths=(item.lengths[1], item.lengths[0]),
            models=(item.models[1], item.models[0]),
        )
        for item in items
    ]
    assert replies.as_b is not None
    columns = [
        [None if verdict is None else OTHER[verdict] for verdict in order] for order in (replies.as_b, replies.as_a)
    ]
    return turned, Replies(as_a=columns[0], as_b=columns[1])
