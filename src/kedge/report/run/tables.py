"""The tables of a report: where things came from, what it ran on, and what other stages wrote about themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, cast

from kedge.report.run.records import Record, RunRecord, StageRecord
from kedge.report.words import number, short
from kedge.runs.lineage import Link, lineage


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
    found = run.manifest.environment
    rows = [
        ("Kedge", found.kedge),
        ("Python", found.python),
        ("platform", found.platform),
        ("device", found.device),
        ("commit", found.git_commit or ""),
        ("seed", str(run.manifest.seed)),
        ("recipe hash", run.manifest.recipe_hash),
        *found.packages.items(),
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
    yield "accuracy", _share(report.get("accuracy"))
    length = report.get("length") or {}
    yield "balanced accuracy (blind to length)", _share(length.get("balanced"))
    yield "“the longer wins” on the same pairs", _share(length.get("rule"))
    calibration = report.get("calibration") or {}
    yield "calibration error", number(calibration.get("error"))
    yield "held-out pairs", f"{report.get('pairs', 0):,}"
    if report.get("agreement"):
        yield "members decide alike", _percent(report["agreement"].get("agreement"))


def _share(of: Mapping[str, Any] | None) -> str:
    """
    >>> _share({"value": 0.785, "low": 0.7, "high": 0.85}), _share(None)
    ('78.5 % (70.0 to 85.0)', '–')
    """
    if not of:
        return "–"
    return f"{_percent(of['value'])} ({number(100 * of['low'], 1)} to {number(100 * of['high'], 1)})"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{number(100 * share, 1)} %"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """One metric from end to end, for those who cannot or would not read a chart."""

    name: str
    first: str
    last: str
    low: str
    high: str


def extents(stage: StageRecord) -> list[Extent]:
    names = dict.fromkeys(name for record in stage.metrics for name in record if name not in ("step", "at"))
    found: list[Extent] = []
    for name in names:
        values = [float(record[name]) for record in stage.metrics if record.get(name) is not None]
        finite = [value for value in values if abs(value) < float("inf")] or [float("nan")]
        found.append(
            Extent(
                name=name,
                first=short(values[0]),
                last=short(values[-1]),
                low=short(min(finite)),
                high=short(max(finite)),
            )
        )
    return found
