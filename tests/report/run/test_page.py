"""The page of a run: whole, escaped, alone, and saying what the folder says."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kedge.core.errors import RunError
from kedge.core.world import Spent
from kedge.recipe.together import time_metrics
from kedge.report.run.page import render_run
from kedge.report.run.run_records import read_run
from kedge.runs.folder import Run

MakeRun = Callable[..., Path]
VOID = {"meta", "line", "br", "circle", "path"}
HOSTILE = "</pre><script>alert('x')</script> & <b>"


class Page(HTMLParser):
    """Checks that every tag is closed in its place, and collects text and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open = list[str]()
        self.tags = list[str]()
        self.attributes = list[tuple[str, str | None]]()
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_is_balanced_escaped_and_stands_alone(pipeline_run: Path) -> None:
    source = render_run(read_run(pipeline_run))
    page = Page(source)
    assert page.tags.count("script") == 1
    assert not {"img", "link", "iframe"} & set(page.tags)
    assert not {"src", "onclick", "onload"} & {name for name, _ in page.attributes}
    assert [value for name, value in page.attributes if name == "href" and not str(value).startswith("#")] == []
    assert "url(" not in source
    assert "@import" not in source
    assert "http" not in source
    assert source.count("<script>") == 1
    assert HOSTILE in page.text


def test_a_pipeline_is_told_from_end_to_end(pipeline_run: Path) -> None:
    text = Page(render_run(read_run(pipeline_run))).text
    story = text[text.index("Kedge report") :]
    for earlier, later in (
        ("prepare", "sft"),
        ("What it cost", "The environment"),
        ("Evaluation", "Where it came from"),
    ):
        assert story.index(earlier) < story.index(later)
    assert "A pipeline of 6 stages on tiny: prepare, sft, reward, ppo, eval; not begun: last." in story
    assert "The reward model of reward is right on 74.2 % (95 % interval 69.0 to 79.0) of held-out pairs." in story
    assert "Judged by reward, ppo wins over sft on 81.0 % (95 % interval 70.0 to 90.0) of 40 prompts." in story
    assert "Raise kl.start." in story
    assert "kl 8.5" in story
    assert "changed since" in story  # the model that ppo read is not the one that sft made
    assert "2.250 [1.750, 2.750]" in story
    assert "heldout: 0.1" not in story
    assert "iterations: 100" in story


def test_thresholds_marks_and_the_fit_are_drawn(pipeline_run: Path) -> None:
    source = render_run(read_run(pipeline_run))
    assert "target 6</text>" in source
    assert "limit 12.5</text>" in source
    # one event on each chart over steps; the chart over √KL has no steps
    ppo = source[source.index('id="stage-ppo"') : source.index('id="stage-eval"')]
    assert ppo.count('<g class="event warning">') == ppo.count("<svg") - 1
    assert 'class="curve fit third"' in ppo
    assert "Gold is predicted to peak at a KL of" in ppo


def test_a_stage_alone_and_its_samples(ppo_run: MakeRun) -> None:
    text = Page(render_run(read_run(ppo_run(40)))).text
    story = text[text.index("Kedge report") :]
    assert "PPO: the policy sft is improved against reward on prompts of prompts.jsonl, 40 iterations of 32" in story
    assert "near a KL of 6 nats a sequence (past 12.5 it goes back)" in story
    assert "It is done after 40 steps." in story
    assert story.index("before") < story.index("during") < story.index("after", story.index("during"))
    assert "there is no model/ folder" in story


@pytest.mark.parametrize("status", ["stopped", "interrupted", "failed", None])
def test_unfinished_runs_are_told_too(ppo_run: MakeRun, status: str | None) -> None:
    text = Page(render_run(read_run(ppo_run(20, status=status)))).text
    wanted = {
        "stopped": "was stopped by a contract",
        "interrupted": "was interrupted",
        "failed": "It failed after 20 steps",
        None: "was interrupted",  # it says running, but nobody holds its lock
    }
    assert wanted[status] in text


def test_what_is_missing_is_named(tmp_path: Path, ppo_run: MakeRun) -> None:
    folder = ppo_run(10)
    (folder / "metrics.jsonl").unlink()
    (folder / "samples.jsonl").write_bytes((folder / "samples.jsonl").read_bytes()[:-5])
    record = read_run(folder).stages[0]
    half, metrics, samples, *others = record.missing
    assert half == (
        "samples.jsonl ends in half a line, which is left out: its writer was killed, or is at work just now"
    )
    assert "metrics.jsonl: 10 lines are missing from line 1 on" in metrics
    assert "samples.jsonl: 1 line is missing" in samples
    assert others == [
        "there are no metrics: no step was finished",
        "there is no model/ folder: it was moved or removed after the run",
    ]
    text = Page(render_run(read_run(folder))).text
    assert all(gap in text for gap in record.missing)


def test_a_running_pipeline_without_a_stage(tmp_path: Path) -> None:
    from kedge.runs.manifest import new_manifest

    manifest = new_manifest(name="x", kind="pipeline", seed=1, settings={"model": "tiny", "stages": {"sft": {}}})
    with Run.create(tmp_path / "x", manifest=manifest):
        text = Page(render_run(read_run(tmp_path / "x"))).text
    assert "A pipeline of 1 stage on tiny; none has begun." in text
    assert "this run is still running" in text


def test_long_runs_keep_few_points_and_their_extremes(ppo_run: MakeRun) -> None:
    folder = ppo_run(3000)
    with Run.open(folder, for_writing=True) as run:
        run.log({"reward/mean": 77.5}, 3001)
        run.log({"reward/mean": 1.0}, 3002)
    source = render_run(read_run(folder))
    first = source[source.index("<path", source.index("<figure")) :]
    assert first[: first.index("/>")].count("L") <= 1000  # the band goes there and back
    assert "highest 77.5" in source
    assert len(source) < 1_500_000


def test_a_damaged_file_is_named(pipeline_run: Path) -> None:
    (pipeline_run / "eval/evaluation.json").write_text("{")
    with pytest.raises(RunError, match=r"evaluation\.json is not JSON"):
        read_run(pipeline_run)
    (pipeline_run / "eval/evaluation.json").write_text("[]")
    with pytest.raises(RunError, match="is a list, not an object"):
        read_run(pipeline_run)


def test_the_processes_of_a_run_have_a_bar_each_and_one_process_has_none(ppo_run: MakeRun) -> None:
    folder = ppo_run(6)
    assert "What each process did" not in render_run(read_run(folder))
    spent = [Spent(busy=6.0, communicating=1.0, waiting=3.0), Spent(busy=9.0, communicating=1.0, waiting=0.0)]
    with Run.open(folder, for_writing=True) as run:
        for step in (7, 8, 9):
            run.log({"time/step": 10.0, **time_metrics(spent), "gpu/1/memory_peak": 3.0}, step)
    page = Page(render_run(read_run(folder)))
    chart = page.text[page.text.index("What each process did") :]
    assert chart.startswith("What each process didbusycommunicatingwaiting")
    titles = ["process 0: busy 60 %, 18 s", "process 1: busy 90 %, 27 s", "process 0: communicating 10 %, 3.0 s"]
    assert all(title in chart for title in titles)
    assert "process 1 keeps the others waiting: it is busy 50 % longer than they are" in page.text
    assert "gpu/1/memory_peak" not in page.text[: page.text.index("The same as a table")], "it has no curve"
