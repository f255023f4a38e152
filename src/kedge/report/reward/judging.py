"""From numbers to words: which rules of `rules` speak, and the sentence that each of them says."""

from __future__ import annotations

from collections.abc import Iterator

from kedge.core.findings import Finding, has_fatal
from kedge.report.reward.leaning import baseline, disguise, length_warnings, rule_name
from kedge.report.reward.result import RewardReport
from kedge.report.reward.rules import RULES, finding
from kedge.report.reward.words import number, percent, told

_ORDER = ("fatal", "warning", "info", "ok")


def judge(report: RewardReport) -> tuple[Finding, ...]:
    """All findings, worst first; one `ok` finding where there is neither a fatal one nor a warning."""
    found = [*_constant(report), *disguise(report)]
    if not any(one.code.startswith("scores.") for one in found):
        found += _coin(report)
    if not has_fatal(found):
        found += length_warnings(report)
    found += [*_heldout(report), *baseline(report), *_ties(report)]
    found += [*_calibration(report), *_overfit(report), *_members(report)]
    if not any(one.level in ("fatal", "warning") for one in found):
        found.append(finding("reward.ok", summary(report), accuracy=report.accuracy.value))
    return tuple(sorted(found, key=lambda one: _ORDER.index(one.level)))


def verdict(report: RewardReport, findings: tuple[Finding, ...]) -> str:
    """The headline: whether it may be used, and the weightiest reason."""
    fatal = [one for one in findings if one.level == "fatal"]
    warnings = [one for one in findings if one.level == "warning"]
    if fatal:
        return f"Not fit to use: {_lowered(fatal[0].message)}"
    if warnings:
        return f"Usable with care. {summary(report)} {warnings[0].message}"
    return f"Fit to use. {summary(report)}"


def summary(report: RewardReport) -> str:
    """What the model does on these pairs, in one sentence."""
    balanced = report.length.balanced
    blind = f", {percent(balanced.value)} with length balanced out" if balanced else ""
    return (
        f"The model scores the chosen answer higher in {told(report.accuracy)} of {report.pairs:,} held-out "
        f"pairs{blind}; {rule_name(report.length)} would be right in "
        f"{percent(max(report.length.rule.value, 1 - report.length.rule.value))}."
    )


def _lowered(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


def _constant(report: RewardReport) -> Iterator[Finding]:
    ties = report.accuracy.ties / report.pairs
    if report.contrast < RULES["scores.constant"].threshold:
        message = (
            f"The scores have collapsed to a constant: relative to their size, the two answers of a pair "
            f"differ by {report.contrast:.1e}."
        )
        yield finding("scores.constant", message, contrast=report.contrast, ties=report.accuracy.ties)
    elif ties >= RULES["scores.tied"].threshold:
        message = f"Both answers have the same score in {percent(ties)} of the {report.pairs:,} pairs."
        yield finding("scores.tied", message, share=ties)


def _coin(report: RewardReport) -> Iterator[Finding]:
    accuracy = report.accuracy
    if accuracy.high < RULES["accuracy.inverted"].threshold:
        message = (
            f"The model prefers the rejected answer: its accuracy is {told(accuracy)}, reliably worse than a coin; "
            "are the labels swapped?"
        )
        yield finding("accuracy.inverted", message, accuracy=accuracy.value, low=accuracy.low, high=accuracy.high)
    elif accuracy.low <= RULES["accuracy.coin"].threshold:
        message = f"The model is not distinguishable from a coin: its accuracy is {told(accuracy)}."
        yield finding("accuracy.coin", message, accuracy=accuracy.value, low=accuracy.low, high=accuracy.high)


def _ties(report: RewardReport) -> Iterator[Finding]:
    ties = report.accuracy.ties / report.pairs
    if RULES["scores.ties"].threshold < ties < RULES["scores.tied"].threshold:
        message = f"Both answers have the same score in {percent(ties)} of the {report.pairs:,} pairs."
        yield finding("scores.ties", message, share=ties)


def _heldout(report: RewardReport) -> Iterator[Finding]:
    if report.pairs < RULES["heldout.small"].threshold:
        message = f"Only {report.pairs:,} pairs were held out: the numbers here are rough."
        yield finding("heldout.small", message, pairs=report.pairs)
    elif report.prompts < RULES["heldout.few_prompts"].threshold:
        message = f"The {report.pairs:,} held-out pairs share only {report.prompts:,} prompts."
        yield finding("heldout.few_prompts", message, prompts=report.prompts)


def _calibration(report: RewardReport) -> Iterator[Finding]:
    """Which way it errs must be beyond doubt, because a calibration error is never zero by chance."""
    found = report.calibration
    if found.excess.low <= 0 <= found.excess.high:
        return
    code = "calibration.overconfident" if found.excess.value > 0 else "calibration.underconfident"
    if found.error <= RULES[code].threshold:
        return
    confidence = report.accuracy.value + found.excess.value
    cure = (
        "no finite temperature is best"
        if found.temperature is None
        else f"scores divided by {number(found.temperature, 2)} would be calibrated best"
    )
    message = (
        f"The model is {code.split('.')[1]}: it is {percent(confidence)} sure on average and right in "
        f"{percent(report.accuracy.value)}; expected calibration error {number(found.error)}, {cure}."
    )
    yield finding(code, message, error=found.error, temperature=found.temperature)


def _overfit(report: RewardReport) -> Iterator[Finding]:
    if report.train_accuracy is None:
        return
    gap = report.train_accuracy - report.accuracy.value
    if gap > RULES["accuracy.overfit"].threshold:
        message = (
            f"The model has overfitted: {percent(report.train_accuracy)} of the training pairs, but "
            f"{percent(report.accuracy.value)} of the held-out ones."
        )
        yield finding("accuracy.overfit", message, gap=gap)


def _members(report: RewardReport) -> Iterator[Finding]:
    found = report.agreement
    if found is None or found.disagreement is None or found.offset_spread is None:
        return
    if found.disagreement < RULES["members.identical"].threshold:
        message = f"The {report.members} members of the ensemble score alike: they are copies of one model."
        yield finding("members.identical", message, disagreement=found.disagreement)
    elif found.agreement < RULES["members.disagree"].threshold:
        message = f"Two members decide alike in only {percent(found.agreement)} of the pairs (mean over members)."
        yield finding("members.disagree", message, agreement=found.agreement)
    if report.combine != "mean" and found.offset_spread > RULES["members.offset"].threshold:
        message = (
            f"The members score on different levels (their means spread by {number(found.offset_spread, 2)} of "
            f"the spread of scores), and `{report.combine}` reads that as disagreement."
        )
        yield finding("members.offset", message, offset_spread=found.offset_spread)
