"""The study of verifiable instructions: its pure parts, and on a tiny model from end to end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "studies"))

import verifiable
from common import parse
from kedge.recipe.schema import recipe_of
from verifiable import decontaminated, exam_scores, kinds_by_item, rejection_prompts, settings_of, stage_of, summaries
from verifiable_page import verdict, write_results


def test_prompts_with_many_words_of_an_evaluation_prompt_are_left_out() -> None:
    rows = [{"prompt": "Tell me a long story about seven brave ducks"}, {"prompt": "Tell me a story"}]
    clean, longest = decontaminated(rows, ["Please tell me a long story about seven brave sailors"], gram=8)
    assert clean == rows[1:]
    assert longest == 8
    assert decontaminated(rows, ["tell me a tale"], gram=8) == (rows, 3)


@pytest.mark.parametrize("method", verifiable.METHODS)
def test_every_method_samples_as_many_answers(method: str, tmp_path: Path) -> None:
    grpo = settings_of(parse("verifiable", verifiable.PARTS, "", ["--to", str(tmp_path)]), verifiable.FULL)
    stage = stage_of(method, grpo, verifiable.FULL["imitate"])
    recipe_of({"kedge": 1, "name": method, "model": "tiny", "stages": {method: stage}}, ())
    if method == "rejection":
        samples = stage["method"]["rounds"] * rejection_prompts(grpo) * stage["n"]
    else:
        samples = stage["iterations"] * stage["batch"] * stage.get("answers", 1)
    assert samples == 48 * 16 * 8


def test_another_setting_goes_to_every_method(tmp_path: Path) -> None:
    options = parse("verifiable", verifiable.PARTS, "", ["--to", str(tmp_path), "--set", "actor.lr=1e-5"])
    grpo = settings_of(options, verifiable.FULL)
    assert grpo["actor"]["lr"] == 1e-5
    assert stage_of("ppo", grpo, {})["actor"]["lr"] == 1e-5


def scores_of(tmp_path: Path, rows: list[tuple[str, str, str, float, str | None, str | None]]) -> Any:
    file = tmp_path / "items.jsonl"
    names = ("exam", "metric", "item", "score", "cluster", "kind")
    records = [dict(zip(names, row, strict=True)) for row in rows]
    file.write_text("".join(json.dumps(row | {"groups": {"kind": row["kind"]}}) + "\n" for row in records))
    return exam_scores(file)


def test_trained_and_untrained_kinds_are_apart(tmp_path: Path) -> None:
    comma, sections = "punctuation:no_comma", "detectable_format:multiple_sections"
    scores = scores_of(
        tmp_path,
        [
            ("ifeval", "prompt_strict", "1", 1.0, None, None),
            ("ifeval", "prompt_strict", "2", 0.0, None, None),
            ("ifeval", "instruction_strict", "1:0", 1.0, "1", comma),
            ("ifeval", "instruction_strict", "2:0", 0.0, "2", sections),
            ("ifeval", "instruction_strict", "2:1", 1.0, "2", comma),
        ],
    )
    items = [{"key": 1, "instruction_id_list": [comma]}, {"key": 2, "instruction_id_list": [comma, sections]}]
    found = summaries(scores, kinds_by_item(items))["ifeval"]
    assert (found["trained"]["value"], found["untrained"]["value"]) == (1.0, 0.0)
    assert (found["prompts_trained"]["value"], found["prompts_untrained"]["value"]) == (1.0, 0.0)
    assert found["instruction_strict"]["count"] == 2


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (-0.05, -0.01, "a loss"),
        (0.01, 0.05, "a gain"),
        (-0.02, 0.04, "no loss is shown, and one of more than 2.0 points"),
    ],
)
def test_a_loss_on_untrained_kinds_is_told(low: float, high: float, words: str) -> None:
    found = {"value": (low + high) / 2, "low": low, "high": high, "count": 9}
    gains = {"ifeval": {"prompt_strict": {"value": 0.09, "low": 0.05, "high": 0.13, "count": 9}, "untrained": found}}
    text = verdict([{"seed": 1, "parts": {"grpo": {"gains": gains}}}], ["grpo"])
    assert f"({words}" in text
    assert "+9.0 [5.0, 13.0] points of IFEval's prompts followed strictly (wanted: 8; reached)" in text


def test_without_a_seed_the_page_stays_as_it_is(tmp_path: Path) -> None:
    write_results(parse("verifiable", verifiable.PARTS, "", ["--to", str(tmp_path), "--merge"]), [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_small_seed_runs_to_its_end(tmp_path: Path) -> None:
    arguments = ["--size", "small", "--to", str(tmp_path / "to"), "--work", str(tmp_path / "work")]
    assert verifiable.main([*arguments, "--data", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "to" / "verifiable" / "seed-1.json").read_text())
    assert set(record["parts"]) == set(verifiable.PARTS)
    grpo = record["parts"]["grpo"]
    assert len(grpo["curves"]["reward"]) == 2
    assert grpo["gains"]["ifeval"]["prompt_strict"]["count"] == 30
    page = (tmp_path / "to" / "verifiable.md").read_text()
    assert "No seed has been run yet" not in page
    assert str(tmp_path) not in page
    assert (tmp_path / "to" / "verifiable.svg").read_text().startswith("<svg")
    assert str(tmp_path) not in (tmp_path / "to" / "verifiable" / "grpo-seed-1.html").read_text()
