"""The rules of a reward report: level, threshold, reason and fix of each; no threshold is anywhere else.

`fatal` means that PPO against this model would optimise something other than the preferences in the data.
`verdict` says when a rule applies; `threshold` is the number it compares with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kedge.core.findings import Finding, Level


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`measure` says what is compared with the threshold, and in which direction."""

    level: Level
    measure: str
    threshold: float
    reason: str
    fix: str


RULES: Mapping[str, Rule] = {
    "scores.constant": Rule(
        level="fatal",
        measure="root mean square of the score differences, over max(1, mean |score|), below",
        threshold=1e-4,
        reason="Such differences are rounding: the model gives every answer to a prompt the same score.",
        fix="Look for a far too high learning rate, a frozen head, or a mask that hides the answers; train again.",
    ),
    "scores.tied": Rule(
        level="fatal",
        measure="share of pairs with equal scores, at least",
        threshold=0.9,
        reason="The model cannot tell most answers apart, whatever it does on the rest.",
        fix="Check that the answers, not only the prompts, reach the model, and that scores are kept in float32.",
    ),
    "scores.ties": Rule(
        level="info",
        measure="share of pairs with equal scores, above",
        threshold=0.05,
        reason="Ties count half. Real-valued scores seldom tie, except in half precision or on equal answers.",
        fix="Compute the head in float32; look for pairs with the same text on both sides.",
    ),
    "accuracy.inverted": Rule(
        level="fatal",
        measure="upper end of the interval of accuracy, below",
        threshold=0.5,
        reason="A model that is reliably wrong has learnt the opposite of these labels.",
        fix="See whether chosen and rejected are swapped in the training data, in the held-out data, or in the loss.",
    ),
    "accuracy.coin": Rule(
        level="fatal",
        measure="lower end of the interval of accuracy, at most",
        threshold=0.5,
        reason="What cannot be told from a coin gives PPO noise to optimise.",
        fix="Train longer or on more pairs, check the labels with `kedge data check`, or hold out more pairs.",
    ),
    "accuracy.overfit": Rule(
        level="warning",
        measure="accuracy on the training pairs minus accuracy here, above",
        threshold=0.15,
        reason="The model knows its training pairs by heart; on what PPO writes it is as good as here, at best.",
        fix="Train for one epoch, with a lower learning rate, or on more pairs.",
    ),
    "heldout.small": Rule(
        level="warning",
        measure="held-out pairs, below",
        threshold=100,
        reason="With 100 pairs the interval of an accuracy is still about 20 points wide.",
        fix="Hold out more pairs; 500 give about 8 points, 2,000 about 4.",
    ),
    "heldout.few_prompts": Rule(
        level="warning",
        measure="distinct prompts, below",
        threshold=30,
        reason="Pairs of one prompt are right or wrong together, and an interval from few prompts is a guess.",
        fix="Hold out pairs of more prompts.",
    ),
    "length.disguise": Rule(
        level="fatal",
        measure="size of the rank correlation of score difference with length difference, above (or, in a model that "
        "leans on length: balanced accuracy that is not distinguishable from a coin)",
        threshold=0.5,
        reason="The model measures length under another name, and PPO against it writes ever longer (or shorter) text.",
        fix="Balance the training pairs by length, add pairs where the longer answer is rejected, and train again.",
    ),
    "length.leans": Rule(
        level="warning",
        measure="upper end of the interval of accuracy where the length rule is wrong (lower end, in a model whose "
        "scores follow length closely), below",
        threshold=0.5,
        reason="Where quality and length pull apart, the model tends to go with length.",
        fix="Balance the training pairs by length; watch `length/mean` in PPO, and judge with length control.",
    ),
    "length.no_better": Rule(
        level="warning",
        measure="lower end of the interval of the gain over the length rule, at most",
        threshold=0.0,
        reason="On these pairs a rule without any training does as well, and nothing shows that the model reads more.",
        fix="Look at balanced accuracy; hold out more pairs in which the length rule is wrong.",
    ),
    "length.baseline": Rule(
        level="info",
        measure="accuracy of the better length rule, above",
        threshold=0.6,
        reason="Bare accuracy means little where counting tokens earns much of it.",
        fix="Compare models by balanced accuracy on these data.",
    ),
    "calibration.overconfident": Rule(
        level="warning",
        measure="expected calibration error, with mean confidence above accuracy, above",
        threshold=0.1,
        reason="Large score differences then promise more than they hold, and a few answers rule the update.",
        fix="Divide the scores by the temperature of this report, or normalise rewards in PPO; train for fewer steps.",
    ),
    "calibration.underconfident": Rule(
        level="info",
        measure="expected calibration error, with mean confidence below accuracy, above",
        threshold=0.1,
        reason="The order of the answers is better than the differences say; only their scale is too small.",
        fix="Divide the scores by the temperature of this report, or normalise rewards in PPO.",
    ),
    "members.disagree": Rule(
        level="warning",
        measure="mean share of pairs on which two members decide alike, below",
        threshold=0.75,
        reason="Members that differ this much have each learnt something of their own, much of it noise.",
        fix="Train the members longer or on more of the data; combine them by `worst` or `uncertainty`.",
    ),
    "members.identical": Rule(
        level="warning",
        measure="spread between members relative to the spread of scores, below",
        threshold=1e-6,
        reason="Copies of one model cost several times as much and can never be unsure.",
        fix="Give each member its own seed and its own fold of the data.",
    ),
    "members.offset": Rule(
        level="warning",
        measure="spread of the members' mean scores relative to the spread of scores, above",
        threshold=0.5,
        reason="The preference loss leaves the level of scores free; `worst` then follows the member with the lowest "
        "level, and `uncertainty` punishes a difference that means nothing.",
        fix="Centre each member's scores, train with `centre` above 0, or combine them by `mean`.",
    ),
    "reward.ok": Rule(
        level="ok",
        measure="fatal findings and warnings, at most",
        threshold=0,
        reason="Nothing above was found.",
        fix="",
    ),
}


def finding_of(code: str, message: str, **evidence: Any) -> Finding:
    """The finding of one rule; the evidence always has the threshold."""
    rule = RULES[code]
    return Finding(
        level=rule.level,
        code=code,
        message=message,
        fix=rule.fix,
        evidence={"threshold": rule.threshold, **evidence},
    )
