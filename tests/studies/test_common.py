"""The shared parts of the studies: files of seeds, intervals, tables between markers, figures."""

from __future__ import annotations

import doctest
import json
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "studies"))

import common
from common import Estimate, Options, SeedFile, by_cluster, fill, over_seeds, parse, provenance, read_seeds, stage_cost
from drawing import dots, lines
from kedge.report.charts.picture import picture
from kedge.runs.folder import Run
from kedge.runs.manifest import new_manifest


def test_the_examples_hold() -> None:
    tried = doctest.testmod(common)
    assert tried.attempted >= 6
    assert not tried.failed


def test_small_results_never_go_to_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("verifiable", ["train"], "", ["--size", "small"])
    assert "--to" in capsys.readouterr().err


def test_a_seed_keeps_the_parts_that_it_had(tmp_path: Path) -> None:
    options = parse("s", ["train", "exams"], "", ["--seed", "3", "--to", str(tmp_path), "--only", "exams"])
    assert options.only == ("exams",)
    SeedFile(options).put("train", {"kl": 1.5})
    again = SeedFile(options)
    assert again.has("train")
    assert not again.has("exams")
    again.put("exams", {"ifeval": 0.25})
    record = json.loads((tmp_path / "s" / "seed-3.json").read_text())
    assert record["parts"] == {"train": {"kl": 1.5}, "exams": {"ifeval": 0.25}}
    assert record["made"]["train"]["machine"]["torch"]
    assert [read["seed"] for read in read_seeds(tmp_path / "s")] == [3]
    assert not list((tmp_path / "s").glob(".*"))


def test_parts_of_another_work_folder_are_forgotten_when_the_first_of_this_one_is_put(tmp_path: Path) -> None:
    def options(work: str) -> Options:
        return parse("s", ["train", "exams"], "", ["--to", str(tmp_path / "to"), "--work", str(tmp_path / work)])

    def parts() -> list[str]:
        return list(read_seeds(tmp_path / "to" / "s")[0]["parts"])

    SeedFile(options("a")).put("exams", {})  # as older versions wrote it
    SeedFile(options("a"), of_one_work=True)  # a run that is killed before its first part
    assert parts() == ["exams"]
    SeedFile(options("a"), of_one_work=True).put("train", {})
    assert parts() == ["train"]
    SeedFile(options("a"), of_one_work=True).put("exams", {})
    assert parts() == ["train", "exams"]
    SeedFile(options("b"), of_one_work=True).put("exams", {})
    assert parts() == ["exams"]


def test_every_part_keeps_the_command_that_made_it(tmp_path: Path) -> None:
    options = parse("s", ["grpo", "ppo"], "", ["--to", str(tmp_path)])
    machine = {"device": "H200", "kedge": "0.2.0", "torch": "2.11.0", "transformers": "5.17.0"}
    before = {"seed": 1, "parts": {"start": {}, "grpo": {}}, "machine": machine, "command": "python s.py", "at": "2026"}
    options.seed_file.parent.mkdir()
    options.seed_file.write_text(json.dumps(before))
    assert "| 1 | H200 | 0.2.0 | 2.11.0 | 5.17.0 | `python s.py` | 2026 | start, grpo |" in provenance([before])
    SeedFile(options).put("ppo", {})
    rows = provenance(read_seeds(tmp_path / "s")).splitlines()[2:]
    assert len(rows) == 2
    assert rows[0].endswith("| 2026 | start, grpo |")
    assert rows[1].startswith("| 1 | cpu |")
    assert rows[1].endswith("| ppo |")


def test_a_part_that_is_found_done_took_no_less_than_before_or_than_its_stages(tmp_path: Path) -> None:
    file = SeedFile(parse("s", ["train"], "", ["--to", str(tmp_path)]))
    assert file.seconds("train", 2.0, [{"seconds": 30.0}, {"seconds": None}]) == 30.0
    file.put("train", {"seconds": 90.0})
    assert file.seconds("train", 2.0) == 90.0


def test_the_time_in_which_a_stage_lay_broken_off_costs_nothing(tmp_path: Path) -> None:
    def stamp(second: int) -> str:
        return datetime.fromtimestamp(second, UTC).isoformat()

    manifest = replace(new_manifest(name="x", kind="sft", seed=1, settings={}), created=stamp(1000))
    with Run.create(tmp_path / "sft", manifest=manifest) as run:
        run.amend(status="done", finished=stamp(5030))
    rows = {"metrics": [{"step": 1, "at": 1020.0}, {"step": 2, "at": 5015.0}]}
    rows["events"] = [
        {"step": None, "at": 5000.0, "level": "info", "code": "run.resumed", "message": "", "evidence": {}}
    ]
    for name, records in rows.items():
        (tmp_path / "sft" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    assert stage_cost(tmp_path, "sft") == {"seconds": 20.0 + 30.0, "peak_gib": None}


def test_clusters_widen_the_interval() -> None:
    values = [1.0, 1.0, 0.0, 0.0] * 10
    alone = by_cluster(values, range(40))
    paired = by_cluster(values, [at // 2 for at in range(40)])
    assert paired.high - paired.low > 1.2 * (alone.high - alone.low)


def test_seeds_and_prompts_both_count() -> None:
    apart = [Estimate(value=value, low=value, high=value, count=9) for value in (0.0, 1.0, 2.0)]
    near = [Estimate(value=1.0, low=0.0, high=2.0, count=9)] * 3
    assert over_seeds(apart).high == pytest.approx(1 + 4.302653 / 3**0.5)
    assert (over_seeds(near).low, over_seeds(near).high) == (0.0, 2.0)


def test_a_page_without_its_marker_is_refused() -> None:
    with pytest.raises(ValueError, match="a: made by the study"):
        fill("no marker", {"a": "text"})


def test_figures_are_svg_that_stands_alone() -> None:
    half = Estimate(value=0.5, low=0.4, high=0.6, count=3)
    text = picture(
        [
            dots("A <title>", ["start", "GRPO"], {"trained": [half, half], "untrained": [half, None]}),
            lines("Reward", "step", {"GRPO": [(0.0, 0.1), (1.0, 0.2)], "RLOO": [(0.0, 0.1), (2.0, 0.4)]}),
        ]
    )
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    circles = [shape for shape in root.iter("{http://www.w3.org/2000/svg}circle") if shape.get("r") == "4"]
    assert len(circles) == 3
    assert "GRPO" in text
    assert "var(--blue)" in text
