"""The rules of rounds, pure: what old labels weigh, what counts as drift, when to stop, which round is the best."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kedge.core.stats import wilson
from kedge.recipe.round_settings import DriftLimits, GainSettings

Figures = Mapping[str, Any]
"""What a stage `drift` has measured: its `drift.json`."""

BEST_RULE = (
    "of the rounds whose gate and drift checks did not fail, the one whose policy has the highest mean of `gold` on "
    "the prompts that all rounds are compared on; without `gold`, the highest strength by the judge's win rates over "
    "the round before, added up in log-odds; the earlier one of equals; the first policy where no round is better"
)


def weight_of_age(age: int, halves_after: float | None) -> float:
    """What a label counts that is `age` rounds old.

    >>> [round(weight_of_age(age, 2), 3) for age in range(5)], weight_of_age(7, None)
    ([1.0, 0.707, 0.5, 0.354, 0.25], 1.0)
    """
    return 1.0 if halves_after is None else 0.5 ** (age / halves_after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One figure beside its limit; a figure that was not measured fails nothing, and says why it is not there."""

    name: str
    value: float | None
    limit: float | None
    has_failed: bool
    words: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def drift_checks(figures: Figures, limits: DriftLimits) -> list[Check]:
    """Every figure beside its limit. Of shares it is the bound of their interval that must be beyond the limit: a few
    pairs are no evidence of drift."""
    return [
        *_policy_checks(figures.get("policy") or {}, limits),
        *_reward_checks(figures.get("reward") or {}, limits),
        *_label_checks(figures.get("labels") or {}, limits),
    ]


def _policy_checks(policy: Figures, limits: DriftLimits) -> Iterator[Check]:
    yield _above("kl_previous", policy.get("kl_previous"), limits.kl_previous, "nats from the round before")
    yield _above("kl_first", policy.get("kl_first"), limits.kl_first, "nats from the first policy")
    length, before = policy.get("length"), policy.get("previous_length")
    ratio = length / before if length and before else None
    most = limits.length_ratio
    has_failed = ratio is not None and most is not None and not 1 / most <= ratio <= most
    yield _check("length_ratio", ratio, most, has_failed, "times as long as before")
    refused, refused_before, answers = (policy.get(name) for name in ("refusals", "previous_refusals", "answers"))
    rise = low = None
    if refused is not None and refused_before is not None and answers:
        rise = refused - refused_before
        low = wilson(refused * answers, answers)[0] - refused_before
    has_failed = low is not None and limits.refusal_rise is not None and low > limits.refusal_rise
    yield _check("refusal_rise", rise, limits.refusal_rise, has_failed, "more of the answers refuse")
    distinct, distinct_before = policy.get("distinct"), policy.get("previous_distinct")
    share = distinct / distinct_before if distinct is not None and distinct_before else None
    yield _below("distinct_ratio", share, limits.distinct_ratio, "of the distinct word pairs of before")
    rate: Figures = policy.get("win_rate") or {}
    has_failed = bool(rate) and limits.win_rate is not None and rate["high"] < limits.win_rate
    yield _check("win_rate", rate.get("value"), limits.win_rate, has_failed, "of the comparisons with the round before")


def _reward_checks(reward: Figures, limits: DriftLimits) -> Iterator[Check]:
    anchor: Figures = reward.get("anchor") or {}
    yield _below("spearman", anchor.get("spearman"), limits.spearman, "rank correlation with the old reward model")
    flips = anchor.get("flips")
    low = wilson(flips * anchor["pairs"], anchor["pairs"])[0] if flips is not None else None
    has_failed = low is not None and limits.flips is not None and low > limits.flips
    yield _check("flips", flips, limits.flips, has_failed, "of the anchor's pairs are ordered differently")
    for name, held_out in (reward.get("heldout") or {}).items():
        before = held_out.get("then")
        if before is None:  # of this round: nothing can have been forgotten yet
            continue
        loss, at_best = before - held_out["accuracy"], before - held_out["high"]
        has_failed = limits.forgetting is not None and at_best > limits.forgetting
        words = f"less accuracy on the held-out labels of {name}"
        yield _check(f"forgetting {name}", loss, limits.forgetting, has_failed, words)
    yield _above("ece", reward.get("ece"), limits.ece, "expected calibration error")
    yield _above("shift", reward.get("shift"), limits.shift, "sd that the old policy's scores have moved", signed=True)


def _label_checks(labels: Figures, limits: DriftLimits) -> Iterator[Check]:
    for name, limit, whose in (("alpha", limits.alpha_drop, "people's α"), ("kappa", limits.kappa_drop, "judge's κ")):
        now, first = labels.get(name), labels.get(f"first_{name}")
        drop = first - now if now is not None and first is not None else None
        # Where an interval is known, its upper bound has to be too low: a few comparisons are no evidence.
        at_best = drop if drop is None else drop - (labels.get(f"{name}_high", now) - now)
        has_failed = limit is not None and at_best is not None and at_best > limit
        yield _check(f"{name}_drop", drop, limit, has_failed, f"less of {whose} than in round 1")


