"""Reward `brevity`: 1 for an empty answer, 0 for one of `longest` characters or more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kedge.core.answers import Answer


class Brevity:
    def __init__(self, longest: int) -> None:
        self.longest = longest

    def score(self, answers: Sequence[Answer]) -> list[float]:
        return [1.0 - min(len(answer.text), self.longest) / self.longest for answer in answers]


def make(options: Mapping[str, Any], context: object) -> Brevity:
    """`context` has the folder of the recipe and the seed of the run, which are not needed here."""
    return Brevity(int(options["longest"]))
