"""How often one model's answer scores higher than another's to the same prompt. A tie is half a win for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from kedge.core.shares import wilson
from kedge.evaluate.intervals import DRAWS, estimate


@dataclass(frozen=True, slots=True)
class Outcome:
    """Shares of the comparisons on one prompt; they sum to 1."""

    win: float
    tie: float
    loss: float

    @property
    def rate(self) -> float:
        return self.win + self.tie / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WinRate:
    """Means over prompts. `rate` is wins + ½ ties; `low` and `high` are its 95 % interval."""

    rate: float
    low: float
    high: float
    wins: float
    ties: float
    losses: float
    prompts: int


def compared(theirs: Sequence[float], base: Sequence[float], *, tie: float) -> Outcome:
    """Every answer of one model against every answer of the other. Scores that differ by at most `tie` are equal.

    >>> compared([3.0, 1.0], [1.0], tie=0.0)
    Outcome(win=0.5, tie=0.5, loss=0.0)
    """
    gaps = [one - other for one, other in product(theirs, base)]
    wins, losses = sum(gap > tie for gap in gaps), sum(gap < -tie for gap in gaps)
    return Outcome(wins / len(gaps), (len(gaps) - wins - losses) / len(gaps), losses / len(gaps))


def win_rate(outcomes: Sequence[Outcome], *, seed: int, draws: int = DRAWS) -> WinRate | None:
    """None without prompts. Where all prompts agree a bootstrap has no width: then Wilson's interval is given."""
    rates = [one.rate for one in outcomes]
    found = estimate(rates, seed=seed, draws=draws)
    if found is None:
        return None
    count = found.prompts
    low, high = wilson(sum(rates), count) if min(rates) == max(rates) else (found.low, found.high)
    return WinRate(
        rate=found.mean,
        low=low,
        high=high,
        wins=sum(one.win for one in outcomes) / count,
        ties=sum(one.tie for one in outcomes) / count,
        losses=sum(one.loss for one in outcomes) / count,
        prompts=count,
    )
