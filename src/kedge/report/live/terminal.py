"""What `kedge watch` shows in a terminal: one panel a run, with its numbers, its newest sample and its last events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kedge.report.live.vitals import current, progress, sparkline, vitals
from kedge.report.run.records import Record, RunRecord, StageRecord

_STATUS_STYLES = {
    "running": "cyan",
    "done": "green",
    "failed": "bold red",
    "stopped": "yellow",
    "interrupted": "yellow",
}
_LEVEL_STYLES = {"fatal": "bold red", "warning": "yellow", "info": "dim", "ok": "green"}
_SPARKLINE_WIDTH = 40
_LAST_EVENTS = 5
_SAMPLE_CHARACTERS = 300


def view(runs: Sequence[RunRecord]) -> RenderableType:
    """All runs, one below the other."""
    return Group(*(_panel(run) for run in runs))


def _panel(run: RunRecord) -> Panel:
    stage = current(run)
    parts: list[RenderableType] = [_stages(run)] if run.is_pipeline else []
    if stage is None:
        parts.append(Text("No stage has begun.", style="dim"))
    else:
        parts += _stage(stage)
    title = Text.assemble((str(run.folder), "bold"), "  ", (run.status, _STATUS_STYLES[run.status]))
    return Panel(Group(*parts), title=title, title_align="left", border_style="dim")


def _stages(run: RunRecord) -> Text:
    line = Text()
    for stage in run.stages:
        line.append(f"{stage.name} ").append(f"{stage.status}   ", style=_STATUS_STYLES[stage.status])
    return line.append("   ".join(run.unstarted), style="dim")


def _stage(stage: StageRecord) -> Iterator[RenderableType]:
    at = progress(stage)
    yield Text.assemble((stage.name, "bold"), "  ", at.in_words() if at else "no step is finished yet")
    table = Table.grid(padding=(0, 2))
    for vital in vitals(stage):
        line = sparkline(vital.values, _SPARKLINE_WIDTH)
        table.add_row(vital.name, Text(vital.latest, justify="right"), Text(line, style="cyan"))
    yield table
    if stage.samples:
        yield from _sample(stage.samples[-1])
    for event in stage.events[-_LAST_EVENTS:]:
        yield event_text(event)


def _sample(sample: Record) -> Iterator[Text]:
    yield Text(f"newest sample, step {sample['step']}", style="dim")
    for field, style in (("prompt", "dim"), ("answer", "")):
        text = " ".join(str(sample.get(field, "")).split())
        yield Text(f"  {text[:_SAMPLE_CHARACTERS]}{'…' if len(text) > _SAMPLE_CHARACTERS else ''}", style=style)


def event_text(event: Record) -> Text:
    step = f"step {event['step']}  " if event.get("step") is not None else ""
    level = str(event["level"])
    return Text.assemble((f"{level:8}", _LEVEL_STYLES[level]), (step, "dim"), str(event["message"]))
