"""The findings and the verdict on a reward model, from its numbers: when a rule of `rules` applies, and its message.

Length bias is judged against one length rule, "the longer wins" or "the shorter wins". What counts is the model's
accuracy on the pairs where that rule is wrong: a good model is right there too, however biased the data are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from kedge.core.findings import Finding, has_fatal
from kedge.report.reward.accuracy import Estimate, Share
from kedge.report.reward.length_bias import LengthBias
from kedge.report.reward.result import RewardReport, measured
from kedge.report.reward.rules import RULES, finding_of
from kedge.report.reward.scored_pairs import Combine, ScoredPair
from kedge.report.words import number, percent, points, with_interval

_ORDER = ("fatal", "warning", "info", "ok")
Winner = Literal["longer", "shorter"]
_WINNERS: tuple[Winner, ...] = get_args(Winner)


def reward_report(
    pairs: Sequence[ScoredPair],
    *,
    combine: Combine = "mean",
    uncertainty_coef: float = 0.5,
    train_accuracy: float | None = None,
    facts: Mapping[str, Any] = {},
    groups: Mapping[str, Sequence[str]] = {},
) -> RewardReport:
    """Judge a reward model on held-out pairs.

    `combine` and `uncertainty_coef` (mean minus this times the variance) are those that the rewards will be used with;
    `train_accuracy` is the accuracy on training pairs, for comparison; `facts` are shown as they are. `groups`
    has the value of each pair for every field by which the accuracy is given too.
    """
    report = measured(
        pairs,
        combine=combine,
        uncertainty_coef=uncertainty_coef,
        train_accuracy=train_accuracy,
        facts=facts,
        groups=groups,
    )
    findings = judge(report)
    return replace(report, findings=findings, verdict=verdict(report, findings))


def judge(report: RewardReport) -> tuple[Finding, ...]:
    """All findings, worst first; one `ok` finding where there is neither a fatal one nor a warning."""
    findings = [*_constant(report), *_length_in_disguise(report)]
    if not any(finding.code.startswith("scores.") for finding in findings):
        findings += _coin(report)
    if not has_fatal(findings):
        findings += _length_warnings(report)
    findings += [*_heldout(report), *_length_baseline(report), *_ties(report)]
    findings += [*_calibration(report), *_overfit(report), *_members(report)]
    if not any(finding.level in ("fatal", "warning") for finding in findings):
        findings.append(finding_of("reward.ok", summary(report), accuracy=report.accuracy.value))
    return tuple(sorted(findings, key=lambda finding: _ORDER.index(finding.level)))


def verdict(report: RewardReport, findings: tuple[Finding, ...]) -> str:
    """The headline: whether it may be used, and the weightiest reason."""
    fatal = [finding for finding in findings if finding.level == "fatal"]
    warnings = [finding for finding in findings if finding.level == "warning"]
    if fatal:
        return f"Not fit to use: {_lowered(fatal[0].message)}"
    if warnings:
        return f"Usable with care. {summary(report)} {warnings[0].message}"
    return f"Fit to use. {summary(report)}"


def summary(report: RewardReport) -> str:
    """Accuracy, balanced accuracy and the better length rule, in one sentence."""
    balanced = report.length.balanced
    blind = f", {percent(balanced.value)} with length balanced out" if balanced else ""
    return (
        f"The model scores the chosen answer higher in {with_interval(report.accuracy)} of {report.pairs:,} held-out "
        f"pairs{blind}; {_better_rule(report.length)} would be right in "
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
        yield finding_of("scores.constant", message, contrast=report.contrast, ties=report.accuracy.ties)
    elif ties >= RULES["scores.tied"].threshold:
        message = f"Both answers have the same score in {percent(ties)} of the {report.pairs:,} pairs."
        yield finding_of("scores.tied", message, share=ties)


def _coin(report: RewardReport) -> Iterator[Finding]:
    accuracy = report.accuracy
    if accuracy.high < RULES["accuracy.inverted"].threshold:
        message = (
            f"The model prefers the rejected answer: its accuracy is {with_interval(accuracy)}, reliably worse than a "
            "coin; are the labels swapped?"
        )
        yield finding_of("accuracy.inverted", message, accuracy=accuracy.value, low=accuracy.low, high=accuracy.high)
    elif accuracy.low <= RULES["accuracy.coin"].threshold:
        message = f"The model is not distinguishable from a coin: its accuracy is {with_interval(accuracy)}."
        yield finding_of("accuracy.coin", message, accuracy=accuracy.value, low=accuracy.low, high=accuracy.high)


def _ties(report: RewardReport) -> Iterator[Finding]:
    ties = report.accuracy.ties / report.pairs
    if RULES["scores.ties"].threshold < ties < RULES["scores.tied"].threshold:
        message = f"Both answers have the same score in {percent(ties)} of the {report.pairs:,} pairs."
        yield finding_of("scores.ties", message, share=ties)


def _heldout(report: RewardReport) -> Iterator[Finding]:
    if report.pairs < RULES["heldout.small"].threshold:
        message = f"Only {report.pairs:,} pairs were held out: the numbers here are rough."
        yield finding_of("heldout.small", message, pairs=report.pairs)
    elif report.prompts < RULES["heldout.few_prompts"].threshold:
        message = f"The {report.pairs:,} held-out pairs share only {report.prompts:,} prompts."
        yield finding_of("heldout.few_prompts", message, prompts=report.prompts)


def _calibration(report: RewardReport) -> Iterator[Finding]:
    """Only where the direction of the error is beyond doubt: a calibration error is never zero by chance."""
    calibration = report.calibration
    if calibration.excess.low <= 0 <= calibration.excess.high:
        return
    code = "calibration.overconfident" if calibration.excess.value > 0 else "calibration.underconfident"
    if calibration.error <= RULES[code].threshold:
        return
    confidence = report.accuracy.value + calibration.excess.value
    cure = (
        "no finite temperature is best"
        if calibration.temperature is None
        else f"scores divided by {number(calibration.temperature, 2)} would be calibrated best"
    )
    message = (
        f"The model is {code.split('.')[1]}: it is {percent(confidence)} sure on average and right in "
        f"{percent(report.accuracy.value)}; expected calibration error {number(calibration.error)}, {cure}."
    )
    yield finding_of(code, message, error=calibration.error, temperature=calibration.temperature)


def _overfit(report: RewardReport) -> Iterator[Finding]:
    if report.train_accuracy is None:
        return
    gap = report.train_accuracy - report.accuracy.value
    if gap > RULES["accuracy.overfit"].threshold:
        message = (
            f"The model has overfitted: {percent(report.train_accuracy)} of the training pairs, but "
            f"{percent(report.accuracy.value)} of the held-out ones."
        )
        yield finding_of("accuracy.overfit", message, gap=gap)


def _members(report: RewardReport) -> Iterator[Finding]:
    agreement = report.agreement
    if agreement is None or agreement.disagreement is None or agreement.offset_spread is None:
        return
    if agreement.disagreement < RULES["members.identical"].threshold:
        message = f"The {report.members} members of the ensemble score alike: they are copies of one model."
        yield finding_of("members.identical", message, disagreement=agreement.disagreement)
    elif agreement.agreement < RULES["members.disagree"].threshold:
        message = f"Two members decide alike in only {percent(agreement.agreement)} of the pairs (mean over members)."
        yield finding_of("members.disagree", message, agreement=agreement.agreement)
    if report.combine != "mean" and agreement.offset_spread > RULES["members.offset"].threshold:
        message = (
            f"The members score on different levels (their means spread by {number(agreement.offset_spread, 2)} of "
            f"the spread of scores), and `{report.combine}` reads that as disagreement."
        )
        yield finding_of("members.offset", message, offset_spread=agreement.offset_spread)


def _better_rule(length: LengthBias) -> str:
    """The length rule that is right more often on these pairs."""
    return f"“the {_longer_if(length.rule.value >= 0.5)} wins”"


@dataclass(frozen=True, slots=True, kw_only=True)
class _AgainstRule:
    """The model compared with a length rule."""

    winner: Winner
    """Which answer the rule prefers."""
    correlation: float
    """Rank correlation of score and length differences."""
    is_strong: bool
    """Whether the scores follow length closely."""
    accuracy: Share | None
    """Accuracy of the model where the rule is wrong; None where it is never wrong."""
    gain: Estimate
    """Accuracy of the model minus that of the rule."""

    @property
    def is_below_coin(self) -> bool:
        return _is_below_coin(self.accuracy)

    @property
    def is_above_coin(self) -> bool:
        """Clearly better than a coin where the rule is wrong: it reads more than length, however biased the data."""
        return self.accuracy is not None and self.accuracy.low > RULES["length.leans"].threshold

    @property
    def is_better(self) -> bool:
        """Whether the model is clearly better than the rule."""
        return self.gain.low > RULES["length.no_better"].threshold

    @property
    def where_wrong(self) -> str:
        return f"the {self.winner} answer was rejected"


def _against_rule(length: LengthBias) -> _AgainstRule:
    """The model against the rule that its scores follow closely, or else the one whose exceptions it gets wrong.

    Without either, against the rule that is right more often.
    """
    correlation = length.difference_spearman or 0.0
    is_strong = abs(correlation) > RULES["length.disguise"].threshold
    misled_by: list[Winner] = [winner for winner in _WINNERS if _is_below_coin(_where_wrong(length, winner))]
    if is_strong:
        winner = _longer_if(correlation > 0)
    else:
        winner = misled_by[0] if len(misled_by) == 1 else _longer_if(length.rule.value >= 0.5)
    return _AgainstRule(
        winner=winner,
        correlation=correlation,
        is_strong=is_strong,
        accuracy=_where_wrong(length, winner),
        gain=length.gain_over_longer if winner == "longer" else length.gain_over_shorter,
    )


def _longer_if(is_longer: bool) -> Winner:
    return "longer" if is_longer else "shorter"


def _where_wrong(length: LengthBias, winner: Winner) -> Share | None:
    """Accuracy of the model on the pairs where the rule is wrong."""
    contest = length.longer_rejected if winner == "longer" else length.longer_chosen
    return contest.model if contest else None


def _is_below_coin(share: Share | None) -> bool:
    return share is not None and share.high < RULES["length.leans"].threshold


def _length_in_disguise(report: RewardReport) -> Iterator[Finding]:
    """The scores follow length and nothing shows that they hold more; or, with length balanced out, nothing is left."""
    rule, balanced, coin = _against_rule(report.length), report.length.balanced, RULES["accuracy.coin"].threshold
    is_unproven = not rule.is_better and not rule.is_above_coin
    follows = rule.is_strong and (rule.is_below_coin or is_unproven)
    knows_nothing_else = rule.is_below_coin and balanced is not None and balanced.low <= coin <= balanced.high
    if not (follows or knows_nothing_else):
        return
    where = f"in no pair {rule.where_wrong}"
    if rule.accuracy:
        where = f"where {rule.where_wrong}, its accuracy is {with_interval(rule.accuracy)}"
    blind = f", and {percent(balanced.value)} with length balanced out" if balanced else ""
    message = (
        f"The model is length in disguise: {where}{blind}; score and length differences correlate at "
        f"{number(rule.correlation, 2)} (rank correlation), and over “the {rule.winner} wins” it gains "
        f"{points(rule.gain)}."
    )
    against = rule.accuracy.value if rule.accuracy else None
    yield finding_of("length.disguise", message, spearman=rule.correlation, against=against, gain=rule.gain.value)


def _length_warnings(report: RewardReport) -> Iterator[Finding]:
    """The model falls for length where quality and length differ, or is not clearly better than a length rule."""
    rule = _against_rule(report.length)
    if rule.accuracy and (rule.is_below_coin or (rule.is_strong and not rule.is_above_coin)):
        message = (
            f"The model leans on length: where {rule.where_wrong}, its accuracy is only {with_interval(rule.accuracy)}."
        )
        yield finding_of("length.leans", message, accuracy=rule.accuracy.value, high=rule.accuracy.high)
    elif not rule.is_better and not rule.is_above_coin:
        message = f"The model is not clearly better than “the {rule.winner} wins”: it gains {points(rule.gain)}."
        yield finding_of("length.no_better", message, gain=rule.gain.value, low=rule.gain.low)


def _length_baseline(report: RewardReport) -> Iterator[Finding]:
    """A length rule alone is right so often that accuracy means little."""
    length = report.length
    rule = max(length.rule.value, 1 - length.rule.value)
    if rule > RULES["length.baseline"].threshold:
        balanced = "accuracy on balanced pairs"
        if length.balanced:
            balanced = f"balanced accuracy, {with_interval(length.balanced)}"
        message = (
            f"The rule {_better_rule(length)} alone is right in {percent(rule)} of these pairs, so bare accuracy "
            f"means little here; the number to look at is {balanced}."
        )
        yield finding_of("length.baseline", message, rule=rule)
