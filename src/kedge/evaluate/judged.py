"""Win rates by judges that compare two answers in both orders, and what there is to say about such judges.

A judge that prefers an answer in one order and not in the other has decided nothing: that is a tie, and is counted. A
prompt is one observation, however many answers were compared on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from kedge.evaluate.length_control import PromptResult, length_controlled_estimates, tells_length
from kedge.evaluate.win_rates import Estimate, Outcome, share_interval, win_rate

MAJORITY = "majority"
"""What results call the verdict of all judges together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One comparison of a model's answer with the baseline's. Preferences are of the model's: 1, 0.5 (a tie) or 0."""

    prompt: int
    as_first: float | None
    """When the model's answer was shown first; None where the judge's reply could not be read."""
    as_second: float | None
    """When it was shown second."""
    length: int
    baseline_length: int
    probability: float | None = None
    """That the model's answer is better, by the judge's log-probabilities."""

    @property
    def is_readable(self) -> bool:
        return self.as_first is not None and self.as_second is not None

    @property
    def is_consistent(self) -> bool:
        """Whether both orders gave the same verdict."""
        return self.is_readable and self.as_first == self.as_second

    @property
    def preference(self) -> float | None:
        """The verdict in which both orders agree, and a tie where they do not; None where one could not be read.

        >>> Judged(prompt=0, as_first=1.0, as_second=0.5, length=1, baseline_length=1).preference
        0.5
        """
        if not self.is_readable:
            return None
        return self.as_first if self.is_consistent else 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRate:
    """A model against the baseline by one judge; `rate`, `low` and `high` are its win rate with a 95 % interval."""

    rate: float
    low: float
    high: float
    wins: float
    ties: float
    losses: float
    prompts: int
    comparisons: int
    inconsistent: int
    """Comparisons whose two orders disagree: ties."""
    unreadable: int
    """Comparisons with a reply that names no winner: left out."""
    length_controlled: Estimate | None
    """The rate if the answers were equally long."""
    weighted: Estimate | None
    """The mean probability of winning, where the judge gives log-probabilities."""
    first_place: float | None
    """Of all verdicts that name a winner, the share for the answer shown first: 0.5 from a judge without a bias."""
    longer: float | None
    """Of the comparisons that are decided between answers of unlike length, the share for the longer one."""


JudgedRates = Mapping[str, Mapping[str, JudgedRate]]
"""By model, then by judge; of several judges, `majority` too."""


def judged_rates(results: Mapping[str, Mapping[str, Sequence[Judged]]]) -> dict[str, dict[str, JudgedRate]]:
    """Win rates from comparisons, by judge and then by model; of several judges their majority too.

    A judge without a single readable comparison for a model has no rate for it.
    """
    everybody = dict(results)
    if len(results) > 1:
        models = next(iter(results.values()))
        everybody[MAJORITY] = {model: majority([by_model[model] for by_model in results.values()]) for model in models}
    rates: dict[str, dict[str, JudgedRate]] = {}
    for judge, by_model in everybody.items():
        controlled = _equal_length(by_model)
        for model, comparisons in by_model.items():
            rate = judged_rate(comparisons, length_controlled=controlled.get(model))
            if rate is not None:
                rates.setdefault(model, {})[judge] = rate
    return rates


def judged_rate(comparisons: Sequence[Judged], *, length_controlled: Estimate | None = None) -> JudgedRate | None:
    """None without a readable comparison."""
    outcomes = [_outcome(group) for group in _by_prompt(comparisons).values()]
    rate = win_rate(outcomes)
    if rate is None:
        return None
    readable = [comparison for comparison in comparisons if comparison.is_readable]
    return JudgedRate(
        **asdict(rate),
        comparisons=len(comparisons),
        inconsistent=sum(not comparison.is_consistent for comparison in readable),
        unreadable=len(comparisons) - len(readable),
        length_controlled=length_controlled,
        weighted=_weighted(readable),
        first_place=_first_place(readable),
        longer=length_report([(_decided(one), one.length, one.baseline_length) for one in readable]).longer,
    )


