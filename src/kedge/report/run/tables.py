"""The tables of a run's report: inputs, environment, cost, metrics from end to end, reward report and evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from io import StringIO
from typing import Any, cast

import numpy as np

from kedge.core.metric_table import MetricTable, as_table
from kedge.report.run.run_records import Record, RunRecord, StageRecord
from kedge.report.words import NONE, number, percent, short
from kedge.runs.lineage import Link, lineage

_PHASES = {
    "time/generate": "generating",
    "time/judge": "judging",
    "time/gold_score": "asking gold",
    "time/exam": "exams",
    "time/data": "reading",
    "time/update": "learning",
    "time/evaluate": "measuring",
    "time/sync": "passing weights on",
    "time/save": "saving",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """One input of one stage: its content hash, and the stage or file that it came from."""

    stage: str
    name: str
    kind: str
    path: str
    hash: str
    maker: str
    is_stale: bool


def origins(run: RunRecord) -> list[Origin]:
    """The inputs of every stage; for a stage on its own, those of the runs that it came from too."""
    if run.is_pipeline:
        links = [link for stage in run.stages for link in lineage(stage.folder) if link.child == stage.folder.resolve()]
    else:
        links = lineage(run.folder)
    return [_origin(link) for link in links]


def _origin(link: Link) -> Origin:
    artefact = link.artefact
    return Origin(
        stage=link.child.name,
        name=artefact.name,
        kind=artefact.kind,
        path=artefact.path,
        hash="by name alone, on a hub" if artefact.hash == "hub" else artefact.hash,
        maker=link.parent.name if link.parent else "",
        is_stale=link.is_stale,
    )


def environment_rows(run: RunRecord) -> list[tuple[str, str]]:
    """Versions, device and seed: whatever is needed to run it again."""
    environment = run.manifest.environment
    rows = [
        ("Kedge", environment.kedge),
        ("Python", environment.python),
        ("platform", environment.platform),
        ("device", environment.device),
        ("commit", environment.git_commit or ""),
        ("seed", str(run.manifest.seed)),
        ("recipe hash", run.manifest.recipe_hash),
        *environment.packages.items(),
    ]
    return [(name, value) for name, value in rows if value]


def recipe_text(settings: Mapping[str, Any]) -> str:
    """The resolved settings as YAML: every default is filled in."""
    from ruamel.yaml import YAML

    writer = YAML()
    writer.width = 110
    text = StringIO()
    writer.dump(_plain(settings), text)
    return text.getvalue()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in cast(Mapping[str, Any], value).items()}
    return [_plain(item) for item in cast(Sequence[Any], value)] if isinstance(value, (list, tuple)) else value


def setting(value: Any) -> str:
    """A value as a recipe has it.

    >>> setting(None), setting(True), setting(0.05), setting("stop")
    ('null', 'true', '0.05', 'stop')
    """
    return value if isinstance(value, str) else json.dumps(_plain(value))


def reward_rows(report: Record) -> Iterator[tuple[str, str]]:
    """The numbers of a reward report that decide whether PPO may use the model."""
    yield "accuracy", _share_of(report.get("accuracy"))
    length = report.get("length") or {}
    yield "balanced accuracy (blind to length)", _share_of(length.get("balanced"))
    yield "“the longer wins” on the same pairs", _share_of(length.get("rule"))
    calibration = report.get("calibration") or {}
    yield "calibration error", number(calibration.get("error"))
    yield "held-out pairs", f"{report.get('pairs', 0):,}"
    if report.get("agreement"):
        yield "members decide alike", percent(report["agreement"].get("agreement"))


def _share_of(of: Mapping[str, Any] | None) -> str:
    """
    >>> _share_of({"value": 0.785, "low": 0.7, "high": 0.85}), _share_of(None)
    ('78.5 % (70.0 to 85.0)', '–')
    """
    if not of:
        return NONE
    return f"{percent(of['value'])} ({number(100 * of['low'], 1)} to {number(100 * of['high'], 1)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """One metric from end to end, for those who cannot or would not read a chart."""

    name: str
    first: str
    last: str
    low: str
    high: str


def extents(stage: StageRecord) -> list[Extent]:
    """The table of all metrics of a stage."""
    table = as_table(stage.metrics)
    return [_extent(table, name) for name in table.names if name not in ("step", "at")]


def _extent(table: MetricTable, name: str) -> Extent:
    _, values = table.column(name)
    finite = table.finite(name)
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (float("nan"), float("nan"))
    return Extent(
        name=name, first=short(float(values[0])), last=short(float(values[-1])), low=short(low), high=short(high)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """`seconds` is the time of the steps; `by_phase` its parts of more than 1 % that are known, the rest as "other"."""

    seconds: float
    elapsed: float
    tokens: float
    by_phase: tuple[tuple[str, float], ...]


def cost_of(stage: StageRecord) -> Cost:
    """Seconds by phase, and tokens; from the metrics alone, so a resumed run counts its steps once."""
    metrics = as_table(stage.metrics)
    seconds = _sum(metrics, "time/step")
    tokens = float(np.nansum(metrics.values("tokens/per_second") * metrics.values("time/step")))
    phases = [(name, _sum(metrics, key)) for key, name in _PHASES.items()]
    known = [(name, spent) for name, spent in phases if spent and spent > 0.01 * seconds]
    other = seconds - sum(spent for _, spent in known)
    if known and other > 0.01 * seconds:
        known.append(("other", other))
    return Cost(seconds=seconds, elapsed=_elapsed(stage), tokens=tokens, by_phase=tuple(known))


def _elapsed(stage: StageRecord) -> float:
    """Seconds from the manifest's beginning to its end, or to the last record of its journals."""
    begun = datetime.fromisoformat(stage.manifest.created).timestamp()
    if stage.manifest.finished:
        return max(0.0, datetime.fromisoformat(stage.manifest.finished).timestamp() - begun)
    written = [journal[-1]["at"] for journal in (stage.metrics, stage.events, stage.samples) if journal]
    return max(0.0, max(written, default=begun) - begun)


