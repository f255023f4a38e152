"""The numbers of an evaluation, from scored answers: each model by itself, and against the baseline, the first one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from statistics import fmean
from typing import Any

from kedge.core.errors import DataError
from kedge.core.text_measures import distinct, repetition
from kedge.evaluate.answers import ModelAnswer
from kedge.evaluate.length_control import PromptResult, length_controlled_estimates
from kedge.evaluate.win_rates import Estimate, WinRate, estimate, outcome_of, win_rate

REPETITION_N, DISTINCT_N = 4, 2
_NONE = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSummary:
    """The scores that one source gives a model. Answers without a score are counted, and are not in the mean."""

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


def evaluate(answers: Sequence[ModelAnswer], *, tie: float, seed: int) -> Evaluation:
    """The first model that occurs is the baseline. All must have answered the same prompts."""
    by_model = {model: list(own) for model, own in groupby(answers, key=lambda answer: answer.model)}
    baseline = next(iter(by_model))
    prompts = {answer.prompt for answer in by_model[baseline]}
    for model, own in by_model.items():
        if {answer.prompt for answer in own} != prompts:
            raise DataError(f"{model} and {baseline} have answered different prompts, so they cannot be compared")
    sources = list(answers[0].scores)
    others = {model: own for model, own in by_model.items() if model != baseline}
    at_equal_length = {source: equal_length_rates(others, by_model[baseline], source, tie=tie) for source in sources}
    comparisons = {
        model: {
            source: replace(comparison, length_controlled=at_equal_length[source].get(model))
            for source in sources
            if (comparison := compare(own, by_model[baseline], source, tie=tie, seed=seed)) is not None
        }
        for model, own in others.items()
    }
    return Evaluation(
        baseline=baseline,
        prompts=len(prompts),
        models={model: summarise(own, sources, seed=seed) for model, own in by_model.items()},
        comparisons=comparisons,
    )


def summarise(answers: Sequence[ModelAnswer], sources: Sequence[str], *, seed: int) -> ModelSummary:
    """One model by itself."""

    def of_source(source: str) -> SourceSummary:
        scored = [answer for answer in answers if answer.has_score(source)]
        mean = estimate(_mean_by_prompt(scored, lambda answer: answer.scores[source]), seed=seed)
        return SourceSummary(mean=mean, unscored=len(answers) - len(scored))

    with_kl = [answer for answer in answers if answer.kl is not None]
    return ModelSummary(
        answers=len(answers),
        scores={source: of_source(source) for source in sources},
        kl=estimate(_mean_by_prompt(with_kl, lambda answer: answer.kl or 0.0), seed=seed),
        length=estimate(_mean_by_prompt(answers, lambda answer: len(answer.tokens)), seed=seed),
        finished=fmean(answer.is_finished for answer in answers),
        repetition=fmean(repetition(answer.tokens, n=REPETITION_N) for answer in answers),
        distinct=distinct([answer.tokens for answer in answers], n=DISTINCT_N),
    )


def compare(
    answers: Sequence[ModelAnswer], baseline: Sequence[ModelAnswer], source: str, *, tie: float, seed: int
) -> Comparison | None:
    """One model against the baseline by one source; None where no prompt has scores of both."""
    ours, theirs = _scored_by_prompt(answers, source), _scored_by_prompt(baseline, source)
    prompts = [prompt for prompt in ours if ours[prompt] and theirs[prompt]]
    scores = [
        (
            [answer.scores[source] for answer in ours[prompt]],
            [answer.scores[source] for answer in theirs[prompt]],
        )
        for prompt in prompts
    ]
    rate = win_rate([outcome_of(own, other, tie=tie) for own, other in scores])
    gain = estimate([fmean(own) - fmean(other) for own, other in scores], seed=seed)
    if rate is None or gain is None:
        return None
    return Comparison(win_rate=rate, length_controlled=None, gain=gain, left_out=len(ours) - len(prompts))


def equal_length_rates(
    models: Mapping[str, Sequence[ModelAnswer]], baseline: Sequence[ModelAnswer], source: str, *, tie: float
) -> dict[str, Estimate]:
    """Win rates over the baseline if answers were equally long, on the prompts where all have a score.

    A model whose answers are all longer, or all shorter, by the same is left out: length cannot be told from it.
    """
    theirs = _scored_by_prompt(baseline, source)
    ours = {model: _scored_by_prompt(answers, source) for model, answers in models.items()}
    prompts = [prompt for prompt in theirs if theirs[prompt] and all(own[prompt] for own in ours.values())]
    results = {
        model: [_prompt_result(own[prompt], theirs[prompt], source, tie=tie) for prompt in prompts]
        for model, own in ours.items()
    }
    return length_controlled_estimates({model: rows for model, rows in results.items() if tells_length(rows)})


def tells_length(rows: Sequence[PromptResult]) -> bool:
    """Whether lengths differ from prompt to prompt, or not at all: else length cannot be told from the model."""
    gaps = {length - other for _, length, other in rows}
    return len(gaps) > 1 or gaps == {0.0}


def _prompt_result(
    answers: Sequence[ModelAnswer], baseline: Sequence[ModelAnswer], source: str, *, tie: float
) -> PromptResult:
    scores, others = ([answer.scores[source] for answer in group] for group in (answers, baseline))
    length, other_length = (fmean(len(answer.tokens) for answer in group) for group in (answers, baseline))
    return outcome_of(scores, others, tie=tie).rate, length, other_length


def table_lines(evaluation: Evaluation) -> list[str]:
    """A table of text: a column a model, the baseline first, each number with its 95 % interval in brackets."""
    columns = [
        {"": model, **_column(summary, evaluation.comparisons.get(model, {}), evaluation.baseline)}
        for model, summary in evaluation.models.items()
    ]
    titles = list(columns[0])
    widths = [max(map(len, titles)), *(max(map(len, column.values())) for column in columns)]
    rows = ([title, *(column[title] for column in columns)] for title in titles)
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _column(summary: ModelSummary, against: Mapping[str, Comparison], baseline: str) -> dict[str, str]:
    column: dict[str, str] = {}
    for source, scores in summary.scores.items():
        comparison = against.get(source)
        column |= {
            f"{source}, mean": _number(scores.mean, 3),
            f"{source}, win rate over {baseline}": _share(comparison.win_rate) if comparison else _NONE,
            f"{source}, at equal length": _share(comparison.length_controlled) if comparison else _NONE,
            f"{source}, ties": f"{comparison.win_rate.ties:.1%}" if comparison else _NONE,
        }
    return column | {
        "KL, nats": _number(summary.kl, 2),
        "length, tokens (end of turn aside)": _number(summary.length, 1),
        "finished": f"{summary.finished:.1%}",
        "repetition": f"{summary.repetition:.3f}",
        "distinct-2": f"{summary.distinct:.3f}",
    }


def _number(mean: Estimate | None, places: int) -> str:
    if mean is None:
        return _NONE
    return f"{mean.mean:.{places}f} [{mean.low:.{places}f}, {mean.high:.{places}f}]"


def _share(rate: WinRate | Estimate | None) -> str:
    if rate is None:
        return _NONE
    middle = rate.rate if isinstance(rate, WinRate) else rate.mean
    return f"{middle:.1%} [{rate.low:.1%}, {rate.high:.1%}]"


def _scored_by_prompt(answers: Sequence[ModelAnswer], source: str) -> dict[int, list[ModelAnswer]]:
    """The answers to each prompt that have a score."""
    by_prompt: dict[int, list[ModelAnswer]] = {answer.prompt: [] for answer in answers}
    for answer in answers:
        if answer.has_score(source):
            by_prompt[answer.prompt].append(answer)
    return by_prompt


def _mean_by_prompt(answers: Sequence[ModelAnswer], number: Callable[[ModelAnswer], float]) -> list[float]:
    """The mean of each prompt that has answers."""
    by_prompt: dict[int, list[float]] = {}
    for answer in answers:
        by_prompt.setdefault(answer.prompt, []).append(number(answer))
    return [fmean(numbers) for numbers in by_prompt.values()]