def preferences_by_prompt(comparisons: Sequence[Judged]) -> dict[int, float]:
    """The mean preference for the model on each prompt that has a readable comparison."""
    return {
        prompt: fmean(_decided(comparison) for comparison in group) for prompt, group in _by_prompt(comparisons).items()
    }


def majority(panel: Sequence[Sequence[Judged]]) -> list[Judged]:
    """Comparisons as most of the judges see them, the same ones in the same order of each; a tie where as many are for
    either. A judge whose reply could not be read, or who contradicts itself, has no vote, or that of a tie."""
    voted: list[Judged] = []
    for same in zip(*panel, strict=True):
        votes = [comparison.preference for comparison in same if comparison.preference is not None]
        balance = sum(vote - 0.5 for vote in votes)
        verdict = None if not votes else 0.5 + 0.5 * float(np.sign(balance))
        voted.append(
            Judged(
                prompt=same[0].prompt,
                as_first=verdict,
                as_second=verdict,
                length=same[0].length,
                baseline_length=same[0].baseline_length,
            )
        )
    return voted


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthReport:
    """How often a judge prefers the longer of two answers."""

    first: int
    second: int
    ties: int
    longer: float | None
    """Of the decided comparisons of answers of unlike length, the share that the longer one wins."""

    @property
    def decided(self) -> int:
        return self.first + self.second


