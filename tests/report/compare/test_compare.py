"""Runs side by side: which stage is meant, where numbers come from, what dashes say, and the lines of the charts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from kedge.core.errors import ConfigError, RunError
from kedge.report.compare.entries import Entry, read_entries
from kedge.report.compare.page import MOST_POINTS, course, frontier, plots, render_comparison
from kedge.report.compare.table import Number, Table, rows_of, table_lines, table_of


def other_pipeline(pipeline: Path, name: str, *, prompts: str = "bb") -> Path:
    """A copy of a pipeline whose evaluation was on other prompts."""
    found = pipeline.with_name(name)
    shutil.copytree(pipeline, found)
    for manifest in (found / "run.json", *found.glob("*/run.json")):
        about = json.loads(manifest.read_text())
        about["name"] = name
        for one in about["inputs"]:
            one["hash"] = prompts * 16
        manifest.write_text(json.dumps(about))
    return found


def read(*folders: Path) -> list[Entry]:
    return read_entries(folders)


def test_a_pipeline_stands_for_the_last_policy_that_it_trained(pipeline: Path) -> None:
    (entry,) = read(pipeline)
    assert (entry.label, entry.method, entry.stage.folder) == ("best", "rejection", pipeline / "best")
    assert entry.evaluated is not None
    assert entry.evaluated.name == "best"
    for kind in ("data", "reward", "evaluate"):
        manifest = json.loads((pipeline / "eval/run.json").read_text())
        (pipeline / "eval/run.json").write_text(json.dumps({**manifest, "kind": kind}))
        with pytest.raises(ConfigError, match=f"eval is a stage of kind {kind}, which trains no policy"):
            read(pipeline / "eval")


def test_a_method_that_made_its_pairs_itself_is_called_online(pipeline: Path) -> None:
    manifest = json.loads((pipeline / "best/run.json").read_text())
    for online, told in ((None, "kto"), ({"rounds": 2}, "online kto")):
        settings = {"kind": "preference", "method": {"kind": "kto"}, "online": online}
        (pipeline / "best/run.json").write_text(json.dumps({**manifest, "kind": "preference", "settings": settings}))
        assert read(pipeline)[0].method == told


def test_runs_are_called_what_tells_them_apart(pipeline: Path) -> None:
    other = other_pipeline(pipeline, "other")
    assert [entry.label for entry in read(pipeline / "ppo", pipeline)] == ["ppo", "best"]
    assert [entry.label for entry in read(pipeline / "ppo", other / "ppo")] == ["shop/ppo", "other/ppo"]
    with pytest.raises(ConfigError, match="a run is named twice"):
        read(pipeline / "ppo", pipeline / "ppo")


def test_numbers_of_the_evaluation_come_first_and_the_baseline_above(pipeline: Path) -> None:
    start, ppo, best = rows_of(read(pipeline / "ppo", pipeline / "best"))
    assert (start.label, start.method) == ("sft", "baseline")
    assert (start.numbers["reward"].value, start.numbers["kl"].value) == (1.0, 0.0)
    assert ppo.numbers["gold"] == Number(value=2.0, low=1.75, high=2.5, source="evaluation")
    assert ppo.numbers["wins"] == Number(value=0.75, low=0.625, high=0.8125, source="evaluation")
    assert ppo.numbers["wins_gold"].value == 0.625
    told = [json.loads(line) for line in (pipeline / "ppo/metrics.jsonl").read_text().splitlines()]
    assert ppo.numbers["tokens"].value == pytest.approx(1.9 * sum(one["tokens/per_second"] for one in told))
    assert ppo.numbers["seconds"].value == pytest.approx(40 * 1.9)
    assert best.numbers["memory"] == Number(value=2.25, source="training")
    assert best.why_not["tokens"] == "its metrics have no tokens/per_second"
    assert ppo.why_not["wins_equal_length"] == "length and model cannot be told apart in its evaluation"


def test_without_an_evaluation_training_speaks_under_a_star(pipeline: Path) -> None:
    (pipeline / "eval/evaluation.json").unlink()
    entries = read(pipeline / "ppo", pipeline / "best", pipeline / "sft")
    rows = rows_of(entries)
    assert [row.label for row in rows] == ["ppo", "best", "sft"]
    assert rows[1].numbers["reward"] == Number(value=2.0, source="training")
    told = table_lines(table_of(rows, entries, with_intervals=False))
    assert told[0].split() == ["run", "method", "reward", "gold", "KL", "length", "time", "tokens", "memory"]
    assert told[2].split()[:5] == ["best", "rejection", "2.000*", "–", "0.75*"]
    notes = table_of(rows, entries, with_intervals=False).notes
    assert notes[0].startswith("* measured in training")
    assert "no KL of sft: no evaluation beside it has its model, and its metrics have no kl/mean" in notes
    assert "no wins of ppo, best, sft: no evaluation beside it has its model" in notes
    assert "no memory of sft: its events tell no peak, which a stage does when it has ended well" in notes
    assert rows[0].numbers["memory"] == Number(value=3.5, source="training")
    assert told[1].split()[-2:] == ["3.50", "GiB"]
    assert "memory of ppo: resident in the whole process, libraries included; no GPU was used" in notes


def test_what_must_not_be_compared_is_said(pipeline: Path) -> None:
    same, other = (other_pipeline(pipeline, name, prompts=hash) for name, hash in (("same", "aa"), ("other", "bb")))

    def notes(folders: Sequence[Path]) -> str:
        entries = read(*folders)
        return "\n".join(table_of(rows_of(entries), entries, with_intervals=False).notes)

    assert "different prompts or by different judges" in notes([pipeline, other])
    assert "different prompts" not in notes([pipeline, same])


def test_the_frontier_has_a_line_a_run_a_point_an_evaluation_and_the_curve_of_best_of_n(pipeline: Path) -> None:
    entries = read(pipeline / "ppo", pipeline / "best")
    reward, gold = plots(entries, rows_of(entries))
    assert [series.name for series in reward.series] == [
        "ppo",
        "ppo, evaluated",
        "best",
        "best, evaluated",
        "start, evaluated",
    ]
    by_name = {series.name: dict(zip(reward.x, series.values, strict=True)) for series in reward.series}
    assert by_name["ppo, evaluated"][6.5] == 3.0
    assert by_name["best"][0.75] == 2.0
    assert by_name["start, evaluated"][0.0] == 1.0
    assert list(reward.x) == sorted(reward.x)
    assert reward.curve is not None
    assert reward.curve.places == ((0.0, 1.0), (0.1931, 1.75), (0.6363, 2.25))
    assert reward.curve.name == "best of 1 to 4"
    assert [series.name for series in gold.series] == ["ppo", "ppo, evaluated", "best", "start, evaluated"]
    assert gold.curve is not None
    assert gold.curve.places[-1] == (0.6363, 1.5)


def test_calls_to_judges_count_once_for_the_stage_and_what_it_learnt_from(rlaif: Path) -> None:
    """5 calls of 1,000 + 100 tokens at 2 and 8 USD a million are 0.014 USD."""
    entries = read(rlaif / "distilled", rlaif / "direct", rlaif / "best")
    distilled, direct, best = rows_of(entries)[1:]
    assert [row.numbers["calls"].value for row in (distilled, direct, best)] == [5, 3, 0]
    assert [row.numbers["usd"].value for row in (distilled, direct)] == [pytest.approx(0.014), pytest.approx(0.0084)]
    assert [row.numbers["wins_judge"].value for row in (distilled, direct)] == [0.7, 0.8]
    table = table_of(rows_of(entries), entries, with_intervals=False)
    assert ("5", "0.0140 USD") in [row[-2:] for row in table.rows]
    assert any("each paid once (distilled: 5 of ai; direct: 3 of direct)" in note for note in table.notes)
    manifest = json.loads((rlaif / "direct/run.json").read_text())
    del manifest["settings"]["reward"]["budget"]
    (rlaif / "direct/run.json").write_text(json.dumps(manifest))
    entries = read(rlaif / "direct")
    assert "no cost of direct: its settings tell no price of tokens" in " ".join(
        table_of(rows_of(entries), entries, with_intervals=False).notes
    )


def test_a_ledger_that_is_none_is_refused(rlaif: Path) -> None:
    (rlaif / "ai/calls/0-m.jsonl").write_text('{"paid": "k", "prompt": 1}\n')
    with pytest.raises(RunError, match=r"0-m.jsonl:1: this is no line of a ledger"):
        read(rlaif / "distilled")


def test_rewards_of_different_kinds_are_told_apart(rlaif: Path) -> None:
    entries = read(rlaif / "distilled", rlaif / "direct")
    rows = rows_of(entries)
    by_model, by_judge, gold = plots(entries, rows)
    assert by_model.title == "Reward against KL, by reward model"
    assert [series.name for series in by_model.series] == [
        *("distilled", "distilled, evaluated"),
        *("direct", "start, evaluated"),
    ]
    assert [value for value in by_model.series[2].values if value is not None] == [2.0]  # evaluated, not its course
    assert by_judge.title == "Reward against KL, by judge m"
    assert [series.name for series in by_judge.series] == ["direct"]
    assert gold.title == "Gold against KL"
    table = table_of(rows, entries, with_intervals=False)
    assert [row[1] for row in table.rows] == ["baseline", "ppo on reward model", "ppo on judge m"]
    assert any(
        "trained on rewards of different kinds (distilled: reward model; direct: judge m)" in note
        for note in table.notes
    )
    same = read(rlaif / "distilled")
    assert [row[1] for row in table_of(rows_of(same), same, with_intervals=False).rows] == ["baseline", "ppo"]


def test_a_line_is_the_means_of_consecutive_steps(pipeline: Path) -> None:
    (entry,) = read(pipeline / "ppo")
    found = course(entry, "reward")
    assert len(found) == MOST_POINTS
    first = entry.stage.metrics[:2]
    kl, reward = (sum(one[name] for one in first) / 2 for name in ("kl/mean", "reward/mean"))
    assert (kl, reward) in [(pytest.approx(x), pytest.approx(y)) for x, y in found]
    assert found == sorted(found)


def test_without_anything_to_draw_there_is_no_chart(pipeline: Path) -> None:
    (pipeline / "eval/evaluation.json").unlink()
    entries = read(pipeline / "sft")
    assert frontier(entries, rows_of(entries), "reward") is None
    assert "No chart: no run has both a KL and a score" in render_comparison(entries)


def test_the_page_stands_alone_and_escapes(pipeline: Path) -> None:
    manifest = json.loads((pipeline / "ppo/run.json").read_text())
    manifest["settings"]["prompts"] = "<script>alert(1)</script>"
    (pipeline / "ppo/run.json").write_text(json.dumps(manifest))
    page = render_comparison(read(pipeline / "ppo", pipeline / "best"))
    assert page.count("<script>") == 1  # ours
    assert "&lt;script&gt;alert(1)" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert page.count("<figure") == 2
    assert '75.0 %<br><span class="soft small">[62.5, 81.2]' in page
    for colour in ("fourth", "eighth", "ink"):
        assert f".{colour} {{ --s:" in page


@pytest.mark.parametrize("width", [100, 80, 60, 30])
def test_a_narrow_screen_gets_a_table_that_fits_and_is_whole(width: int) -> None:
    head = ("run", "method", "reward", "KL", "wins", "wins, equal length", "length", "time", "tokens", "memory")
    row = ("ppo", "1.319", "9.09", "98.6 %", "98.6 %", "35.7", "1 min 18 s", "371 k", "0.67 GiB")
    table = Table(head=head, rows=(("loop/ppo", *row), ("loop2/ppo", *row)), notes=())
    lines = table_lines(table, width)
    assert all(len(line) <= width for line in lines)
    assert all(cell in "\n".join(lines) for cell in (*head, "loop/ppo", "loop2/ppo", *row))
    assert len(table_lines(table)) == 3  # a file or a pipe gets a row a run
