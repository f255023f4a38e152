"""The report of a run as one page that opens anywhere, without a network. Everything that comes from data is escaped.

The files beside this one make its parts; here they only come together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from kedge.core.findings import Level
from kedge.monitor.doctor import Diagnosis, History, diagnose
from kedge.report.charts import svg
from kedge.report.pages import asset, render_page
from kedge.report.run import summary, tables
from kedge.report.run.curves import plots
from kedge.report.run.methods import what_was_run
from kedge.report.run.overoptimisation import gold_plot
from kedge.report.run.processes import process_plot
from kedge.report.run.run_records import Record, RunRecord, StageRecord
from kedge.report.run.samples import Samples, compare
from kedge.report.run.tables import Cost, cost_of
from kedge.report.words import amount, duration

_CURVES_IN_SIGHT = 6
_MOST_NOTES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePage:
    """The part of the page on one stage."""

    record: StageRecord
    what: str
    happened: tuple[str, ...]
    diagnosis: Diagnosis
    figures: tuple[Markup, ...]
    more_figures: tuple[Markup, ...]
    of_processes: Markup | None
    """How several processes spent their time."""
    notes: tuple[tuple[str, str], ...]
    """How to read the curves, by their titles."""
    samples: Samples
    cost: Cost
    notable: tuple[tuple[Record, int], ...]
    """Warnings and worse: of each code the first, and how often it came."""
    infos: tuple[Record, ...]
    is_open: bool = True


def render_run(run: RunRecord) -> str:
    """The whole page."""
    pages = [stage_page(stage) for stage in run.stages]
    pages = [replace(page, is_open=_is_open(page, pages)) for page in pages]
    return render_page(
        "kedge.report.run",
        "page.html.j2",
        run=run,
        headline=summary.headline(run),
        level=_level(pages),
        verdict=_verdict(pages),
        outcomes=list(summary.outcomes(run)),
        tiles=_tiles(run, pages),
        stages=pages,
        tables=tables,
        origins=tables.origins(run),
        own_style=asset("kedge.report.run", "page.css"),
        script=asset("kedge.report.charts", "chart.js"),
        evidence_text=evidence_text,
        status_words=summary.STATUS_WORDS,
        duration=duration,
        amount=amount,
        event_counts=_event_counts,
        most_notes=_MOST_NOTES,
    )


def stage_page(stage: StageRecord) -> StagePage:
    curves = list(plots(stage))
    figures = [svg.figure(replace(plot, note="")) for plot in curves]
    if gold := gold_plot(stage.metrics):
        figures.insert(1, svg.figure(gold))  # beside the reward; its words are about this run
    processes = process_plot(stage.metrics)
    return StagePage(
        record=stage,
        what=what_was_run(stage.kind, stage.settings),
        happened=tuple(summary.what_happened(stage)),
        diagnosis=diagnosis_of(stage),
        figures=tuple(figures[:_CURVES_IN_SIGHT]),
        more_figures=tuple(figures[_CURVES_IN_SIGHT:]),
        of_processes=svg.figure(processes) if processes else None,
        notes=tuple((plot.title, plot.note) for plot in curves if plot.note),
        samples=compare(stage.samples),
        cost=cost_of(stage),
        notable=tuple(_by_code(stage.events)),
        infos=tuple(event for event in stage.events if event["level"] == "info"),
    )


def _by_code(events: Sequence[Record]) -> list[tuple[Record, int]]:
    """Warnings and worse, of each code and level the first with its count, the worst first."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for event in events:
        if event["level"] in ("warning", "fatal"):
            groups.setdefault((event["level"], event["code"]), []).append(event)
    return [(group[0], len(group)) for _, group in sorted(groups.items(), key=lambda item: item[0][0] != "fatal")]


def _event_counts(page: StagePage) -> str:
    counts = {"fatal": 0, "warning": 0}
    for event, times in page.notable:
        counts[event["level"]] += times
    names = [("fatal", counts["fatal"]), ("warning", counts["warning"]), ("note", len(page.infos))]
    return ", ".join(
        f"{count:,} {name}{'s' if count > 1 and name != 'fatal' else ''}" for name, count in names if count
    )


def _is_open(page: StagePage, pages: Sequence[StagePage]) -> bool:
    """Open are stages that need a look, and the one that everything led to; the others take a click."""
    needs_look = not page.diagnosis.is_healthy or page.record.status in ("failed", "running")
    return needs_look or page is pages[-1]


def diagnosis_of(stage: StageRecord) -> Diagnosis:
    return diagnose(
        History(
            kind=stage.kind,
            metrics=stage.metrics,
            events=stage.events,
            samples=stage.samples,
            settings=stage.settings,
            status=stage.status,
            reward_report=stage.reward_report or {},
        )
    )


def _level(pages: Sequence[StagePage]) -> Level:
    if any(page.record.status == "failed" for page in pages):
        return "fatal"
    return "ok" if all(page.diagnosis.is_healthy for page in pages) else "warning"


def _verdict(pages: Sequence[StagePage]) -> list[tuple[str, str]]:
    """The doctor's verdict on each stage that is not healthy, or one sentence on all of them."""
    ill = [(page.record.name, page.diagnosis.verdict) for page in pages if not page.diagnosis.is_healthy]
    if ill or len(pages) == 1:
        return ill or [(pages[0].record.name, pages[0].diagnosis.verdict)]
    return [("", f"Healthy, in all of its {len(pages)} stages." if pages else "No stage has begun.")]


def _tiles(run: RunRecord, pages: Sequence[StagePage]) -> list[tuple[str, str]]:
    """The numbers at the top: text and what it counts."""
    tokens = sum(page.cost.tokens for page in pages)
    warnings = sum(times for page in pages for _, times in page.notable)
    done = sum(page.record.status == "done" for page in pages)
    return [
        (duration(sum(page.cost.elapsed for page in pages)), "time"),
        (amount(tokens), "tokens"),
        (f"{done} of {len(pages) + len(run.unstarted)}", "stages done"),
        (str(warnings), "warning" if warnings == 1 else "warnings"),
    ]


def evidence_text(event: Record) -> str:
    """The evidence of an event without the parts that have sentences of their own."""
    evidence: dict[str, Any] = event.get("evidence") or {}
    return ", ".join(f"{name} {value}" for name, value in evidence.items() if name not in ("cause", "advice", "fix"))
