"""The numbers of a comparison: from an evaluation on held-out prompts where there is one, else from training itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kedge.report.compare.records import Entry, Evaluated
from kedge.report.run.cost import cost_of
from kedge.report.run.telling import ends

MEMORY = "memory/peak_gib"
"""In the evidence of an event (`kedge.stages.shared.peak_memory`), or in metrics: the peak of a stage."""
_TRAINED = {"reward": "reward/mean", "gold": "gold/mean", "kl": "kl/mean", "length": "length/mean"}
_COSTS = ("seconds", "tokens", "memory")
NAMES = ("reward", "gold", "kl", "wins", "wins_gold", "wins_equal_length", "length", *_COSTS)


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
    """One line of the table: a run, or the model that runs started from."""

    label: str
    method: str
    status: str
    numbers: Numbers
    why_not: Mapping[str, str]
    """By name: why there is no such number."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def rows_of(entries: Sequence[Entry]) -> list[Row]:
    """Baselines first, each once; then the runs."""
    return [*_baselines(entries), *map(_row, entries)]


def _row(entry: Entry) -> Row:
    found = dict(_of_evaluation(entry.evaluated, entry.evaluated.name)) if entry.evaluated else {}
    for name, metric in _TRAINED.items():
        if name not in found and (value := _last(entry, metric)) is not None:
            found[name] = Number(value=value, source="training")
    found |= dict(_costs(entry))
    return Row(
        label=entry.label,
        method=entry.method,
        status=entry.stage.status,
        numbers=found,
        why_not={name: _why_not(entry, name) for name in NAMES if name not in found},
    )


def _baselines(entries: Sequence[Entry]) -> Iterator[Row]:
    told: set[tuple[str, ...]] = set()
    for entry in entries:
        evaluated = entry.evaluated
        if evaluated is None or evaluated.baseline == evaluated.name:
            continue
        key = (evaluated.baseline, *evaluated.measure)
        if key not in told:
            told.add(key)
            found = dict(_of_evaluation(evaluated, evaluated.baseline))
            yield Row(label=evaluated.baseline, method="baseline", status="", numbers=found, why_not={})


def _of_evaluation(evaluated: Evaluated, model: str) -> Iterator[tuple[str, Number]]:
    summary: Mapping[str, Any] = evaluated.numbers["models"][model]
    against: Mapping[str, Any] = evaluated.numbers["comparisons"].get(model, {})
    for source in ("reward", "gold"):
        yield from _interval(source, summary["scores"].get(source, {}).get("mean"), "mean")
        won = against.get(source, {})
        yield from _interval("wins" if source == "reward" else "wins_gold", won.get("win_rate"), "rate")
        if source == "reward":
            yield from _interval("wins_equal_length", won.get("length_controlled"), "mean")
    yield from _interval("kl", summary["kl"], "mean")
    if model == evaluated.baseline and summary["kl"] is None:
        yield "kl", Number(value=0.0, source="evaluation")  # from itself
    yield from _interval("length", summary["length"], "mean")


def _interval(name: str, found: Mapping[str, Any] | None, middle: str) -> Iterator[tuple[str, Number]]:
    if found is not None:
        low, high = found.get("low"), found.get("high")
        yield name, Number(value=found[middle], low=low, high=high, source="evaluation")


def _last(entry: Entry, metric: str) -> float | None:
    """The end of training: as the report tells it, or the one value that there is."""
    given = [record[metric] for record in entry.stage.metrics if record.get(metric) is not None]
    both = ends(entry.stage.metrics, metric)
    return both[1] if both else given[-1] if given else None


def _costs(entry: Entry) -> Iterator[tuple[str, Number]]:
    cost = cost_of(entry.stage)
    # Steps are counted once, and a pause between two parts of a run is not work.
    yield "seconds", Number(value=cost.seconds or cost.elapsed, source="training")
    if cost.tokens:
        yield "tokens", Number(value=cost.tokens, source="training")
    if peaks := [told[MEMORY] for told in (*entry.stage.metrics, *memory_events(entry)) if MEMORY in told]:
        yield "memory", Number(value=max(peaks), source="training")


def memory_events(entry: Entry) -> list[Mapping[str, Any]]:
    """What its events say of memory, one a part of the run."""
    evidence = [event.get("evidence") or {} for event in entry.stage.events]
    return [one for one in evidence if MEMORY in one]


def _why_not(entry: Entry, name: str) -> str:
    if name == "memory":
        return "its events tell no peak, which a stage does when it has ended well"
    if name == "tokens":
        return "its metrics have no tokens/per_second"
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
    source = "gold" if "gold" in name else "reward"
    return f"its evaluation has no {source} source"
