"""The shared parts of the studies: files of seeds, intervals, tables between markers, figures."""

from __future__ import annotations

import doctest
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "studies"))

import common
from common import Estimate, SeedFile, by_cluster, dots, fill, lines, over_seeds, parse, read_seeds
from kedge.report.charts.picture import picture


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
    assert record["machine"]["torch"]
    assert [read["seed"] for read in read_seeds(tmp_path / "s")] == [3]
    assert not list((tmp_path / "s").glob(".*"))


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
