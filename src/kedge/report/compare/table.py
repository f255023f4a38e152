"""The table of a comparison: a row a run, with numbers and where they come from, as text.

Numbers are those of an evaluation on held-out prompts where there is one, else those of training, under a star. A dash
is a number that is not known; a note says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kedge.core.metric_table import as_table
from kedge.report.compare.entries import Entry, Evaluated
from kedge.report.run.summary import ends
from kedge.report.run.tables import cost_of
from kedge.report.words import NONE, amount, duration, number, percent

MEMORY = "memory/peak_gib"
"""The peak of a stage, in the evidence of an event (`kedge.stages.shared.peak_memory`) or in metrics."""
_TRAINED = {"reward": "reward/mean", "gold": "gold/mean", "kl": "kl/mean", "length": "length/mean"}
_COSTS = ("seconds", "tokens", "memory", "calls", "usd")
_AT_TIMES = ("wins_judge", "calls", "usd")
"""What most runs have nothing to do with: where no run has it, it is not missed."""
_TITLES: Mapping[str, str] = {
    "reward": "reward",
    "gold": "gold",
    "kl": "KL",
    "wins": "wins",
    "wins_gold": "wins, gold",
    "wins_equal_length": "wins, equal length",
    "wins_judge": "wins, judge",
    "length": "length",
    "seconds": "time",
    "tokens": "tokens",
    "memory": "memory",
    "calls": "judge calls",
    "usd": "cost",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """`low` and `high` are its 95 % interval. `source` says where it was measured."""

    value: float
    source: Literal["evaluation", "training"]
    low: float | None = None
    high: float | None = None


Numbers = Mapping[str, Number]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A run, or the model that runs started from."""

    label: str
    method: str
    status: str
    numbers: Numbers
    why_not: Mapping[str, str]
    """By name: why there is no such number."""
    trained_on: str = ""
    """What kind of reward; empty where on none."""
    scored_by: str = ""
    """What kind of reward its evaluation is by; empty where there is none."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def rows_of(entries: Sequence[Entry]) -> list[Row]:
    """Baselines first, each once; then the runs."""
    has_paid = any(entry.paid.calls for entry in entries)
    return [*_baselines(entries), *(_row(entry, has_paid=has_paid) for entry in entries)]


def _row(entry: Entry, *, has_paid: bool) -> Row:
    numbers = dict(_of_evaluation(entry.evaluated, entry.evaluated.name)) if entry.evaluated else {}
    for name, metric in _TRAINED.items():
        if name not in numbers and (value := _last(entry, metric)) is not None:
            numbers[name] = Number(value=value, source="training")
    numbers |= dict(_costs(entry))
    if has_paid:
        numbers |= dict(_paid(entry))
    return Row(
        label=entry.label,
        method=entry.method,
        status=entry.stage.status,
        numbers=numbers,
        why_not={name: _why_not(entry, name) for name in _TITLES if name not in numbers},
        trained_on=entry.trained_on,
        scored_by=entry.evaluated.scored_by if entry.evaluated else "",
    )


def _baselines(entries: Sequence[Entry]) -> Iterator[Row]:
    keys: set[tuple[str, ...]] = set()
    for entry in entries:
        evaluated = entry.evaluated
        if evaluated is None or evaluated.baseline == evaluated.name:
            continue
        key = (evaluated.baseline, *evaluated.measure)
        if key not in keys:
            keys.add(key)
            numbers = dict(_of_evaluation(evaluated, evaluated.baseline))
            yield Row(
                label=evaluated.baseline,
                method="baseline",
                status="",
                numbers=numbers,
                why_not={},
                scored_by=evaluated.scored_by,
            )


def _of_evaluation(evaluated: Evaluated, model: str) -> Iterator[tuple[str, Number]]:
    summary: Mapping[str, Any] = evaluated.numbers["models"][model]
    against: Mapping[str, Any] = evaluated.numbers["comparisons"].get(model, {})
    for source in ("reward", "gold"):
        yield from _interval(source, summary["scores"].get(source, {}).get("mean"), "mean")
        comparison = against.get(source, {})
        yield from _interval("wins" if source == "reward" else "wins_gold", comparison.get("win_rate"), "rate")
        if source == "reward":
            yield from _interval("wins_equal_length", comparison.get("length_controlled"), "mean")
    judges: Mapping[str, Any] = (evaluated.numbers.get("judges") or {}).get(model, {})
    yield from _interval("wins_judge", judges.get("majority", next(iter(judges.values()), None)), "rate")
    yield from _interval("kl", summary["kl"], "mean")
    if model == evaluated.baseline and summary["kl"] is None:
        yield "kl", Number(value=0.0, source="evaluation")  # from itself
    yield from _interval("length", summary["length"], "mean")


def _interval(name: str, estimate: Mapping[str, Any] | None, middle: str) -> Iterator[tuple[str, Number]]:
    if estimate is not None:
        low, high = estimate.get("low"), estimate.get("high")
        yield name, Number(value=estimate[middle], low=low, high=high, source="evaluation")


def _last(entry: Entry, metric: str) -> float | None:
    """The end of training: the mean of its last steps as in the report, or its only value."""
    _, values = as_table(entry.stage.metrics).column(metric)
    both = ends(entry.stage.metrics, metric)
    return both[1] if both else float(values[-1]) if len(values) else None


def _costs(entry: Entry) -> Iterator[tuple[str, Number]]:
    cost = cost_of(entry.stage)
    # Steps are counted once, and a pause between two parts of a run is not work.
    yield "seconds", Number(value=cost.seconds or cost.elapsed, source="training")
    if cost.tokens:
        yield "tokens", Number(value=cost.tokens, source="training")
    measured = as_table(entry.stage.metrics).finite(MEMORY).tolist()
    if peaks := [*measured, *(evidence[MEMORY] for evidence in _memory_evidence(entry))]:
        yield "memory", Number(value=max(peaks), source="training")


def _paid(entry: Entry) -> Iterator[tuple[str, Number]]:
    yield "calls", Number(value=entry.paid.calls, source="training")
    if entry.paid.usd is not None:
        yield "usd", Number(value=entry.paid.usd, source="training")


def _memory_evidence(entry: Entry) -> list[Mapping[str, Any]]:
    """The evidence of its events on memory, one a part of the run."""
    evidence = [event.get("evidence") or {} for event in entry.stage.events]
    return [measured for measured in evidence if MEMORY in measured]


def _why_not(entry: Entry, name: str) -> str:
    """Why a run has no such number."""
    if name == "memory":
        return "its events tell no peak, which a stage does when it has ended well"
    if name == "tokens":
        return "its metrics have no tokens/per_second"
    if name == "usd":
        return "its settings tell no price of tokens, or several (budget: {usd, input, output})"
    evaluated = entry.evaluated
    if evaluated is None:
        metric = f", and its metrics have no {_TRAINED[name]}" if name in _TRAINED else ""
        return f"no evaluation beside it has its model{metric}"
    if evaluated.baseline == evaluated.name and name.startswith("wins"):
        return "it is the baseline of its evaluation"
    if name == "wins_equal_length" and "reward" in evaluated.numbers["comparisons"].get(evaluated.name, {}):
        return "length and model cannot be told apart in its evaluation"
    if name == "kl":
        return "its evaluation could not measure it (top_p, top_k, another tokenizer)"
    source = "gold" if "gold" in name else "judge" if name == "wins_judge" else "reward"
    return f"its evaluation has no {source}{'' if source == 'judge' else ' source'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def table_of(rows: Sequence[Row], entries: Sequence[Entry], *, with_intervals: bool) -> Table:
    """Columns that nobody has a number for are left out, and say so in a note."""
    shown = [name for name in _TITLES if any(name in row.numbers for row in rows)]
    apart = len({row.trained_on for row in rows if row.trained_on}) > 1
    return Table(
        head=("run", "method", *(_TITLES[name] for name in shown)),
        rows=tuple(
            (
                row.label,
                _method(row, apart=apart),
                *(_cell(name, row.numbers.get(name), with_intervals) for name in shown),
            )
            for row in rows
        ),
        notes=tuple(_notes(rows, entries)),
    )


def _method(row: Row, *, apart: bool) -> str:
    """Its method, and what it was trained on where the rows differ in that."""
    return f"{row.method} on {row.trained_on}" if apart and row.trained_on else row.method


def table_lines(table: Table, width: int | None = None) -> list[str]:
    """Plain text in columns, numbers to the right; where `width` letters are too few, a column a run, or a block a run.

    >>> table = Table(head=("run", "method", "reward"), rows=(("a", "ppo", "1.5"), ("b", "dpo", "12.0")), notes=())
    >>> for line in table_lines(table, width=17):
    ...     print(line)
    run       a     b
    method  ppo   dpo
    reward  1.5  12.0
    """
    whole = [table.head, *table.rows]
    lines = _in_columns(whole, num_left=2)
    if width is None or _fits(lines, width):
        return lines
    across = _in_columns(list(zip(*whole, strict=True)), num_left=1)
    if _fits(across, width):
        return across
    blocks = [_in_columns(list(zip(table.head, row, strict=True)), num_left=2) for row in table.rows]
    return [line for block in blocks for line in (*block, "")][:-1]


def _fits(lines: Sequence[str], width: int) -> bool:
    return all(len(line) <= width for line in lines)


def _in_columns(rows: Sequence[Sequence[str]], *, num_left: int) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if at < num_left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _cell(name: str, cell: Number | None, with_intervals: bool) -> str:
    """
    >>> _cell("wins", Number(value=0.815, low=0.75, high=0.9, source="evaluation"), True)
    '81.5 % [75.0, 90.0]'
    >>> _cell("kl", Number(value=2.5, source="training"), True), _cell("gold", None, False)
    ('2.50*', '–')
    """
    if cell is None:
        return NONE
    if name in _COSTS:
        return {"seconds": duration, "tokens": amount, "memory": _gib, "calls": amount, "usd": _usd}[name](cell.value)
    is_share = name.startswith("wins")
    scale, digits = (100, 1) if is_share else (1, {"length": 1, "kl": 2}.get(name, 3))
    value = percent(cell.value) if is_share else number(cell.value, digits)
    text = f"{value}{'*' if cell.source == 'training' else ''}"
    if not with_intervals or cell.low is None or cell.high is None:
        return text
    return f"{text} [{number(scale * cell.low, digits)}, {number(scale * cell.high, digits)}]"


def _usd(value: float) -> str:
    return f"{value:,.4f} USD"


def _gib(value: float) -> str:
    return f"{value:.2f} GiB"


def _notes(rows: Sequence[Row], entries: Sequence[Entry]) -> Iterator[str]:
    """Below the table: stars, dashes, numbers that must not be compared, runs that are not done."""
    if any(cell.source == "training" and name not in _COSTS for row in rows for name, cell in row.numbers.items()):
        yield (
            "* measured in training, on its prompts: the mean of the last steps, and no evaluation on held-out ones; "
            "a length then counts the token that ends a turn, which evaluations leave out"
        )
    reasons: dict[tuple[str, str], list[str]] = {}
    unmissed = [name for name in _AT_TIMES if not any(name in row.numbers for row in rows)]
    for row in rows:
        for name, why in row.why_not.items():
            if name in unmissed and not (name == "usd" and "calls" in row.numbers):
                continue
            reasons.setdefault((_TITLES[name], why), []).append(row.label)
    for (title, why), labels in reasons.items():
        yield f"no {title} of {', '.join(labels)}: {why}"
    of_process = [
        entry.label for entry in entries if any(evidence["of"] == "process" for evidence in _memory_evidence(entry))
    ]
    if of_process:
        yield f"memory of {', '.join(of_process)}: resident in the whole process, libraries included; no GPU was used"
    yield from _unlike_rewards(rows)
    if any(entry.paid.calls for entry in entries):
        paid = "; ".join(
            f"{entry.label}: {', '.join(f'{count:,} of {stage}' for stage, count in entry.paid.by_stage.items())}"
            for entry in entries
            if entry.paid.calls
        )
        yield f"judge calls are those of a stage and of all that it learnt from, each paid once ({paid})"
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


def _unlike_rewards(rows: Sequence[Row]) -> Iterator[str]:
    """That rewards of different kinds are numbers on different scales."""
    kinds = {row.trained_on for row in rows if row.trained_on}
    if len(kinds) < 2:
        return
    trained = "; ".join(f"{row.label}: {row.trained_on}" for row in rows if row.trained_on)
    scored = ", ".join(sorted({row.scored_by for row in rows if row.scored_by}))
    by = f"; evaluations are scored by: {scored}, the same for all in one evaluation" if scored else ""
    yield f"these runs were trained on rewards of different kinds ({trained}), which are not on one scale{by}"
