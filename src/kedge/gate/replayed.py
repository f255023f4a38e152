"""What replaying the badcases gave, and what the rules say about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kedge.evaluate.paired import Verdict
from kedge.gate.badcases import Badcase, Severity
from kedge.gate.results import RuleResult
from kedge.gate.rules import ReplayRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The samples of one prompt of a case."""

    text: str
    good: int
    unknown: int
    """Samples that nobody could judge: the judge gave no answer."""
    is_trained_on: bool
    example: str = ""
    """A sample that is not good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    id: str
    severity: Severity
    verdict: Verdict
    why: str
    reason: str
    """What decided, in words."""
    asked: tuple[Asked, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def result_of(case: Badcase, asked: Sequence[Asked]) -> CaseResult:
    """A case holds where enough samples are good, of its prompt and of each sibling that was not trained on."""
    evidence = [prompt for prompt in asked if not prompt.is_trained_on]
    if not evidence:
        reason = "its prompt was trained on, and no sibling is left: add some that are kept aside (--sibling)"
        verdict: Verdict = "undecided"
    elif bad := next((prompt for prompt in evidence if prompt.good + prompt.unknown < case.needed), None):
        verdict, reason = "fail", f"{bad.good} of {case.samples} samples are good, {case.needed} are needed"
    elif open_ := next((prompt for prompt in evidence if prompt.good < case.needed), None):
        verdict, reason = "undecided", f"{open_.unknown} of {case.samples} samples could not be judged"
    else:
        lowest = min(prompt.good for prompt in evidence)
        verdict, reason = "pass", f"{lowest} of {case.samples} samples are good"
    if len(asked) > 1 and evidence:
        reason += f" ({len(evidence)} of {len(asked)} prompts counted)"
    return CaseResult(
        id=case.id, severity=case.severity, verdict=verdict, why=case.why, reason=reason, asked=tuple(asked)
    )


def replay_results(rule: ReplayRule, results: Sequence[CaseResult], *, quarantined: int) -> list[RuleResult]:
    """One result a severity: whether enough of the cases hold, whatever the undecided ones would have done."""
    wanted: dict[Severity, float] = {"block": 1.0 if rule.block == "all" else rule.block, "warn": rule.warn}
    return [
        _share([result for result in results if result.severity == severity], severity, share, quarantined)
        for severity, share in wanted.items()
    ]


def _share(results: Sequence[CaseResult], severity: Severity, share: float, quarantined: int) -> RuleResult:
    held = sum(result.verdict == "pass" for result in results)
    failed = [result.id for result in results if result.verdict == "fail"]
    count = len(results)
    low, high = (held / count, 1 - len(failed) / count) if count else (None, None)
    verdict: Verdict = "pass"
    if low is not None and high is not None and low < share:
        verdict = "fail" if high < share else "undecided"
    notes: list[str] = []
    if failed:
        notes.append(f"failed: {', '.join(failed[:5])}{' …' if len(failed) > 5 else ''}")
    if severity == "block" and quarantined:
        notes.append(f"{quarantined} in quarantine")
    return RuleResult(
        section="replay",
        metric=f"badcases.{severity}",
        verdict=verdict,
        threshold=share,
        value=low,
        low=low,
        high=high,
        items=count,
        note="; ".join(notes),
    )
