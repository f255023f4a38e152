"""The peak of a stage's memory: what was taken inside counts, what was taken before does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.stages.shared import peak_memory as memory
from kedge.stages.shared.peak_memory import CODE, NAME, report_peak_memory


class Told:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def log(self, metrics: Any, *, step: int) -> None: ...

    def event(self, event: Any) -> None:
        self.events.append(event)

    def close(self) -> None: ...


def taken(mebibytes: int) -> None:
    """Take so much, use it, and give it back."""
    assert torch.ones(mebibytes * 2**18).sum().item() == mebibytes * 2**18


def peak_of(mebibytes: int) -> float:
    """In MiB."""
    told = Told()
    with report_peak_memory(told, "cpu"):
        taken(mebibytes)
    (event,) = told.events
    assert (event["level"], event["code"], event["evidence"]["of"]) == ("info", CODE, "process")
    assert event["message"] == f"peak memory: {event['evidence'][NAME]:.2f} GiB resident in the process"
    return event["evidence"][NAME] * 1024


def test_each_stage_has_a_peak_of_its_own() -> None:
    large, small = peak_of(600), peak_of(8)
    assert 480 < large - small < 720  # what a process holds besides moves a little


def test_a_stage_that_fails_has_its_failure_to_tell_and_nothing_else() -> None:
    told = Told()
    with pytest.raises(ZeroDivisionError), report_peak_memory(told, "cpu"):
        raise ZeroDivisionError
    assert told.events == []


def test_where_the_system_has_no_such_files_the_process_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "none")
    monkeypatch.setattr(memory, "_RESET", tmp_path / "nowhere" / "none")
    assert 50 < peak_of(8) < 100_000


def test_on_a_gpu_its_allocator_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: calls.append("read") or 3 * 2**29)
    told = Told()
    with report_peak_memory(told, "cuda"):
        calls.append("work")
    assert calls == ["reset", "work", "read"]
    assert told.events[0]["evidence"] == {NAME: 1.5, "of": "gpu"}
    assert told.events[0]["message"] == "peak memory: 1.50 GiB of the GPU"


def test_a_stage_tells_its_peak_once_and_never_in_its_metrics(run_ppo: Callable[..., Path], tmp_path: Path) -> None:
    stage = run_ppo(tmp_path)
    events = [json.loads(line) for line in (stage / "events.jsonl").read_text().splitlines()]
    (told,) = [one for one in events if one["code"] == CODE]
    assert 0.05 < told["evidence"][NAME] < 100
    assert told["step"] is None
    assert NAME not in (stage / "metrics.jsonl").read_text()
