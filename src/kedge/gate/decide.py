"""From rules and evidence to verdicts: by confidence bounds, never by point values.

`keep`: the candidate is not worse by more than the margin (paired, one-sided). `limit`: its upper bound is below the
limit. `improve`: at least one gain is shown, each p-value adjusted for there being several (Holm). A rule that the data
do not decide is undecided, and says how many items would. "All must pass" needs no correction: a bad model has to get
past the very rule that it breaks (an intersection-union test, Berger 1982).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kedge.evaluate import holm
from kedge.evaluate.paired import Verdict
from kedge.gate.answer_rules import measured, win_rate
from kedge.gate.evidence import Evidence, Unmeasured
from kedge.gate.exam_rules import gain, keep, limit, pairs_of, refuse_undecidable
from kedge.gate.ledger import Part
from kedge.gate.results import Case, RuleResult
from kedge.gate.rules import MEASURED, Rule, Rules


def decide(rules: Rules, evidence: Evidence, *, part: Part = "all") -> list[RuleResult]:
    """The results of all rules but `replay`. What a rule lacks, and a margin that no data of this size could show, is
    an error with the rule's line; all of them are told at once."""
    case = Case(rules=rules, evidence=evidence, part=part)
    results: list[RuleResult] = []
    problems: list[tuple[Rule, str]] = []
    for rule in rules.all():
        try:
            results.extend(_results(rule, case))
        except Unmeasured as error:
            problems.append((rule, str(error.args[0])))
    if problems:
        raise rules.problems(problems)
    return _with_holm(results, alpha=case.alpha)


def overall(results: Sequence[RuleResult]) -> Verdict:
    """Fail where one rule fails, pass where all pass, and of `improve` one; undecided otherwise."""
    needed = [result.verdict for result in results if result.section != "improve"]
    gains = [result.verdict for result in results if result.section == "improve"]
    if gains:
        needed.append("pass" if "pass" in gains else "fail" if set(gains) == {"fail"} else "undecided")
    return "fail" if "fail" in needed else "undecided" if "undecided" in needed else "pass"


def _results(rule: Rule, case: Case) -> Iterator[RuleResult]:
    if rule.win_rate is not None:
        yield win_rate(rule, rule.win_rate, case)
    elif rule.metric in MEASURED:
        if rule.section != "limit":
            raise Unmeasured(f"{rule.metric} has a limit, and nothing else: write it below `limit`")
        yield measured(rule, case)
    elif rule.section == "limit":
        yield limit(rule, case)
    else:
        pairs = pairs_of(rule, case)
        if rule.by is None:
            refuse_undecidable(rule, pairs, case)
            yield (keep if rule.section == "keep" else gain)(rule, pairs, case)
        else:
            for value, part in sorted(pairs.by(rule.by).items()):
                yield replace(keep(rule, part, case), group=f"{rule.by}: {value}")


def _with_holm(results: Sequence[RuleResult], *, alpha: float) -> list[RuleResult]:
    """Gains pass where their p-value, adjusted for there being several, is below alpha."""
    adjusted = iter(holm([result.p_value for result in results if result.p_value is not None]))
    return [result if result.p_value is None else _adjusted(result, next(adjusted), alpha) for result in results]


def _adjusted(result: RuleResult, p_value: float, alpha: float) -> RuleResult:
    return replace(result, adjusted=p_value, verdict="pass" if p_value < alpha else result.verdict)
