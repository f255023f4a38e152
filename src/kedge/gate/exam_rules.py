"""Rules about exams: paired with the baseline (`keep`, `improve`), or the candidate alone (`limit`)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean

from kedge.core.suggest import did_you_mean
from kedge.evaluate import non_inferiority, tango
from kedge.evaluate.bounds import mean_bounds
from kedge.evaluate.paired import POWER, items_needed, smallest_margin, superiority
from kedge.gate.evidence import Item, Unmeasured
from kedge.gate.results import Case, RuleResult, below
from kedge.gate.rules import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """The items of one metric that both models have a score for."""

    items: tuple[tuple[Item, Item], ...]
    """Of the candidate, and of the baseline."""
    is_less_better: bool
    left_out: int

    def scores(self) -> tuple[list[float], list[float]]:
        """Of both models, more always being better."""
        columns = ([item.score for item in column] for column in zip(*self.items, strict=True))
        first, second = columns
        if not self.is_less_better:
            return first, second
        top = 1.0 if all(0 <= score <= 1 for score in (*first, *second)) else 0.0
        return [top - score for score in first], [top - score for score in second]

    def clusters(self) -> list[Hashable] | None:
        return _clusters([item for item, _ in self.items])

    @property
    def independent(self) -> int:
        """Clusters, or items where each stands alone."""
        return len({item.cluster for item, _ in self.items})

    def by(self, field: str) -> dict[str, Pairs]:
        parts: dict[str, list[tuple[Item, Item]]] = {}
        for pair in self.items:
            groups = pair[0].groups
            if field not in groups:
                raise Unmeasured(
                    f"an item has no field {field!r}{did_you_mean(field, groups)}; its fields: "
                    f"{', '.join(groups) or 'none'}"
                )
            parts.setdefault(groups[field], []).append(pair)
        return {value: replace(self, items=tuple(items), left_out=0) for value, items in parts.items()}


def pairs_of(rule: Rule, case: Case) -> Pairs:
    exam, metric = case.evidence.resolve(rule.metric)
    candidate = case.evidence.of(exam, metric, "candidate")
    baseline = case.evidence.of(exam, metric, "baseline")
    both = [
        (own, baseline[name]) for name, own in candidate.items() if name in baseline and case.keeps(exam, own.cluster)
    ]
    if not both:
        raise Unmeasured(f"{rule.metric}: no item that both models have a score for is left")
    every = sum(case.keeps(exam, item.cluster) for item in {**candidate, **baseline}.values())
    is_less_better = case.evidence.exams[exam].better[metric] == "less"
    return Pairs(items=tuple(both), is_less_better=is_less_better, left_out=every - len(both))


def _clusters(items: Sequence[Item]) -> list[Hashable] | None:
    """None where every item stands alone: then there are exact methods for 0 and 1."""
    names: list[Hashable] = [item.cluster for item in items]
    return names if len(set(names)) < len(names) else None


def keep(rule: Rule, pairs: Pairs, case: Case) -> RuleResult:
    candidate, baseline = pairs.scores()
    clusters = pairs.clusters()
    if pairs.independent < 2:
        note = "a single item, or a single cluster of items, says nothing about others"
        return RuleResult(
            section=rule.section,
            metric=rule.metric,
            verdict="undecided",
            threshold=rule.threshold,
            value=fmean(candidate) - fmean(baseline),
            low=None,
            high=None,
            items=len(candidate),
            note=note,
        )
    test = non_inferiority(candidate, baseline, margin=rule.threshold, alpha=case.alpha, clusters=clusters)
    verdict, low, high = test.verdict, test.low, test.high
    if low == high:  # no item differs, so that a variance of what differs is 0 however few they are
        bounds = tango(0, 0, pairs.independent, level=1 - 2 * case.alpha)
        low, high = (test.difference + bound for bound in bounds)
        verdict = "pass" if low > -rule.threshold else "fail" if high < -rule.threshold else "undecided"
    count = len(pairs.items)
    notes = [f"{pairs.left_out:,} items have a score of one model alone"] if pairs.left_out else []
    if verdict == "undecided" and test.needed <= count:
        notes.append("equal models would pass with fewer items: the difference itself is near the margin")
    elif verdict == "undecided":
        margin = smallest_margin(test.spread, count, alpha=case.alpha)
        notes.append(f"{POWER:.0%} power with these items needs a margin of {_rounded_up(margin):g}")
    sign = -1 if pairs.is_less_better else 1
    means = [fmean(item.score for item in column) for column in zip(*pairs.items, strict=True)]
    assert math.isclose(sign * (means[0] - means[1]), test.difference, abs_tol=1e-9)
    return RuleResult(
        section=rule.section,
        metric=rule.metric,
        verdict=verdict,
        threshold=rule.threshold,
        value=test.difference,
        low=low,
        high=high,
        items=count,
        needed=test.needed,
        candidate=means[0],
        baseline=means[1],
        note="; ".join(notes),
    )


def gain(rule: Rule, pairs: Pairs, case: Case) -> RuleResult:
    """An exam that should be better by more than the threshold; whether it passes waits for all gains."""
    candidate, baseline = pairs.scores()
    clusters = pairs.clusters()
    result = keep(replace(rule, threshold=1.0), pairs, case)  # for its bounds, which depend on no margin
    spread = non_inferiority(candidate, baseline, margin=1.0, alpha=case.alpha, clusters=clusters).spread
    distance = (result.value or 0.0) - rule.threshold
    return replace(
        result,
        verdict="fail" if (result.high or 0.0) < rule.threshold else "undecided",
        threshold=rule.threshold,
        p_value=superiority(candidate, baseline, over=rule.threshold, clusters=clusters),
        needed=items_needed(spread, distance, alpha=case.alpha) if distance > 0 else None,
    )


def refuse_undecidable(rule: Rule, pairs: Pairs, case: Case) -> None:
    """A margin that not even a model with the very same answers could be shown to keep."""
    if rule.section != "keep":
        return
    count = pairs.independent
    smallest = _bound_of_none(count, case.alpha)
    if rule.threshold <= smallest:
        z2 = _z(case.alpha) ** 2
        raise Unmeasured(
            f"a margin of {rule.threshold:g} cannot be shown with {count:,} items, even if both models answer "
            f"all of them alike: the smallest is {_rounded_up(smallest):g}, or take more than "
            f"{math.ceil(z2 / rule.threshold - z2):,} items"
        )


def _bound_of_none(count: int, alpha: float) -> float:
    """The upper bound of a share of which none was seen."""
    z2 = _z(alpha) ** 2
    return z2 / (count + z2)


def _z(alpha: float) -> float:
    return NormalDist().inv_cdf(1 - alpha)


def _rounded_up(margin: float) -> float:
    """To two figures.

    >>> _rounded_up(0.02634)
    0.027
    """
    unit = 10 ** (math.floor(math.log10(margin)) - 1)
    return round(math.ceil(margin / unit - 1e-9) * unit, 12)


def limit(rule: Rule, case: Case) -> RuleResult:
    exam, metric = case.evidence.resolve(rule.metric)
    scores = case.evidence.of(exam, metric, "candidate")
    items = [item for item in scores.values() if case.keeps(exam, item.cluster)]
    if not items:
        raise Unmeasured(f"{rule.metric}: none of its items is left")
    values, clusters = [item.score for item in items], _clusters(items)
    is_share = all(0 <= value <= 1 for value in values)
    count = len(set(clusters)) if clusters else len(items)
    if is_share and rule.threshold <= (smallest := _bound_of_none(count, case.alpha)):
        raise Unmeasured(
            f"a limit of {rule.threshold:g} cannot be shown with {count:,} items, even if none of them counts: the "
            f"smallest is {_rounded_up(smallest):g}"
        )
    if case.evidence.exams[exam].better[metric] == "more":
        raise Unmeasured(f"more of {rule.metric} is better, so a limit would stop good models: use `keep`")
    fewest = math.ceil(_z(case.alpha) ** 2 * (1 - rule.threshold) / rule.threshold) if is_share else 1
    baseline = case.evidence.scores.get((exam, metric, "baseline"), {})
    other = [item.score for item in baseline.values() if case.keeps(exam, item.cluster)]
    result = below(rule, mean_bounds(values, alpha=case.alpha, clusters=clusters), fewest=fewest, alpha=case.alpha)
    return replace(result, baseline=fmean(other) if other else None)