def length_report(verdicts: Sequence[PromptResult]) -> LengthReport:
    """From one (preference for the first answer, its length, the other's length) a comparison.

    >>> length_report([(1.0, 9, 3), (0.0, 9, 3), (1.0, 4, 2), (0.5, 1, 2), (1.0, 5, 5)])
    LengthReport(first=3, second=1, ties=1, longer=0.6666666666666666)
    """
    decided = [(preference > 0.5, length - other) for preference, length, other in verdicts if preference != 0.5]
    unlike = [(is_first, gap) for is_first, gap in decided if gap]
    first = sum(is_first for is_first, _ in decided)
    return LengthReport(
        first=first,
        second=len(decided) - first,
        ties=len(verdicts) - len(decided),
        longer=fmean((gap > 0) == is_first for is_first, gap in unlike) if unlike else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OrdersReport:
    """A judge against known labels, over both orders."""

    comparisons: int
    right: float
    """Share whose two orders together lean to the right answer: one that is a tie leaves it to the other."""
    inconsistent: float
    """Share whose two orders disagree."""


def orders_report(decisions: Sequence[tuple[float, float]], labels: Sequence[float]) -> OrdersReport:
    """From the preference for the first answer, shown first and shown second, and whether it is the better one (1 or
    0). This is how JudgeBench counts (Tan et al. 2024).

    >>> orders_report([(1.0, 1.0), (1.0, 0.0), (0.5, 0.0), (0.0, 0.0)], [1, 1, 0, 1])
    OrdersReport(comparisons=4, right=0.5, inconsistent=0.5)
    """
    pairs = list(zip(decisions, labels, strict=True))
    return OrdersReport(
        comparisons=len(pairs),
        right=fmean((as_first + as_second - 1) * (label - 0.5) > 0 for (as_first, as_second), label in pairs),
        inconsistent=fmean(as_first != as_second for (as_first, as_second), _ in pairs),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceSummary:
    """Preferences from 0 to 1 as AlpacaEval reports them, as shares."""

    win_rate: float
    standard_error: float
    discrete_win_rate: float
    """Every preference above ½ a win, of ½ half a win."""


def preference_summary(preferences: Sequence[float]) -> PreferenceSummary:
    """
    >>> preference_summary([1.0, 0.6, 0.5, 0.1]).discrete_win_rate
    0.625
    """
    preference_N = np.asarray(preferences, dtype=np.float64)
    wins_N = (np.sign(preference_N - 0.5) + 1) / 2
    return PreferenceSummary(
        win_rate=float(preference_N.mean()),
        standard_error=float(preference_N.std(ddof=1) / np.sqrt(len(preference_N))),
        discrete_win_rate=float(wins_N.mean()),
    )


def judged_lines(rates: JudgedRates, baseline: str) -> list[str]:
    """A line of text for each model and judge."""
    lines: list[str] = []
    for model, by_judge in rates.items():
        for judge, rate in by_judge.items():
            equal = rate.length_controlled
            at_equal = f"; {equal.mean:.1%} [{equal.low:.1%}, {equal.high:.1%}] at equal length" if equal else ""
            doubts = f"{rate.inconsistent:,} inconsistent, {rate.unreadable:,} unreadable of {rate.comparisons:,}"
            lines.append(
                f"{judge}: {model} over {baseline} {rate.rate:.1%} [{rate.low:.1%}, {rate.high:.1%}], "
                f"ties {rate.ties:.1%}{at_equal}; {doubts}"
            )
    return lines


def as_dict(rates: JudgedRates) -> dict[str, Any]:
    return {model: {judge: asdict(rate) for judge, rate in by_judge.items()} for model, by_judge in rates.items()}


def _by_prompt(comparisons: Sequence[Judged]) -> dict[int, list[Judged]]:
    """The readable comparisons of each prompt that has one."""
    groups: dict[int, list[Judged]] = {}
    for comparison in comparisons:
        if comparison.is_readable:
            groups.setdefault(comparison.prompt, []).append(comparison)
    return groups


def _decided(comparison: Judged) -> float:
    preference = comparison.preference
    return 0.5 if preference is None else preference


def _outcome(group: Sequence[Judged]) -> Outcome:
    preferences = [_decided(comparison) for comparison in group]
    wins, losses = preferences.count(1.0) / len(group), preferences.count(0.0) / len(group)
    return Outcome(wins, preferences.count(0.5) / len(group), losses)


def prompt_results(by_model: Mapping[str, Sequence[Judged]]) -> dict[str, dict[int, PromptResult]]:
    """By model and prompt the preference and the mean lengths, on the prompts that have a readable comparison of all
    models."""
    groups = {model: _by_prompt(comparisons) for model, comparisons in by_model.items()}
    shared = [prompt for prompt in next(iter(groups.values()), {}) if all(prompt in own for own in groups.values())]
    return {model: {prompt: _prompt_result(own[prompt]) for prompt in shared} for model, own in groups.items()}


def _equal_length(by_model: Mapping[str, Sequence[Judged]]) -> dict[str, Estimate]:
    """Rates at equal length of the models, on the prompts that have a readable comparison of each."""
    results = {model: list(own.values()) for model, own in prompt_results(by_model).items()}
    fitting = {model: rows for model, rows in results.items() if rows and tells_length(rows)}
    return length_controlled_estimates(fitting) if fitting else {}


def _prompt_result(group: Sequence[Judged]) -> PromptResult:
    return (
        _outcome(group).rate,
        fmean(comparison.length for comparison in group),
        fmean(comparison.baseline_length for comparison in group),
    )


def _weighted(readable: Sequence[Judged]) -> Estimate | None:
    by_prompt: dict[int, list[float]] = {}
    for comparison in readable:
        if comparison.probability is not None:
            by_prompt.setdefault(comparison.prompt, []).append(comparison.probability)
    if not by_prompt:
        return None
    mean_P = np.array([fmean(values) for values in by_prompt.values()])
    low, high = share_interval(mean_P)
    return Estimate(mean=float(mean_P.mean()), low=low, high=high, prompts=len(mean_P))


def _first_place(readable: Sequence[Judged]) -> float | None:
    for_first = [
        verdict == wins
        for comparison in readable
        for verdict, wins in ((comparison.as_first, 1.0), (comparison.as_second, 0.0))
        if verdict != 0.5
    ]
    return fmean(for_first) if for_first else None