def _above(name: str, value: float | None, limit: float | None, words: str, *, signed: bool = False) -> Check:
    size = abs(value) if signed and value is not None else value
    return _check(name, value, limit, size is not None and limit is not None and size > limit, words)


def _below(name: str, value: float | None, limit: float | None, words: str) -> Check:
    return _check(name, value, limit, value is not None and limit is not None and value < limit, words)


def _check(name: str, value: float | None, limit: float | None, has_failed: bool, words: str) -> Check:
    if value is None:
        return Check(name=name, value=None, limit=limit, has_failed=False, words="not measured")
    bound = "" if limit is None else f" (limit {limit:g})"
    return Check(name=name, value=value, limit=limit, has_failed=has_failed, words=f"{value:.3g} {words}{bound}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What is known of a round that is over."""

    number: int
    gold: float | None
    """Mean of `gold` of its policy, on the prompts that all rounds are compared on."""
    previous_gold: float | None
    win_rate: float | None
    """Over the policy of the round before, by gold, else by the judge."""
    has_passed: bool
    """Neither its gate nor a drift check has failed."""


def gains(results: Sequence[RoundResult], over: str) -> list[float | None]:
    """By round what it gained: in the mean of gold, else in the win rate beyond one half.

    >>> after = RoundResult(number=1, gold=3.0, previous_gold=1.0, win_rate=0.8, has_passed=True)
    >>> gains([after], "previous")
    [2.0]
    """
    first = results[0].previous_gold if results else None
    return [_gain(result, first if over == "first" else result.previous_gold) for result in results]


def _gain(result: RoundResult, before: float | None) -> float | None:
    if result.gold is not None and before is not None:
        return result.gold - before
    return None if result.win_rate is None else result.win_rate - 0.5


def has_converged(results: Sequence[RoundResult], rule: GainSettings) -> str | None:
    """Why another round is not worth it; None where it is, or nothing is known."""
    needed = 2 if rule.twice else 1
    recent = gains(results, rule.over)[-needed:]
    known = [gain for gain in recent if gain is not None and gain < rule.less_than]
    if len(known) < needed:
        return None
    shown = " and ".join(f"{gain:+.3f}" for gain in known)
    return f"gained {shown} over the {rule.over} policy, less than {rule.less_than:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best round, and why; round 0 is the policy that the first round began with."""

    round: int
    evidence: Mapping[str, float]
    """By round what it was chosen by; a round that is missing was no candidate, or has no figure."""
    words: str


def best_round(results: Sequence[RoundResult]) -> Best:
    """By `BEST_RULE`."""
    strengths, measure = _strengths(results)
    passed = {result.number for result in results if result.has_passed}
    candidates = {number: value for number, value in strengths.items() if number == 0 or number in passed}
    if not strengths:
        last = max(passed, default=0)
        words = (
            f"round {last} is kept: neither gold nor a judge has compared the rounds, and it is the last that passed"
        )
        return Best(round=last, evidence={}, words=words)
    best = max(candidates, key=lambda number: (candidates[number], -number))
    evidence = {str(number): value for number, value in candidates.items()}
    listed = ", ".join(f"{_name(number)} {value:.3f}" for number, value in candidates.items())
    out = [str(result.number) for result in results if not result.has_passed]
    left_out = f"; round {' and '.join(out)} did not pass" if out else ""
    return Best(round=best, evidence=evidence, words=f"{_name(best)} is the best by {measure}: {listed}{left_out}")


def _strengths(results: Sequence[RoundResult]) -> tuple[dict[int, float], str]:
    """By round a number that rounds can be compared by, and what it is; 0 is the first policy."""
    if results and all(result.gold is not None for result in results):
        first = results[0].previous_gold
        start = {} if first is None else {0: first}
        return {**start, **{result.number: result.gold or 0.0 for result in results}}, "the mean of gold"
    if results and all(result.win_rate is not None for result in results):
        strengths, total = {0: 0.0}, 0.0
        for result in results:
            total += _log_odds(result.win_rate or 0.0)
            strengths[result.number] = total
        return strengths, "the judge's win rates, in log-odds"
    return {}, ""


def _name(number: int) -> str:
    return f"round {number}" if number else "the first policy"


def _log_odds(share: float) -> float:
    """Of a share that may be 0 or 1, which a few comparisons can give: held within 1 and 99 %."""
    held = min(max(share, 0.01), 0.99)
    return math.log(held / (1 - held))


def reward_age(figures: Figures, *, made_in: int, now: int) -> float | None:
    """How far the policy that round `now` begins with is from the one whose answers a reward model of round `made_in`
    was labelled on, in nats; `figures` are those of the round before. None where it was not measured."""
    if made_in >= now:
        return 0.0
    policy: Figures = figures.get("policy") or {}
    return policy.get("kl_previous" if made_in == now - 1 else "kl_first")
