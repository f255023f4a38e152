"""What `evaluation.json` says, as a table: a column a model, the baseline first, intervals of 95 % in brackets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kedge.report.run.records import Record
from kedge.report.words import number

_NONE = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTable:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def evaluation_table(evaluation: Record) -> EvaluationTable:
    """Every number of every model; where a model has none, a dash."""
    models: Mapping[str, Any] = evaluation["models"]
    baseline = str(evaluation["baseline"])
    columns = [_column(models[name], evaluation["comparisons"].get(name, {}), baseline) for name in models]
    titles = list(dict.fromkeys(title for column in columns for title in column))
    return EvaluationTable(
        head=("", *models), rows=tuple((title, *(column.get(title, _NONE) for column in columns)) for title in titles)
    )


def _column(summary: Mapping[str, Any], against: Mapping[str, Any], baseline: str) -> dict[str, str]:
    column: dict[str, str] = {}
    for source, found in summary["scores"].items():
        column[f"{source}: mean score"] = _estimate(found["mean"], 3)
        if won := against.get(source):
            column[f"{source}: wins over {baseline}"] = _share(won["win_rate"], "rate")
            column[f"{source}: wins at equal length"] = _share(won["length_controlled"], "mean")
            column[f"{source}: ties"] = _percent(won["win_rate"]["ties"])
        if found["unscored"]:
            column[f"{source}: answers without a score"] = f"{found['unscored']:,}"
    return column | {
        f"KL from {baseline}, nats": _estimate(summary["kl"], 2),
        "length, tokens": _estimate(summary["length"], 1),
        "finished": _percent(summary["finished"]),
        "repetition": number(summary["repetition"]),
        "distinct": number(summary["distinct"]),
    }


def _estimate(found: Mapping[str, Any] | None, digits: int) -> str:
    """
    >>> _estimate({"mean": 1.25, "low": -0.5, "high": 2.0}, 1), _estimate(None, 1)
    ('1.2 [−0.5, 2.0]', '–')
    """
    if found is None:
        return _NONE
    return "{} [{}, {}]".format(*(number(found[key], digits) for key in ("mean", "low", "high")))


def _share(found: Mapping[str, Any] | None, middle: str) -> str:
    if found is None:
        return _NONE
    low, high = (number(100 * found[key], 1) for key in ("low", "high"))
    return f"{_percent(found[middle])} [{low}, {high}]"


def _percent(share: float) -> str:
    return f"{number(100 * share, 1)} %"
