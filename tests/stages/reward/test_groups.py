"""A reward stage whose report tells groups apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.core.errors import DataError
from kedge.models.loading.tiny import make_tiny
from kedge.stages.reward.settings import RewardSettings
from kedge.stages.reward.train import train

RunStage = Callable[..., Any]


def start(folder: Path, run_recorded: RunStage, groups: list[str]) -> Any:
    make_tiny(folder / "tiny", hidden=32, layers=1)
    rows = [
        {
            "prompt": f"q {number}",
            "chosen": f"{number} yes",
            "rejected": f"{number} no",
            "language": ("de", "en", "fr")[number % 3],
        }
        for number in range(30)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"kind": "reward", "data": "data", "batch": 8, "max_length": 48, "heldout_share": 0.4, "max_steps": 1}
    settings = RewardSettings.model_validate(fields | {"groups": groups, "if_unfit": "go_on"})
    paths = {"from": str(folder / "tiny"), "data": str(folder / "pairs.jsonl")}
    return run_recorded(folder / "stage", train, settings, **paths)


def test_the_report_has_the_accuracy_of_each_group(run_recorded: RunStage, tmp_path: Path) -> None:
    start(tmp_path, run_recorded, ["language"])
    report = json.loads((tmp_path / "stage/reward-report.json").read_text())
    by_language = report["by_group"]["language"]
    assert list(by_language) == ["de", "en", "fr"]
    assert sum(share["n"] for share in by_language.values()) == report["pairs"] == 12
    right = sum(share["value"] * share["n"] for share in by_language.values())
    assert right == pytest.approx(report["accuracy"]["value"] * report["pairs"])
    assert "accuracy, language fr" in (tmp_path / "stage/reward-report.html").read_text()


def test_a_field_that_is_not_there_is_refused_before_training(run_recorded: RunStage, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="did you mean 'language'"):
        start(tmp_path, run_recorded, ["langauge"])
    assert not (tmp_path / "stage/finished").exists()
