"""Following the folder of a run; `tests/runs/test_reading.py` has its files."""

from __future__ import annotations

from collections.abc import Callable

from kedge.report.live.feed import RunFeed
from kedge.runs.folder import Run

MakeRun = Callable[..., Run]


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
