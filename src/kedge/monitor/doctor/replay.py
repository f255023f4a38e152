"""The detectors replayed over a run's metrics: at every step of a short run, at the telling ones of a long run.

A rule looks at a window of steps that ends with the one at hand, so it can be asked about any step by itself. Of a long
run it is asked where something may have begun: at the first and last steps, at the lowest and highest value and mean of
each metric in every stretch, at values that are not finite, and at the steps of the run's own alarms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from kedge.core.metric_table import Floats, MetricTable, as_table
from kedge.monitor.alarms import Alarm
from kedge.monitor.detectors import READ, Watchdog
from kedge.monitor.detectors.watchdog import RECENT, Column

MOST_STEPS = 4000
"""Up to so many steps, all of them are looked at."""
_AT_ENDS = 100
"""Steps at each end of a long run that are all looked at."""
_STRETCHES = 20
_MEAN_OF = 5
"""Most rules compare means of so many steps."""


def replay(watchdog: Watchdog, metrics: Sequence[Mapping[str, Any]], event_steps: Iterable[int]) -> list[Alarm]:
    """The alarms of a run, by a fresh watchdog. `event_steps` are those at which the run raised alarms itself."""
    table = as_table(metrics)
    columns = {name: table.values(name) for name in table.names if name in READ}
    steps = np.nan_to_num(table.values("step"))
    first = int((table.values("step") == 0).sum())  # a look at the policy before it learns is no step
    is_short = len(table) <= MOST_STEPS
    rows = range(len(table)) if is_short else telling_rows(table, columns, event_steps)
    rows = [row for row in rows if row >= first]
    return [
        alarm
        for row, latest in zip(rows, _records(table, columns, rows), strict=True)
        for alarm in watchdog.look(int(steps[row]), latest, _window(columns, row, first), num_steps=row + 1 - first)
    ]


def telling_rows(table: MetricTable, columns: Mapping[str, Floats], event_steps: Iterable[int]) -> list[int]:
    """Rows of a long run at which a rule may see something that it does not see at the others."""
    size = len(table)
    rows = {*range(_AT_ENDS), *range(size - _AT_ENDS, size)}
    by_step = {int(step): row for row, step in enumerate(np.nan_to_num(table.values("step")))}
    rows.update(by_step[step] for step in event_steps if step in by_step)
    edges = np.linspace(0, size, _STRETCHES + 1).astype(int)
    for name, values in columns.items():
        given, at = values[table.present(name)], np.flatnonzero(table.present(name))
        is_finite = np.isfinite(given)
        bad = np.flatnonzero(~is_finite)
        rows.update(at[bad[np.diff(bad, prepend=-2) > 1]].tolist())  # where numbers stop being finite
        if is_finite.any():
            usable, where = given[is_finite], at[is_finite]
            for line, shift in ((usable, 0), (_moving_means(usable), _MEAN_OF - 1)):
                rows.update(_extremes(line, where[shift:], edges))
    return sorted(rows)


def _moving_means(values: Floats) -> Floats:
    if len(values) < _MEAN_OF:
        return np.empty(0)
    return np.convolve(values, np.full(_MEAN_OF, 1 / _MEAN_OF), mode="valid")


def _extremes(values: Floats, rows: Any, edges: Any) -> Iterable[int]:
    """The rows of the lowest and the highest value in each stretch."""
    bounds = np.searchsorted(rows, edges)
    for start, end in pairwise(bounds):
        if end > start:
            yield int(rows[start + values[start:end].argmin()])
            yield int(rows[start + values[start:end].argmax()])


def _window(columns: Mapping[str, Floats], row: int, first: int) -> Column:
    """The recent values of each metric, from the first row at most up to a row; of one that the run lacks there are
    none."""
    start, end = max(first, row + 1 - RECENT), row + 1
    missing = [math.nan] * (end - start)
    return lambda name: columns[name][start:end].tolist() if name in columns else missing


def _records(table: MetricTable, columns: Mapping[str, Floats], rows: Sequence[int]) -> list[dict[str, float]]:
    """Some rows as the watchdog takes them."""
    at = np.array(rows, dtype=np.intp)
    records: list[dict[str, float]] = [{} for _ in rows]
    for name, values in columns.items():
        for record, value, is_present in zip(
            records, values[at].tolist(), table.present(name)[at].tolist(), strict=True
        ):
            if is_present:
                record[name] = value
    return records
