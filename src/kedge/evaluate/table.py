"""An evaluation as lines of text: a column a model, the baseline first."""

from __future__ import annotations

from collections.abc import Mapping

from kedge.evaluate.compare import Comparison, Evaluation, ModelSummary
from kedge.evaluate.intervals import Estimate
from kedge.evaluate.win_rates import WinRate

_NONE = "–"


def lines(evaluation: Evaluation) -> list[str]:
    """Numbers stand under the name of their model, with their 95 % interval in brackets."""
    columns = [
        {"": model, **_column(summary, evaluation.comparisons.get(model, {}), evaluation.baseline)}
        for model, summary in evaluation.models.items()
    ]
    titles = list(columns[0])
    widths = [max(map(len, titles)), *(max(map(len, column.values())) for column in columns)]
    rows = ([title, *(column[title] for column in columns)] for title in titles)
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _column(summary: ModelSummary, against: Mapping[str, Comparison], baseline: str) -> dict[str, str]:
    column: dict[str, str] = {}
    for source, found in summary.scores.items():
        won = against.get(source)
        column |= {
            f"{source}, mean": _number(found.mean, 3),
            f"{source}, win rate over {baseline}": _share(won.win_rate) if won else _NONE,
            f"{source}, at equal length": _share(won.length_controlled) if won else _NONE,
            f"{source}, ties": f"{won.win_rate.ties:.1%}" if won else _NONE,
        }
    return column | {
        "KL, nats": _number(summary.kl, 2),
        "length, tokens": _number(summary.length, 1),
        "finished": f"{summary.finished:.1%}",
        "repetition": f"{summary.repetition:.3f}",
        "distinct-2": f"{summary.distinct:.3f}",
    }


def _number(found: Estimate | None, places: int) -> str:
    if found is None:
        return _NONE
    return f"{found.mean:.{places}f} [{found.low:.{places}f}, {found.high:.{places}f}]"


def _share(found: WinRate | Estimate | None) -> str:
    if found is None:
        return _NONE
    middle = found.rate if isinstance(found, WinRate) else found.mean
    return f"{middle:.1%} [{found.low:.1%}, {found.high:.1%}]"
