"""A comparison as a table of text, a row a run. A star: measured in training. A dash: not known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kedge.report.compare.numbers import Number, Row, memory_events
from kedge.report.compare.records import Entry
from kedge.report.words import amount, duration, number

_NONE = "–"
_TITLES: Mapping[str, str] = {
    "reward": "reward",
    "gold": "gold",
    "kl": "KL",
    "wins": "wins",
    "wins_gold": "wins, gold",
    "wins_equal_length": "wins, equal length",
    "length": "length",
    "seconds": "time",
    "tokens": "tokens",
    "memory": "memory",
}
_COSTS = ("seconds", "tokens", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def table_of(rows: Sequence[Row], entries: Sequence[Entry], *, with_intervals: bool) -> Table:
    """Columns that nobody has a number for are left out, and say so in a note."""
    shown = [name for name in _TITLES if any(name in row.numbers for row in rows)]
    return Table(
        head=("run", "method", *(_TITLES[name] for name in shown)),
        rows=tuple(
            (row.label, row.method, *(_cell(name, row.numbers.get(name), with_intervals) for name in shown))
            for row in rows
        ),
        notes=tuple(_notes(rows, entries)),
    )


def lines(table: Table) -> list[str]:
    """Plain text in columns, numbers to the right."""
    whole = [table.head, *table.rows]
    widths = [max(len(row[at]) for row in whole) for at in range(len(table.head))]
    return [
        "  ".join(
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in whole
    ]


def _cell(name: str, found: Number | None, with_intervals: bool) -> str:
    """
    >>> _cell("wins", Number(value=0.815, low=0.75, high=0.9, source="evaluation"), True)
    '81.5 % [75.0, 90.0]'
    >>> _cell("kl", Number(value=2.5, source="training"), True), _cell("gold", None, False)
    ('2.50*', '–')
    """
    if found is None:
        return _NONE
    if name in _COSTS:
        return {"seconds": duration, "tokens": amount, "memory": _gib}[name](found.value)
    scale, digits, unit = (100, 1, " %") if name.startswith("wins") else (1, {"length": 1, "kl": 2}.get(name, 3), "")
    told = f"{number(scale * found.value, digits)}{unit}{'*' if found.source == 'training' else ''}"
    if not with_intervals or found.low is None or found.high is None:
        return told
    return f"{told} [{number(scale * found.low, digits)}, {number(scale * found.high, digits)}]"


def _gib(value: float) -> str:
    return f"{value:.2f} GiB"


def _notes(rows: Sequence[Row], entries: Sequence[Entry]) -> Iterator[str]:
    """What the table cannot say by itself: stars, dashes, what must not be compared, what is not done."""
    if any(one.source == "training" and name not in _COSTS for row in rows for name, one in row.numbers.items()):
        yield "* measured in training, on its prompts: the mean of the last steps, and no evaluation on held-out ones"
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, why in row.why_not.items():
            reasons.setdefault((_TITLES[name], why), []).append(row.label)
    for (title, why), labels in reasons.items():
        yield f"no {title} of {', '.join(labels)}: {why}"
    if of_process := [entry.label for entry in entries if any(one["of"] == "process" for one in memory_events(entry))]:
        yield f"memory of {', '.join(of_process)}: resident in the whole process, libraries included; no GPU was used"
    if len({entry.evaluated.measure for entry in entries if entry.evaluated}) > 1:
        yield (
            "these runs were evaluated on different prompts or by different judges: scores and win rates of one cannot "
            "be held against those of another"
        )
    if len({entry.evaluated.baseline for entry in entries if entry.evaluated}) > 1:
        yield "win rates and KL are against different baselines"
    for row in rows:
        if row.status not in ("", "done"):
            yield f"{row.label} is not done ({row.status}): its numbers are those so far"
