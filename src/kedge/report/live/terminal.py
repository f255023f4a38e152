"""What `kedge watch` writes: on a terminal a panel a run, elsewhere one plain line a step and one an event.

A panel has the headline metrics of a run, its newest sample and its last events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kedge.report.chat import answer_text, in_one_line
from kedge.report.live.headline_metrics import HEADLINE_NAMES, current_stage, headline_metrics, progress, sparkline
from kedge.report.run.run_records import Record, RunRecord, StageRecord
from kedge.report.words import short

_STATUS_STYLES = {
    "running": "cyan",
    "done": "green",
    "failed": "bold red",
    "stopped": "yellow",
    "waiting": "yellow",
    "interrupted": "yellow",
}
_LEVEL_STYLES = {"fatal": "bold red", "warning": "yellow", "info": "dim", "ok": "green"}
_SPARKLINE_WIDTH = 40
_LAST_EVENTS = 5
_SAMPLE_CHARACTERS = 300
_MOST_STEPS = 1000
"""Steps that plain lines write out at once: the history of a long run is in its journal."""


def view(runs: Sequence[RunRecord]) -> RenderableType:
    """All runs, one below the other."""
    return Group(*(_panel(run) for run in runs))


def _panel(run: RunRecord) -> Panel:
    stage = current_stage(run)
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
    for metric in headline_metrics(stage):
        line = sparkline(metric.values, _SPARKLINE_WIDTH)
        table.add_row(Text(metric.name), Text(metric.latest, justify="right"), Text(line, style="cyan"))
    yield table
    if stage.samples:
        yield from _sample(stage.samples[-1])
    for event in stage.events[-_LAST_EVENTS:]:
        yield event_text(event)


def _sample(sample: Record) -> Iterator[Text]:
    yield Text(f"newest sample, step {sample['step']}", style="dim")
    answer = " ".join(answer_text(str(sample.get("answer", ""))).split())
    for text, style in ((in_one_line(str(sample.get("prompt", ""))), "dim"), (answer, "")):
        yield Text(f"  {text[:_SAMPLE_CHARACTERS]}{'…' if len(text) > _SAMPLE_CHARACTERS else ''}", style=style)


def event_text(event: Record) -> Text:
    step = f"step {event['step']}  " if event.get("step") is not None else ""
    level = str(event["level"])
    return Text.assemble((f"{level:8}", _LEVEL_STYLES[level]), (step, "dim"), str(event["message"]))


class PlainLines:
    """Writes every record of a run once. After a rewind it goes on with the records that are not as before."""

    def __init__(self) -> None:
        self._written: dict[str, tuple[Sequence[Record], int]] = {}
        self._status: dict[str, str] = {}

    def new(self, run: RunRecord) -> Iterator[str]:
        for stage in run.stages:
            place = f"{run.manifest.name}/{stage.name}" if run.is_pipeline else str(run.folder)
            yield from (f"{place} {line}" for line in self._of_stage(stage))

    def _of_stage(self, stage: StageRecord) -> Iterator[str]:
        steps = self._unwritten(f"{stage.folder}/metrics", stage.metrics)
        if len(steps) > _MOST_STEPS:
            yield f"{len(steps) - _MOST_STEPS:,} earlier steps are not written out here: metrics.jsonl has them"
        yield from map(_step_line, steps[-_MOST_STEPS:])
        yield from map(_event_line, self._unwritten(f"{stage.folder}/events", stage.events))
        if self._status.get(str(stage.folder)) != stage.status:
            self._status[str(stage.folder)] = stage.status
            at = progress(stage)
            yield f"{stage.status}{f': {at.in_words()}' if at else ''}"

    def _unwritten(self, journal: str, records: Sequence[Record]) -> Sequence[Record]:
        old, count = self._written.get(journal, ((), 0))
        if old is not records:  # read anew: records that are the same were written before
            pairs = zip(old[:count], records, strict=False)
            count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._written[journal] = (records, len(records))
        return records[count:]


def _step_line(record: Record) -> str:
    numbers = [f"{label} {short(record[name])}" for name, label in HEADLINE_NAMES.items() if name in record]
    return f"step {record['step']}: {', '.join(numbers)}"


def _event_line(event: Record) -> str:
    step = f" at step {event['step']}" if event.get("step") is not None else ""
    return f"{event['level']}{step}: {event['message']}"