def _sum(metrics: MetricTable, name: str) -> float:
    return float(np.nansum(metrics.values(name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTable:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def evaluation_table(evaluation: Record) -> EvaluationTable:
    """What `evaluation.json` holds: a column a model, the baseline first, intervals of 95 % in brackets.

    Every number of every model; where a model has none, a dash.
    """
    models: Mapping[str, Any] = evaluation["models"]
    baseline = str(evaluation["baseline"])
    judges: Mapping[str, Any] = evaluation.get("judges") or {}
    columns = [
        _judged_column(judges.get(name, {}), baseline)
        | _column(models[name], evaluation["comparisons"].get(name, {}), baseline)
        for name in models
    ]
    titles = list(dict.fromkeys(title for column in columns for title in column))
    return EvaluationTable(
        head=("", *models), rows=tuple((title, *(column.get(title, NONE) for column in columns)) for title in titles)
    )


def group_table(evaluation: Record) -> EvaluationTable | None:
    """Every group of prompts that `evaluation.json` tells apart: a row a group and source or judge, a column a model.

    Where there is a baseline to win over, its win rates; of the baseline, and without one, mean scores.
    """
    groups: Mapping[str, Mapping[str, Any]] = evaluation.get("groups") or {}
    models = list(evaluation["models"])
    rows = [
        (field, value, f"{group['prompts']:,}", title, *(cells.get(name, NONE) for name in models))
        for field, by_value in groups.items()
        for value, group in by_value.items()
        for title, cells in _group_cells(group).items()
    ]
    head = ("field", "value", "prompts", "", *models)
    return EvaluationTable(head=head, rows=tuple(rows)) if rows else None


def _group_cells(group: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """By what is measured, then by model."""
    cells: dict[str, dict[str, str]] = {}
    for name, summary in group["models"].items():
        for source, scores in summary["scores"].items():
            cells.setdefault(f"{source}: mean score", {})[name] = _estimate(scores["mean"], 3)
        for source, comparison in group["comparisons"].get(name, {}).items():
            cells.setdefault(f"{source}: wins", {})[name] = _win_rate(comparison["win_rate"], "rate")
        for judge, rate in group.get("judges", {}).get(name, {}).items():
            cells.setdefault(f"{judge}: wins", {})[name] = _win_rate(rate, "rate")
    return cells


def _judged_column(by_judge: Mapping[str, Any], baseline: str) -> dict[str, str]:
    column: dict[str, str] = {}
    for judge, rate in by_judge.items():
        column[f"judge {judge}: wins over {baseline}"] = _win_rate(rate, "rate")
        column[f"judge {judge}: wins at equal length"] = _win_rate(rate["length_controlled"], "mean")
        if rate["weighted"] is not None:
            column[f"judge {judge}: probability of winning"] = _win_rate(rate["weighted"], "mean")
        column[f"judge {judge}: ties"] = percent(rate["ties"])
        column[f"judge {judge}: orders disagree"] = percent(rate["inconsistent"] / rate["comparisons"])
        column[f"judge {judge}: unreadable"] = f"{rate['unreadable']:,} of {rate['comparisons']:,}"
        column[f"judge {judge}: prefers the first shown"] = percent(rate["first_place"])
        column[f"judge {judge}: prefers the longer"] = percent(rate["longer"])
    return column


def _column(summary: Mapping[str, Any], against: Mapping[str, Any], baseline: str) -> dict[str, str]:
    column: dict[str, str] = {}
    for source, scores in summary["scores"].items():
        column[f"{source}: mean score"] = _estimate(scores["mean"], 3)
        if comparison := against.get(source):
            column[f"{source}: wins over {baseline}"] = _win_rate(comparison["win_rate"], "rate")
            column[f"{source}: wins at equal length"] = _win_rate(comparison["length_controlled"], "mean")
            column[f"{source}: ties"] = percent(comparison["win_rate"]["ties"])
        if scores["unscored"]:
            column[f"{source}: answers without a score"] = f"{scores['unscored']:,}"
    return column | {
        f"KL from {baseline}, nats": _estimate(summary["kl"], 2),
        "length, tokens (end of turn aside)": _estimate(summary["length"], 1),
        "finished": percent(summary["finished"]),
        "repetition": number(summary["repetition"]),
        "distinct": number(summary["distinct"]),
    }


def _estimate(mean: Mapping[str, Any] | None, digits: int) -> str:
    """
    >>> _estimate({"mean": 1.25, "low": -0.5, "high": 2.0}, 1), _estimate(None, 1)
    ('1.2 [−0.5, 2.0]', '–')
    """
    if mean is None:
        return NONE
    return "{} [{}, {}]".format(*(number(mean[key], digits) for key in ("mean", "low", "high")))


def _win_rate(rate: Mapping[str, Any] | None, middle: str) -> str:
    if rate is None:
        return NONE
    low, high = (number(100 * rate[key], 1) for key in ("low", "high"))
    return f"{percent(rate[middle])} [{low}, {high}]"
