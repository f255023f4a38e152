"""All numbers of an evaluation, from the scored answers: each model by itself, and against the first one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, product
from statistics import fmean
from typing import Any

from kedge.core.errors import DataError
from kedge.core.text_measures import distinct, repetition
from kedge.evaluate.intervals import Estimate, estimate
from kedge.evaluate.length_control import Compared, length_controlled
from kedge.evaluate.records import Scored
from kedge.evaluate.win_rates import WinRate, compared, win_rate

REPETITION_N, DISTINCT_N = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSummary:
    """What one source says of a model. Answers without a score are counted, and are not in the mean."""

    mean: Estimate | None
    unscored: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """`kl` is the distance from the baseline in nats a sequence: the mean of log p − log p_baseline over answers."""

    answers: int
    scores: Mapping[str, SourceSummary]
    kl: Estimate | None
    length: Estimate | None
    """Tokens of an answer."""
    finished: float
    """Share of the answers that ended by themselves."""
    repetition: float
    """Mean share of the 4-grams of an answer that repeat an earlier one."""
    distinct: float
    """Distinct 2-grams over all 2-grams of all answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One model against the baseline by one source, on the prompts where both have a score."""

    win_rate: WinRate
    length_controlled: Estimate | None
    """The win rate if the answers were equally long."""
    gain: Estimate
    """By how much the mean score of a prompt is higher."""
    left_out: int
    """Prompts on which one of the two has no score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    baseline: str
    prompts: int
    models: Mapping[str, ModelSummary]
    comparisons: Mapping[str, Mapping[str, Comparison]]
    """By model, then by source."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(answers: Sequence[Scored], *, tie: float, seed: int) -> Evaluation:
    """The first model that occurs is the baseline. All must have answered the same prompts."""
    by_model = {model: list(own) for model, own in groupby(answers, key=lambda one: one.model)}
    baseline = next(iter(by_model))
    asked = {one.prompt for one in by_model[baseline]}
    for model, own in by_model.items():
        if {one.prompt for one in own} != asked:
            raise DataError(f"{model} and {baseline} have answered different prompts, so they cannot be compared")
    sources = list(answers[0].scores)
    comparisons = {
        model: {
            source: found
            for source in sources
            if (found := compare(own, by_model[baseline], source, tie=tie, seed=seed)) is not None
        }
        for model, own in by_model.items()
        if model != baseline
    }
    return Evaluation(
        baseline=baseline,
        prompts=len(asked),
        models={model: summarise(own, sources, seed=seed) for model, own in by_model.items()},
        comparisons=comparisons,
    )


def summarise(answers: Sequence[Scored], sources: Sequence[str], *, seed: int) -> ModelSummary:
    """One model by itself."""

    def summary(source: str) -> SourceSummary:
        scored = [one for one in answers if math.isfinite(one.scores[source])]
        mean = estimate(_by_prompt(scored, lambda one: one.scores[source]), seed=seed)
        return SourceSummary(mean=mean, unscored=len(answers) - len(scored))

    with_kl = [one for one in answers if one.kl is not None]
    return ModelSummary(
        answers=len(answers),
        scores={source: summary(source) for source in sources},
        kl=estimate(_by_prompt(with_kl, lambda one: one.kl or 0.0), seed=seed),
        length=estimate(_by_prompt(answers, lambda one: len(one.tokens)), seed=seed),
        finished=fmean(one.is_finished for one in answers),
        repetition=fmean(repetition(one.tokens, n=REPETITION_N) for one in answers),
        distinct=distinct([one.tokens for one in answers], n=DISTINCT_N),
    )


def compare(
    theirs: Sequence[Scored], base: Sequence[Scored], source: str, *, tie: float, seed: int
) -> Comparison | None:
    """None where no prompt has scores of both."""
    ours, others = _scored(theirs, source), _scored(base, source)
    both = [prompt for prompt in ours if ours[prompt] and others[prompt]]
    scores = [
        ([one.scores[source] for one in ours[prompt]], [one.scores[source] for one in others[prompt]])
        for prompt in both
    ]
    rate = win_rate([compared(own, other, tie=tie) for own, other in scores], seed=seed)
    gain = estimate([fmean(own) - fmean(other) for own, other in scores], seed=seed)
    if rate is None or gain is None:
        return None
    items = [
        Compared(
            prompt=prompt,
            outcome=compared([one.scores[source]], [other.scores[source]], tie=tie).rate,
            longer=len(one.tokens) - len(other.tokens),
            weight=1 / (len(ours[prompt]) * len(others[prompt])),
        )
        for prompt in both
        for one, other in product(ours[prompt], others[prompt])
    ]
    return Comparison(
        win_rate=rate,
        length_controlled=length_controlled(items, seed=seed),
        gain=gain,
        left_out=len(ours) - len(both),
    )


def _scored(answers: Sequence[Scored], source: str) -> dict[int, list[Scored]]:
    """The answers to each prompt that have a score."""
    found: dict[int, list[Scored]] = {one.prompt: [] for one in answers}
    for one in answers:
        if math.isfinite(one.scores[source]):
            found[one.prompt].append(one)
    return found


def _by_prompt(answers: Sequence[Scored], number: Callable[[Scored], float]) -> list[float]:
    """The mean of each prompt that has answers."""
    found: dict[int, list[float]] = {}
    for one in answers:
        found.setdefault(one.prompt, []).append(number(one))
    return [fmean(numbers) for numbers in found.values()]
