"""From scored answers to preferences for the next round of data: the best and the worst answer to each prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kedge.evaluate.records import Scored


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    pairs: tuple[tuple[Scored, Scored], ...]
    """The better answer first."""
    ties: int
    """Prompts whose best and worst answer have the same score, or the same words: they prefer nothing."""
    unpaired: int
    """Prompts with fewer than two answers that say something and have a score."""


def preferences(answers: Sequence[Scored], source: str, *, tie: float) -> Preferences:
    """One pair a prompt: all of them would repeat the same answers many times. Of equal answers the first counts."""
    by_prompt: dict[int, list[Scored]] = {one.prompt: [] for one in answers}
    for one in answers:
        if math.isfinite(one.scores.get(source, math.nan)) and one.text.strip():
            by_prompt[one.prompt].append(one)
    pairs: list[tuple[Scored, Scored]] = []
    ties = unpaired = 0
    for fit in by_prompt.values():
        if len(fit) < 2:
            unpaired += 1
            continue
        best, worst = max(fit, key=lambda one: one.scores[source]), min(fit, key=lambda one: one.scores[source])
        if best.scores[source] - worst.scores[source] <= tie or best.text.split() == worst.text.split():
            ties += 1
        else:
            pairs.append((best, worst))
    return Preferences(pairs=tuple(pairs), ties=ties, unpaired=unpaired)
