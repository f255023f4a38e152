"""The course of a PPO run without KL penalty, in words: where its truth was best, how far it fell, which alarms came.

Pure text from the journals of the run, as `kedge.demo.story` is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.demo.story import aligned

GOLD_FALLS = "reward.gold_falls"
"""The code of the alarm that the truth falls."""
WINDOW = 5
"""Iterations that a point is the mean of: of single iterations, the luckiest would be the peak."""
_METRICS = ("gold/mean", "reward/mean", "kl/mean", "length/mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The means over iterations `first` to `last`."""

    first: int
    last: int
    truth: float
    proxy: float
    kl: float
    length: float


def start_best_end(metrics: Sequence[Mapping[str, float]], window: int = WINDOW) -> tuple[Point, Point, Point]:
    """The start of a run, the point where its truth was best, and its end."""
    window = min(window, len(metrics))
    points = [_mean_point(metrics[at : at + window]) for at in range(len(metrics) - window + 1)]
    return points[0], max(points, key=lambda point: point.truth), points[-1]


def _mean_point(rows: Sequence[Mapping[str, float]]) -> Point:
    truth, proxy, kl, length = (sum(row[name] for row in rows) / len(rows) for name in _METRICS)
    return Point(first=int(rows[0]["step"]), last=int(rows[-1]["step"]), truth=truth, proxy=proxy, kl=kl, length=length)


def table(start: Point, best: Point, end: Point) -> list[str]:
    """
    >>> point = Point(first=1, last=5, truth=1.81, proxy=-0.35, kl=0.1, length=27.4)
    >>> print('\\n'.join(table(point, point, point)[:2]))
                iterations  truth  proxy   KL  tokens
    start              1–5   1.81  -0.35  0.1    27.4
    """
    rows = [("", "iterations", "truth", "proxy", "KL", "tokens")]
    for name, point in (("start", start), ("best truth", best), ("end", end)):
        span, kl, length = f"{point.first}–{point.last}", f"{point.kl:.1f}", f"{point.length:.1f}"
        rows.append((name, span, f"{point.truth:.2f}", f"{point.proxy:.2f}", kl, length))
    return aligned(rows)


def fall(best: Point, end: Point) -> str:
    """How far the truth fell from its best, and how far the proxy rose meanwhile.

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
    """The alarms with their iterations, and whether one of them says that the truth falls.

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
    codes = ", ".join((first.format("iteration "), *(other.format("") for other in others)))
    if any(event["code"] == GOLD_FALLS for event in events):
        return f"The detectors said so as it ran: {codes}."
    return f"The detectors said: {codes}. None of them saw the truth fall."


def peak(kl: float, interval: tuple[float, float], now: float) -> str:
    """Where the law of Gao et al. 2022, R(d) = d (α − β ln d) with d = √KL, predicts the peak of the truth.

    >>> peak(4.21, (3.5, 5.06), 41.0)
    'The law of Gao et al. (2022), fitted to it: the truth peaks at a KL of 4.2 nats (3.5 to 5.1); this run is at 41.0.'
    """
    low, high = interval
    where = f"the truth peaks at a KL of {kl:.1f} nats ({low:.1f} to {high:.1f}); this run is at {now:.1f}."
    return f"The law of Gao et al. (2022), fitted to it: {where}"
