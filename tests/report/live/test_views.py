"""What is shown of a running run, in a terminal and in plain lines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from kedge.report.live.feed import RunFeed
from kedge.report.live.headline_metrics import current_stage, headline_metrics, progress, sparkline
from kedge.report.live.terminal import PlainLines, view
from kedge.report.live.web import search
from kedge.report.run.run_records import RunRecord
from kedge.runs.folder import Run
from kedge.testing.streams import fill

MakeRun = Callable[..., Run]


def record(run: Run) -> RunRecord:
    feed = RunFeed(run.folder)
    feed.poll()
    return feed.record()


def clocked(found: RunRecord, seconds: float) -> Any:
    """The only stage, as if its steps had been so many seconds apart."""
    (stage,) = found.stages
    return replace(stage, metrics=[{**one, "at": 1000 + seconds * one["step"]} for one in stage.metrics])


def test_time_left_comes_from_the_pace_of_the_last_steps(begin: MakeRun) -> None:
    run = begin("a")
    fill(run, 40)
    at = progress(clocked(record(run), 2.5))
    assert at is not None
    assert (at.step, at.total) == (40, 100)
    assert at.seconds_a_step == pytest.approx(2.5)
    assert at.seconds_left == pytest.approx(60 * 2.5)
    assert "step 40 of 100 · 2.5 s a step" in at.in_words()
    assert at.in_words().endswith("2 min 30 s left")
    run.finish("stopped")
    ended = progress(clocked(record(run), 2.5))
    assert ended is not None
    assert ended.seconds_left is None


def test_without_steps_there_is_no_progress(begin: MakeRun) -> None:
    assert progress(record(begin("a")).stages[0]) is None


def test_a_sparkline_has_one_letter_a_stretch() -> None:
    assert sparkline([5.0] * 10, 4) == "▁▁▁▁"
    assert sparkline([0.0, 7.0], 10) == "▁█"
    assert sparkline([1.0, math.inf, 2.0], 3) == "▁×█"
    assert len(sparkline([float(at) for at in range(999)], 40)) == 40


def test_the_stage_to_look_at(begin: MakeRun) -> None:
    whole = begin("loop", "pipeline")
    assert current_stage(record(whole)) is None
    sft = begin("loop/sft", "sft")
    sft.log({"train/loss": 2.0}, 1)
    sft.finish("done")
    ppo = begin("loop/ppo")
    found = current_stage(record(whole))
    assert found is not None
    assert found.name == "ppo"  # it runs
    ppo.finish("failed")
    found = current_stage(record(whole))
    assert found is not None
    assert found.name == "sft"  # the last that has a step
    found = current_stage(record(whole), "ppo")
    assert found is not None
    assert found.name == "ppo"


def test_the_terminal_shows_numbers_sample_and_events(begin: MakeRun) -> None:
    run = begin("a")
    fill(run, 20)
    run.event("warning", "kl", "KL is [bold]high", 12)
    out = StringIO()
    Console(file=out, width=110).print(view([record(run)]))
    text = out.getvalue()
    for wanted in (
        "running",
        "step 20 of 100",
        "reward",
        "KL",
        "entropy",
        "clip fraction",
        "tokens/s",
        "newest sample",
    ):
        assert wanted in text
    assert "KL is [bold]high" in text
    assert "Do you ship to the islands?" in text
    latest = {metric.name: metric.latest for metric in headline_metrics(record(run).stages[0])}
    assert latest["KL"] in text


def test_plain_lines_come_once(begin: MakeRun) -> None:
    run = begin("a")
    feed, lines = RunFeed(run.folder), PlainLines()

    def new() -> list[str]:
        feed.poll()
        return [line.removeprefix(f"{run.folder} ") for line in lines.new(feed.record())]

    run.log({"reward/mean": 1.25, "kl/mean": 3.0, "policy/lr": 1.0}, 1)
    first = new()
    assert first[0] == "step 1: reward 1.25, KL 3"
    assert first[1].startswith("running: step 1 of 100")
    assert new() == []
    run.event("fatal", "x", "it broke", 2)
    run.log({"reward/mean": 2.0}, 2)
    assert new() == ["step 2: reward 2", "fatal at step 2: it broke"]
    run.resume_at(1)
    assert new() == ["info: The run goes on from step 1; later records are dropped and will be written again."]
    run.log({"reward/mean": 3.0}, 2)
    run.finish("done")
    second = new()
    assert second[0] == "step 2: reward 3"
    assert second[1].startswith("done: step 2")


def test_search_finds_all_words_in_any_case_newest_first(begin: MakeRun) -> None:
    run = begin("a")
    for step in range(1, 31):
        run.sample({"prompt": f"Kettle number {step}", "answer": "It LEAKS" if step % 2 else "fine"}, step)
    found = search(record(run), "leaks KETTLE")
    assert found.total == 15
    assert [sample["step"] for _, sample in found.samples][:3] == [29, 27, 25]
    second = search(record(run), "", first=20)
    assert (second.total, len(second.samples)) == (30, 10)
    assert second.samples[0][1]["step"] == 10
    assert search(record(run), "leaks fine").total == 0
