"""`kedge check` reads the constitution, and asks whether who revises is there, before anything is sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.stages.revise.conftest import CONSTITUTION, StubCritic

from kedge.commands.check import RecipeReport, check_recipe
from kedge.recipe.schema import load_recipe


def checked(folder: Path, home: Path, constitution: Any, url: str, *, offline: bool = False) -> RecipeReport:
    (folder / "constitution.yaml").write_text(json.dumps(constitution, indent=1))
    stage = {"kind": "revise", "prompts": str(home / "prompts.jsonl"), "constitution": "constitution.yaml"}
    stage |= {"by": {"url": url, "model": "stub"}, "max_new_tokens": 8}
    recipe = {"kedge": 1, "name": "c", "model": str(home / "tiny"), "stages": {"revise": stage}}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return check_recipe(load_recipe(folder / "recipe.yaml"), offline=offline)


def test_a_good_one_is_fit_and_its_arithmetic_is_told(tmp_path: Path, revise_home: Path, critic: StubCritic) -> None:
    critic.reply_to = lambda request, digest: {"choices": [{"message": {"content": "Yes."}}]}  # pyright: ignore
    report = checked(tmp_path, revise_home, CONSTITUTION, critic.url)
    assert [finding.message for finding in report.findings if finding.level == "fatal"] == []
    assert critic.calls == 1
    assert any(row.what == "writer" and row.result == "asked once: it writes" for row in report.checked)
    assert any("8 calls for each prompt" in line for stage in report.stages for line in stage.lines)
    checked(tmp_path, revise_home, CONSTITUTION, critic.url, offline=True)
    assert critic.calls == 1


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"principles": [{"id": "rude"}]}, "constitution.unusable", "line 3: principles.0.critique: is required"),
        (CONSTITUTION, "writer.server", "was asked for one word and gave none"),
    ],
)
def test_what_is_wrong_is_fatal(change: Any, code: str, words: str, tmp_path: Path, revise_home: Path) -> None:
    report = checked(tmp_path, revise_home, change, "http://127.0.0.1:9/v1")
    (message,) = (finding.message for finding in report.findings if finding.code == code)
    assert words in message
