"""Rules about an evaluation: the win rate, the length of answers, the KL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

from kedge.core.suggest import did_you_mean
from kedge.evaluate.bounds import mean_bounds, rate_bounds, ratio_bounds, share_above
from kedge.evaluate.length_control import length_controlled_estimates, tells_length
from kedge.evaluate.paired import items_needed
from kedge.gate.evidence import Answers, Unmeasured, results_over_baseline
from kedge.gate.results import Case, RuleResult, below
from kedge.gate.rules import KL, SHRINKAGE, GainRule, Rule


def _evaluation(rule: Rule, case: Case, is_fit: Callable[[Answers], bool], lacks: str) -> Answers:
    """The one evaluation of both models that is fit for a rule."""
    fitting = [
        answers
        for answers in case.evidence.evaluations
        if {"candidate", "baseline"} <= set(answers.names) and is_fit(answers)
    ]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        places = ", ".join(str(answers.where) for answers in fitting)
        raise Unmeasured(f"{rule.metric} could be read from {places}; name one of them in `from`")
    raise Unmeasured(
        f"no stage of `from` {lacks}. Add one, eval: {{kind: evaluate, models: [BASELINE, CANDIDATE], prompts: "
        "heldout.jsonl, gold: … or judge: …}, and name it in `from`"
    )


def _prompts(answers: Answers, case: Case) -> list[str]:
    candidate, baseline = (answers.models[answers.names[role]] for role in ("candidate", "baseline"))
    return [prompt for prompt in candidate if prompt in baseline and case.keeps("evaluate", prompt)]


def measured(rule: Rule, case: Case) -> RuleResult:
    """Length and KL, of an evaluation."""
    if rule.metric == KL:
        answers = _evaluation(rule, case, _has_kl, "has the KL of the candidate from the baseline, its first model")
    else:
        answers = _evaluation(rule, case, lambda _: True, "has answers of both models")
    prompts = _prompts(answers, case)
    if not prompts:
        raise Unmeasured(f"{rule.metric}: no prompt that both models have answered is left")
    own = answers.models[answers.names["candidate"]]
    if rule.metric == KL:
        bounds = mean_bounds([own[prompt].kl or 0.0 for prompt in prompts], alpha=case.alpha)
        return below(rule, bounds, alpha=case.alpha)
    other = answers.models[answers.names["baseline"]]
    lengths = [own[prompt].length for prompt in prompts], [other[prompt].length for prompt in prompts]
    if not any(lengths[1]) or not any(lengths[0]):
        raise Unmeasured(f"{rule.metric}: all answers of one model are empty, so there is no ratio")
    if rule.metric == SHRINKAGE:
        lengths = lengths[::-1]
    return below(rule, ratio_bounds(*lengths, alpha=case.alpha), alpha=case.alpha)


def _has_kl(answers: Answers) -> bool:
    own = answers.models[answers.names["candidate"]]
    return answers.measured_from == answers.names["baseline"] and all(prompt.kl is not None for prompt in own.values())


def _tells_winner(answers: Answers, judge: str) -> bool:
    """Whether there are scores by this source, or comparisons of the candidate with the baseline by this judge."""
    if judge in answers.sources():
        return True
    is_compared = answers.names["candidate"] in answers.judged.get(judge, {})
    return is_compared and answers.measured_from == answers.names["baseline"]


def _lacks(judge: str, case: Case) -> str:
    evaluations = case.evidence.evaluations
    known = sorted({name for answers in evaluations for name in (*answers.sources(), *answers.judged)})
    there = f" (there are {', '.join(known)}{did_you_mean(judge, known)})" if known else ""
    if judge in known:
        return f"has the baseline as its first model, with which {judge!r} compares"
    return f"has scores or comparisons by {judge!r}{there} of both models"


def win_rate(rule: Rule, wanted: GainRule, case: Case) -> RuleResult:
    judge = wanted.judge
    answers = _evaluation(rule, case, lambda answers: _tells_winner(answers, judge), _lacks(judge, case))
    results = results_over_baseline(answers, judge, _prompts(answers, case))
    own = results[answers.names["candidate"]]
    if not own:
        raise Unmeasured(f"no prompt on which all models of {answers.where} were scored or compared by {judge!r}")
    rates = [preference for preference, _, _ in own]
    bounds, p_value = mean_bounds(rates, alpha=case.alpha), share_above(rates, wanted.over)
    note = f"by {judge}"
    if wanted.at_equal_length:
        fitting = {model: rows for model, rows in results.items() if tells_length(rows)}
        candidate = answers.names["candidate"]
        estimate = length_controlled_estimates(fitting)[candidate] if candidate in fitting else None
        at_equal = rate_bounds(estimate, over=wanted.over, alpha=case.alpha) if estimate else None
        if at_equal is None:
            cannot = "every answer is longer, or shorter, by the same, or one model always wins"
            note += f", {fmean(rates):.1%} as it is; not told at equal length: {cannot}"
            p_value, bounds = 1.0, replace(bounds, low=0.0, high=1.0)
        else:
            note += f" at equal length, {fmean(rates):.1%} as it is"
            bounds, p_value = at_equal
    distance = bounds.value - wanted.over
    return RuleResult(
        section=rule.section,
        metric=rule.metric,
        verdict="fail" if bounds.high < wanted.over else "undecided",
        threshold=wanted.over,
        value=bounds.value,
        low=bounds.low,
        high=bounds.high,
        items=bounds.items,
        needed=items_needed(bounds.spread, distance, alpha=case.alpha) if distance > 0 else None,
        p_value=p_value,
        note=note,
    )
