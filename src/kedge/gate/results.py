"""What the decision about one rule is made of."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from kedge.evaluate.bounds import Bounds
from kedge.evaluate.paired import Verdict, items_needed
from kedge.gate.evidence import Evidence
from kedge.gate.ledger import Part, is_in
from kedge.gate.rules import Rule, Rules, RuleSection


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleResult:
    """`value` with its one-sided bounds: of `keep` the difference to the baseline, above 0 where the candidate is
    better; of `limit` the candidate's own number; of `improve` a win rate or a difference; of `replay` a share."""

    section: RuleSection
    metric: str
    verdict: Verdict
    threshold: float
    value: float | None
    low: float | None
    high: float | None
    items: int
    needed: int | None = None
    """Items with which it would be decided in 80 % of trials, if they are like these; None where that is no number."""
    group: str = ""
    candidate: float | None = None
    baseline: float | None = None
    p_value: float | None = None
    adjusted: float | None = None
    """The p-value adjusted for all rules of `improve`."""
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.metric} ({self.group})" if self.group else self.metric

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it: what is not finite is absent."""
        values = asdict(self).items()
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What every rule is decided with."""

    rules: Rules
    evidence: Evidence
    part: Part

    @property
    def alpha(self) -> float:
        return self.rules.settings.alpha

    def keeps(self, exam: str, cluster: str) -> bool:
        return is_in(self.part, exam, cluster, self.rules.settings.reserve)


def below(rule: Rule, bounds: Bounds, *, alpha: float, fewest: int = 1) -> RuleResult:
    """Whether what was measured is below the limit of a rule. `fewest` items could show it if none of them counted."""
    limit = rule.threshold
    verdict: Verdict = "pass" if bounds.high < limit else "fail" if bounds.low > limit else "undecided"
    distance = abs(bounds.value - limit)
    is_known = distance > 0 and math.isfinite(bounds.spread)
    needed = max(fewest, items_needed(bounds.spread, distance, alpha=alpha)) if is_known else None
    return RuleResult(
        section=rule.section,
        metric=rule.metric,
        verdict=verdict,
        threshold=limit,
        value=bounds.value,
        low=bounds.low,
        high=bounds.high,
        items=bounds.items,
        needed=needed,
        candidate=bounds.value,
    )
