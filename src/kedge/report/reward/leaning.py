"""Does the model judge by length? The findings on it, from the numbers of `length`.

A model is compared with one length rule, "the longer wins" or "the shorter wins". What counts is how it fares on the
pairs where that rule is wrong: a good model is right there too, however biased the data are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from kedge.core.findings import Finding
from kedge.report.reward.intervals import Estimate, Share
from kedge.report.reward.length import LengthBias
from kedge.report.reward.result import RewardReport
from kedge.report.reward.rules import RULES, finding
from kedge.report.reward.words import number, percent, points, told

Winner = Literal["longer", "shorter"]

_WINNERS: tuple[Winner, ...] = get_args(Winner)


def rule_name(length: LengthBias) -> str:
    """The length rule that is right more often on these pairs."""
    return f"“the {_longer_if(length.rule.value >= 0.5)} wins”"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaning:
    """The length rule that the model is compared with, and how the model fares where this rule is wrong."""

    winner: Winner
    is_strong: bool
    correlation: float
    against: Share | None
    gain: Estimate

    @property
    def is_condemned(self) -> bool:
        return _is_below_coin(self.against)

    @property
    def is_cleared(self) -> bool:
        """Clearly better than a coin where the rule is wrong: it reads more than length, however biased the data."""
        return self.against is not None and self.against.low > RULES["length.leans"].threshold

    @property
    def is_beaten_by_model(self) -> bool:
        return self.gain.low > RULES["length.no_better"].threshold

    @property
    def loser(self) -> str:
        return f"the {self.winner} answer was rejected"


def _leaning(length: LengthBias) -> _Leaning:
    """The rule is the one that the scores follow closely, or fall for; else the one that is right more often."""
    correlation = length.difference_spearman or 0.0
    is_strong = abs(correlation) > RULES["length.disguise"].threshold
    fallen_for: list[Winner] = [winner for winner in _WINNERS if _is_below_coin(_against(length, winner))]
    if is_strong:
        winner = _longer_if(correlation > 0)
    else:
        winner = fallen_for[0] if len(fallen_for) == 1 else _longer_if(length.rule.value >= 0.5)
    return _Leaning(
        winner=winner,
        is_strong=is_strong,
        correlation=correlation,
        against=_against(length, winner),
        gain=length.gain_over_longer if winner == "longer" else length.gain_over_shorter,
    )


def _longer_if(is_longer: bool) -> Winner:
    return "longer" if is_longer else "shorter"


def _against(length: LengthBias, winner: Winner) -> Share | None:
    """The model where the rule is wrong."""
    contest = length.longer_rejected if winner == "longer" else length.longer_chosen
    return contest.model if contest else None


def _is_below_coin(share: Share | None) -> bool:
    return share is not None and share.high < RULES["length.leans"].threshold


def disguise(report: RewardReport) -> Iterator[Finding]:
    """It follows length closely and nothing shows that it reads more; or it leans on length and knows nothing else."""
    lean, balanced, coin = _leaning(report.length), report.length.balanced, RULES["accuracy.coin"].threshold
    is_unproven = not lean.is_beaten_by_model and not lean.is_cleared
    follows = lean.is_strong and (lean.is_condemned or is_unproven)
    knows_nothing_else = lean.is_condemned and balanced is not None and balanced.low <= coin <= balanced.high
    if not (follows or knows_nothing_else):
        return
    where = f"where {lean.loser}, its accuracy is {told(lean.against)}" if lean.against else f"in no pair {lean.loser}"
    blind = f", and {percent(balanced.value)} with length balanced out" if balanced else ""
    message = (
        f"The model is length in disguise: {where}{blind}; score and length differences correlate at "
        f"{number(lean.correlation, 2)} (rank correlation), and over “the {lean.winner} wins” it gains "
        f"{points(lean.gain)}."
    )
    against = lean.against.value if lean.against else None
    yield finding("length.disguise", message, spearman=lean.correlation, against=against, gain=lean.gain.value)


def length_warnings(report: RewardReport) -> Iterator[Finding]:
    lean = _leaning(report.length)
    if lean.against and (lean.is_condemned or (lean.is_strong and not lean.is_cleared)):
        message = f"The model leans on length: where {lean.loser}, its accuracy is only {told(lean.against)}."
        yield finding("length.leans", message, accuracy=lean.against.value, high=lean.against.high)
    elif not lean.is_beaten_by_model and not lean.is_cleared:
        message = f"The model is not clearly better than “the {lean.winner} wins”: it gains {points(lean.gain)}."
        yield finding("length.no_better", message, gain=lean.gain.value, low=lean.gain.low)


def baseline(report: RewardReport) -> Iterator[Finding]:
    length = report.length
    rule = max(length.rule.value, 1 - length.rule.value)
    if rule > RULES["length.baseline"].threshold:
        balanced = f"balanced accuracy, {told(length.balanced)}" if length.balanced else "accuracy on balanced pairs"
        message = (
            f"The rule {rule_name(length)} alone is right in {percent(rule)} of these pairs, so bare accuracy "
            f"means little here; the number to look at is {balanced}."
        )
        yield finding("length.baseline", message, rule=rule)
