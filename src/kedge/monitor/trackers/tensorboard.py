"""TensorBoard: scalars and events as text below `RUN/trackers/tensorboard/`, without torch or TensorFlow.

A resumed run writes a new file whose session mark has TensorBoard drop the older file's values of later steps.
TensorBoard stores float32; the exact numbers are in metrics.jsonl.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from kedge.core.protocols import Metrics
from kedge.core.settings import Section
from kedge.monitor.trackers import read_settings, tracker_folder


class TensorBoardSettings(Section):
    flush_s: int = Field(default=10, ge=1)
    """Seconds after which new numbers are on disk at the latest."""


class TensorBoardTracker:
    """Logs to an event file."""

    def __init__(self, writer: EventFileWriter) -> None:
        self._writer = writer
        self._is_started = False

    def log(self, metrics: Metrics, *, step: int) -> None:
        self._start(step)
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step, summary=Summary(value=values))

    def event(self, event: Mapping[str, Any]) -> None:
        step = event.get("step") or 0
        text = f"**{event['level']}** `{event['code']}` {event['message']}"
        tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()])
        value = Summary.Value(
            tag=f"events/{event['level']}",
            metadata=create_summary_metadata(display_name="", description=""),
            tensor=tensor,
        )
        self._write(step, summary=Summary(value=[value]))

    def close(self) -> None:
        self._writer.close()

    def _start(self, step: int) -> None:
        if not self._is_started:
            self._is_started = True
            self._write(step, session_log=SessionLog(status=SessionLog.START))

    def _write(self, step: int, **content: Any) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))


def make(run_folder: Path, name: str, settings: Mapping[str, Any]) -> TensorBoardTracker:
    """`name` is not used: TensorBoard names a run by its folder."""
    options = read_settings(TensorBoardSettings, settings, tracker="tensorboard")
    folder = tracker_folder(run_folder) / "tensorboard"
    return TensorBoardTracker(EventFileWriter(str(folder), flush_secs=options.flush_s))
