"""How a run went whose anchor was let go: where its truth was best, how far it fell, and who said so.

Pure text from the journals of the run, as `kedge.demo.story` is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.demo.story import aligned

GOLD_FALLS = "reward.gold_falls"
"""The detector's word for it."""
LOOKS = 5
"""Iterations that a point of `course` is the mean of: of single ones, the luckiest would be the peak."""
_COURSE = ("gold/mean", "reward/mean", "kl/mean", "length/mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The means of a few iterations in a row."""

    first: int
    last: int
    truth: float
    proxy: float
    kl: float
    length: float


def course(metrics: Sequence[Mapping[str, float]], looks: int = LOOKS) -> tuple[Point, Point, Point]:
    """A run where it began, where its truth was best, and where it ended."""
    looks = min(looks, len(metrics))
    parts = [metrics[at : at + looks] for at in range(len(metrics) - looks + 1)]
    points = [_point(part) for part in parts]
    return points[0], max(points, key=lambda one: one.truth), points[-1]


def _point(part: Sequence[Mapping[str, float]]) -> Point:
    truth, proxy, kl, length = (sum(row[name] for row in part) / len(part) for name in _COURSE)
    return Point(first=int(part[0]["step"]), last=int(part[-1]["step"]), truth=truth, proxy=proxy, kl=kl, length=length)


def table(start: Point, best: Point, end: Point) -> list[str]:
    """
    >>> at = Point(first=1, last=5, truth=1.81, proxy=-0.35, kl=0.1, length=27.4)
    >>> print('\\n'.join(table(at, at, at)[:2]))
                iterations  truth  proxy   KL  tokens
    start              1–5   1.81  -0.35  0.1    27.4
    """
    rows = [("", "iterations", "truth", "proxy", "KL", "tokens")]
    for name, at in (("start", start), ("best truth", best), ("end", end)):
        span = f"{at.first}–{at.last}"
        rows.append((name, span, f"{at.truth:.2f}", f"{at.proxy:.2f}", f"{at.kl:.1f}", f"{at.length:.1f}"))
    return aligned(rows)


def fall(best: Point, end: Point) -> str:
    """How far the truth fell from its best, and what the reward model made of it.

    >>> best = Point(first=15, last=19, truth=3.7, proxy=4.1, kl=5.2, length=28.0)
    >>> fall(best, Point(first=46, last=50, truth=-0.3, proxy=6.1, kl=67.1, length=43.0))
    'The truth was best at iteration 19, at a KL of 5.2 nats. It fell by 4.00 since, while the proxy rose by 2.00.'
    >>> fall(best, best)
    'The truth did not fall.'
    """
    if best.last == end.last:
        return "The truth did not fall."
    gain = end.proxy - best.proxy
    proxy = f"{'rose' if gain > 0 else 'fell'} by {abs(gain):.2f}"
    where = f"The truth was best at iteration {best.last}, at a KL of {best.kl:.1f} nats."
    return f"{where} It fell by {best.truth - end.truth:.2f} since, while the proxy {proxy}."


def alarms(events: Sequence[Mapping[str, Any]]) -> str:
    """What the detectors said and when, and whether one of them saw the truth fall.

    >>> alarms([{"code": "kl.running_away", "step": 22}, {"code": "reward.gold_falls", "step": 23}])
    'The detectors said so as it ran: kl.running_away (iteration 22), reward.gold_falls (23).'
    >>> alarms([{"code": "kl.running_away", "step": 22}])
    'The detectors said: kl.running_away (iteration 22). None of them saw the truth fall.'
    >>> alarms([])
    'The detectors said nothing.'
    """
    if not events:
        return "The detectors said nothing."
    first, *others = (f"{event['code']} ({{}}{event['step']})" for event in events)
    said = ", ".join((first.format("iteration "), *(other.format("") for other in others)))
    if any(event["code"] == GOLD_FALLS for event in events):
        return f"The detectors said so as it ran: {said}."
    return f"The detectors said: {said}. None of them saw the truth fall."


def peak(kl: float, interval: tuple[float, float], now: float) -> str:
    """Where the law of Gao et al. 2022, R(d) = d (α − β ln d) with d = √KL, sees the best of a run.

    >>> peak(4.21, (3.5, 5.06), 41.0)
    'The law of Gao et al. (2022), fitted to it: the truth peaks at a KL of 4.2 nats (3.5 to 5.1); this run is at 41.0.'
    """
    low, high = interval
    where = f"the truth peaks at a KL of {kl:.1f} nats ({low:.1f} to {high:.1f}); this run is at {now:.1f}."
    return f"The law of Gao et al. (2022), fitted to it: {where}"
