"""What `kedge watch` writes where there is no terminal: one line a step, one line an event, each of them once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from kedge.report.live.vitals import VITAL_NAMES, progress
from kedge.report.run.records import Record, RunRecord, StageRecord
from kedge.report.words import short


class PlainLines:
    """Remembers what it has written of one run. After a rewind it goes on with what is not as it was."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[Sequence[Record], int]] = {}
        self._status: dict[str, str] = {}

    def new(self, run: RunRecord) -> Iterator[str]:
        for stage in run.stages:
            place = f"{run.manifest.name}/{stage.name}" if run.is_pipeline else str(run.folder)
            yield from (f"{place} {line}" for line in self._of_stage(stage))

    def _of_stage(self, stage: StageRecord) -> Iterator[str]:
        yield from map(_step_line, self._untold(f"{stage.folder}/metrics", stage.metrics))
        yield from map(_event_line, self._untold(f"{stage.folder}/events", stage.events))
        if self._status.get(str(stage.folder)) != stage.status:
            self._status[str(stage.folder)] = stage.status
            at = progress(stage)
            yield f"{stage.status}{f': {at.in_words()}' if at else ''}"

    def _untold(self, journal: str, records: Sequence[Record]) -> Sequence[Record]:
        old, count = self._told.get(journal, ((), 0))
        if old is not records:  # read anew: what is the same as before was told before
            pairs = zip(old[:count], records, strict=False)
            count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._told[journal] = (records, len(records))
        return records[count:]


def _step_line(record: Record) -> str:
    numbers = [f"{label} {short(record[name])}" for name, label in VITAL_NAMES.items() if name in record]
    return f"step {record['step']}: {', '.join(numbers)}"


def _event_line(event: Record) -> str:
    step = f" at step {event['step']}" if event.get("step") is not None else ""
    return f"{event['level']}{step}: {event['message']}"
