"""Following files: only what is new is read, half lines wait, rewinds are noticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.core.errors import RunError
from kedge.report.live.feed import RunFeed, Tail
from kedge.runs.folder import Run

MakeRun = Callable[..., Run]


def steps(tail: Tail) -> list[Any]:
    return [record["step"] for record in tail.read().records]


def test_only_new_lines_are_read(begin: MakeRun) -> None:
    run = begin("a")
    tail = Tail(run.metrics.path)
    assert steps(tail) == []
    run.log({"x": 1.0}, 1)
    run.log({"x": 2.0}, 2)
    assert steps(tail) == [1, 2]
    assert steps(tail) == []
    with run.metrics.path.open("r+b") as file:
        file.write(b"what was read is not read again")
    run.log({"x": float("nan")}, 3)
    news = tail.read()
    assert [record["step"] for record in news.records] == [3]
    assert str(news.records[0]["x"]) == "nan"
    assert not news.is_rewound


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = Tail(path)
    path.write_bytes(b'{"step": 1}\n{"ste')
    assert steps(tail) == [1]
    with path.open("ab") as file:
        file.write(b'p": 2}\n')
    assert steps(tail) == [2]


def test_a_rewound_journal_starts_again(begin: MakeRun) -> None:
    run = begin("a")
    tail = Tail(run.metrics.path)
    for step in (1, 2, 3):
        run.log({"x": 1.0}, step)
    assert steps(tail) == [1, 2, 3]
    run.resume_at(1)
    for step in (2, 3, 4, 5):  # longer than before: its size tells nothing
        run.log({"x": 2.0}, step)
    news = tail.read()
    assert news.is_rewound
    assert [record["step"] for record in news.records] == [1, 2, 3, 4, 5]
    run.metrics.close()
    run.metrics.path.unlink()
    assert tail.read().is_rewound
    assert not tail.read().is_rewound


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"{]\n")
    with pytest.raises(RunError, match=r"m\.jsonl: a line is not a JSON object"):
        Tail(path).read()


def test_a_feed_gives_what_a_report_reads(begin: MakeRun) -> None:
    run = begin("a")
    feed = RunFeed(run.folder)
    feed.poll()
    before = feed.revision
    run.log({"reward/mean": 1.5}, 1)
    run.event("warning", "x", "careful", 1)
    run.sample({"prompt": "p", "answer": "q"}, 1)
    assert feed.poll()
    assert not feed.poll()
    assert feed.revision == before + 1
    (stage,) = feed.record().stages
    assert stage.status == "running"
    assert [(record["step"], record["reward/mean"]) for record in stage.metrics] == [(1, 1.5)]
    assert stage.events[0]["message"] == "careful"
    assert stage.samples[0]["answer"] == "q"
    run.finish("stopped")
    assert feed.poll()
    assert feed.record().status == "stopped"


def test_a_rewind_drops_what_was_read(begin: MakeRun) -> None:
    run = begin("a")
    feed = RunFeed(run.folder)
    for step in (1, 2, 3):
        run.log({"x": float(step)}, step)
    feed.poll()
    run.resume_at(2)
    assert feed.poll()
    assert [record["step"] for record in feed.record().stages[0].metrics] == [1, 2]


def test_stages_of_a_pipeline_appear_as_they_begin(begin: MakeRun) -> None:
    whole = begin("loop", "pipeline")
    feed = RunFeed(whole.folder)
    feed.poll()
    assert feed.record().stages == ()
    assert feed.record().unstarted == ("sft", "ppo")
    begin("loop/sft", "sft").log({"train/loss": 2.0}, 1)
    assert feed.poll()
    assert [stage.name for stage in feed.record().stages] == ["sft"]
    begin("loop/ppo")
    assert feed.poll()
    assert [stage.name for stage in feed.record().stages] == ["sft", "ppo"]
    assert feed.record().unstarted == ()
    assert not feed.poll()
