"""Scored answers of models, and the preferences that they give for the next round of data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAnswer:
    """One answer of one model to one prompt, with its scores."""

    model: str
    prompt: int
    """Which of the prompts it answers; all models answer the same ones."""
    number: int
    """Which answer of the model to this prompt: 0, 1, …"""
    tokens: tuple[int, ...]
    """The answer without the token that ended it."""
    text: str
    is_finished: bool
    scores: Mapping[str, float]
    """By source (`reward`, `gold`); NaN where the source gave no score."""
    kl: float | None = None
    """log p(answer | the model) − log p(answer | the baseline) in nats; None where it was not measured."""

    def has_score(self, source: str) -> bool:
        return math.isfinite(self.scores.get(source, math.nan))


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    pairs: tuple[tuple[ModelAnswer, ModelAnswer], ...]
    """The better answer first."""
    ties: int
    """Prompts whose best and worst answer have the same score, or the same words: no preference."""
    unpaired: int
    """Prompts with fewer than two answers that are scored and not blank."""


def preferences(answers: Sequence[ModelAnswer], source: str, *, tie: float) -> Preferences:
    """The best against the worst answer to each prompt; scores that differ by at most `tie` are equal.

    One pair a prompt, for all of them would repeat the same answers many times. Of answers with equal scores the first
    counts.
    """
    by_prompt: dict[int, list[ModelAnswer]] = {answer.prompt: [] for answer in answers}
    for answer in answers:
        if answer.has_score(source) and answer.text.strip():
            by_prompt[answer.prompt].append(answer)
    pairs: list[tuple[ModelAnswer, ModelAnswer]] = []
    ties = unpaired = 0
    for scored in by_prompt.values():
        if len(scored) < 2:
            unpaired += 1
            continue
        best = max(scored, key=lambda answer: answer.scores[source])
        worst = min(scored, key=lambda answer: answer.scores[source])
        if best.scores[source] - worst.scores[source] <= tie or best.text.split() == worst.text.split():
            ties += 1
        else:
            pairs.append((best, worst))
    return Preferences(pairs=tuple(pairs), ties=ties, unpaired=unpaired)
