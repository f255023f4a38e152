"""How the processes of a run spent their time, a bar each: busy, communicating, waiting for the others."""

from __future__ import annotations

from collections.abc import Sequence

from kedge.core.world import Spent
from kedge.monitor.doctor.speed import process_times
from kedge.report.charts.axes import Axis
from kedge.report.charts.plot import Bar, Bars, Colour, Plot
from kedge.report.run.run_records import Record
from kedge.report.words import duration

_HALF_WIDTH = 0.4
_KINDS: tuple[tuple[str, Colour], ...] = (("busy", "first"), ("communicating", "third"), ("waiting", "second"))


def process_plot(metrics: Sequence[Record]) -> Plot | None:
    """None for a run of one process, and where nothing was measured."""
    times = process_times(metrics)
    if not times:
        return None
    return Plot(
        title="What each process did",
        note="Shares of the time between the steps, in %. Processes that wait have too little to do, or another one "
        "has too much: process 0 also writes the run folder. The seconds show under the pointer.",
        x_name="process",
        bars=tuple(
            Bars(name=kind, colour=colour, bars=tuple(_bar(rank, times[rank], place) for rank in range(len(times))))
            for place, (kind, colour) in enumerate(_KINDS)
        ),
        across=Axis(
            low=-0.5, high=len(times) - 0.5, is_whole=True, labels=[(rank, str(rank)) for rank in range(len(times))]
        ),
        up=Axis(low=0.0, high=100.0),
    )


def _bar(rank: int, spent: Spent, place: int) -> Bar:
    """The part of a process's bar at a place of `_KINDS`, on top of those before it."""
    seconds = (spent.busy, spent.communicating, spent.waiting)
    whole = sum(seconds) or 1.0
    base, own = 100 * sum(seconds[:place]) / whole, 100 * seconds[place] / whole
    return Bar(
        low=rank - _HALF_WIDTH,
        high=rank + _HALF_WIDTH,
        base=base,
        height=base + own,
        title=f"process {rank}: {_KINDS[place][0]} {own:.0f} %, {duration(seconds[place])}",
    )
