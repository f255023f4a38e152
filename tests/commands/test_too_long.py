"""`too_long: refuse` in every stage that has it: what a run would refuse, `kedge check` says before it is paid for.

The words for the key that it replaces are here too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kedge.commands.check import check_recipe, refuse_unfit
from kedge.core import plugins
from kedge.core.errors import ConfigError
from kedge.core.stage import Stage
from kedge.models.loading.tiny import make_tiny
from kedge.recipe.schema import load_recipe

LONG = "a" * 300
SCORE = {"kind": "regex", "pattern": "a"}
SAMPLED = {"reward": SCORE, "max_prompt_tokens": 200, "sampling": {"max_new_tokens": 8}}
FILES: dict[str, list[dict[str, Any]]] = {
    "prompts": [{"prompt": "Say a"}, {"prompt": LONG}],
    "pairs": [{"prompt": f"Say {word}", "chosen": "yes", "rejected": "no"} for word in ("a", "b", LONG)],
    "short_pairs": [{"prompt": f"Say {word}", "chosen": "yes", "rejected": "no"} for word in ("c", "d", "e")],
    "demonstrations": [{"prompt": "Say a", "completion": "a"}, {"prompt": LONG, "completion": "b"}],
    "short_demonstrations": [{"prompt": "Say b", "completion": "a"}, {"prompt": "Say c", "completion": "b"}],
}
ONLINE = {"prompts": "prompts.jsonl", "rounds": 1, **SAMPLED, "too_long": "refuse"}
CASES: dict[str, dict[str, Any]] = {
    "sft": {"kind": "sft", "data": "demonstrations.jsonl", "max_length": 200},
    "sft, held out": {
        "kind": "sft",
        "data": "short_demonstrations.jsonl",
        "heldout": "demonstrations.jsonl",
        "max_length": 200,
    },
    "reward": {"kind": "reward", "data": "pairs.jsonl", "max_length": 200},
    "reward, held out": {
        "kind": "reward",
        "data": "short_pairs.jsonl",
        "heldout": "pairs.jsonl",
        "max_length": 200,
    },
    "preference": {"kind": "preference", "data": "pairs.jsonl", "max_length": 200},
    "preference, online": {"kind": "preference", "online": ONLINE, "max_length": 300},
    "ppo": {"kind": "ppo", "prompts": "prompts.jsonl", **SAMPLED},
    "group": {"kind": "group", "prompts": "prompts.jsonl", **SAMPLED},
    "best_of_n": {"kind": "best_of_n", "prompts": "prompts.jsonl", **SAMPLED},
    "tasks": {
        "kind": "tasks",
        "models": ["tiny"],
        "prompts": "prompts.jsonl",
        "max_prompt_tokens": 200,
        "max_new_tokens": 8,
    },
    "revise": {
        "kind": "revise",
        "prompts": "prompts.jsonl",
        "constitution": "constitution.yaml",
        "max_prompt_tokens": 200,
        "max_new_tokens": 8,
    },
    "drift": {
        "kind": "drift",
        "policy": "tiny",
        "prompts": "prompts.jsonl",
        "max_prompt_tokens": 200,
        "max_new_tokens": 8,
    },
    "evaluate": {
        "kind": "evaluate",
        "models": ["tiny"],
        "prompts": "prompts.jsonl",
        "reward": SCORE,
        "max_prompt_tokens": 200,
        "max_new_tokens": 8,
    },
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    make_tiny(folder / "tiny", hidden=32, layers=1)
    for name, rows in FILES.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write(home: Path, stage: Mapping[str, Any]) -> Path:
    recipe = {"kedge": 1, "name": "short", "model": "./tiny", "stages": {"train": stage}}
    (home / "recipe.yaml").write_text(json.dumps(recipe))
    return home / "recipe.yaml"


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused_for_its_length_is_found_by_check(name: str, home: Path) -> None:
    stage = {**CASES[name]} if "online" in CASES[name] else {**CASES[name], "too_long": "refuse"}
    recipe = load_recipe(write(home, stage))
    fatal = [finding for finding in check_recipe(recipe).findings if finding.level == "fatal"]
    assert any("too_long" in finding.code or "longer" in finding.message for finding in fatal), fatal
    with pytest.raises(ConfigError, match="200"):
        refuse_unfit(recipe)


@pytest.mark.parametrize("name", ["sft", "reward", "preference", "preference, online", "ppo"])
def test_with_cut_the_same_is_fit(name: str, home: Path) -> None:
    stage = {**CASES[name]} if "online" in CASES[name] else {**CASES[name], "too_long": "cut"}
    if "online" in stage:
        stage["online"] = {**stage["online"], "too_long": "cut"}
    findings = check_recipe(load_recipe(write(home, stage))).findings
    assert not any(finding.level == "fatal" and "longer" in finding.message for finding in findings)


def test_every_stage_that_has_the_setting_is_here() -> None:
    stages: Mapping[str, Stage] = {name: plugins.find("stages", name) for name in plugins.names("stages")}
    having = {name for name, stage in stages.items() if "too_long" in stage.settings.model_fields}
    assert having == {stage["kind"] for stage in CASES.values()}


@pytest.mark.parametrize(("value", "now"), [("left", "cut"), ("refuse", "refuse")])
def test_the_old_key_is_answered_with_the_new_one(value: str, now: str, home: Path) -> None:
    file = write(home, {"kind": "reward", "data": "short_pairs.jsonl", "truncate": value})
    with pytest.raises(ConfigError) as error:
        load_recipe(file)
    message = str(error.value)
    assert "truncate" in message
    assert "too_long" in message
    assert "`left` is `cut`, `refuse` is the same" in message
    load_recipe(write(home, {"kind": "reward", "data": "short_pairs.jsonl", "too_long": now}))


def test_a_fault_of_a_whole_stage_is_told_in_its_words(home: Path) -> None:
    file = write(home, {**CASES["preference, online"], "max_length": 200})
    with pytest.raises(ConfigError, match=r"prompt and answer may have 208 tokens .* max_length is 200: raise it"):
        load_recipe(file)
