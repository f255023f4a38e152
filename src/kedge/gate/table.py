"""A verdict as a table of text."""

from __future__ import annotations

from collections.abc import Iterator

from kedge.evaluate.paired import Verdict
from kedge.gate.results import RuleResult
from kedge.gate.rules import MEASURED
from kedge.gate.verdict import SealedVerdict

_NONE = "–"
_MARKS: dict[Verdict, str] = {"pass": "pass", "fail": "FAIL", "undecided": "undecided"}
_TITLES = ("rule", "", "value [bounds]", "needs", "items", "verdict")


def table_lines(verdict: SealedVerdict) -> Iterator[str]:
    """A line a rule, the whole below it, then what a reader should know of single rules."""
    rows = [_TITLES, *(_row(result) for result in verdict.results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for result in verdict.results:
        if result.note:
            yield f"{result.name}: {result.note}"
        if result.verdict == "undecided" and result.needed and result.needed > result.items:
            yield f"{result.name}: about {result.needed:,} items like these would decide it ({result.items:,} are here)"
    yield from _multiplicity(verdict)
    part = "" if verdict.part == "all" else f" ({verdict.part} items)"
    yield f"verdict{part}: {_MARKS[verdict.verdict]} for {verdict.candidate.name} ({verdict.candidate.weights})"


def _row(result: RuleResult) -> tuple[str, ...]:
    return (
        result.section,
        result.name,
        value_text(result),
        needs_text(result),
        f"{result.items:,}",
        _MARKS[result.verdict],
    )


def value_text(result: RuleResult) -> str:
    if result.value is None:
        return _NONE
    if result.section == "replay":
        return _number(result, result.value)
    bounds = ", ".join(_NONE if bound is None else _number(result, bound) for bound in (result.low, result.high))
    shown = f"{_number(result, result.value)} [{bounds}]"
    if result.adjusted is not None:
        shown += f" p {result.p_value:.3g}, Holm {result.adjusted:.3g}"
    return shown


def needs_text(result: RuleResult) -> str:
    match result.section:
        case "keep":
            return f"low > {_number(result, -result.threshold)}"
        case "limit":
            return f"high < {_number(result, result.threshold)}"
        case "improve":
            return f"shown > {_number(result, result.threshold)}"
        case "replay":
            return f"≥ {_number(result, result.threshold)}"


def _number(result: RuleResult, value: float) -> str:
    """Differences in points with their sign, shares in percent, everything else as it is."""
    if result.section == "keep" or (result.section == "improve" and result.metric != "win_rate"):
        return f"{100 * value:+.2f}"
    if result.metric in MEASURED:
        return f"{value:.2f}"
    return f"{100 * value:.1f}%"


def _multiplicity(verdict: SealedVerdict) -> Iterator[str]:
    gains = sum(result.section == "improve" for result in verdict.results)
    rules = len(verdict.results) - gains
    if rules > 1:
        yield f"all {rules} rules must pass, each at its own level: no correction (an intersection-union test)"
    if gains > 1:
        yield f"one of {gains} improvements must be shown: p-values by Holm"
