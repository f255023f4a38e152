"""The contract of stages (`kedge.testing.contracts.stages`) on ours, and proof that it catches those that break it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from kedge.core import plugins
from kedge.core.findings import Finding
from kedge.core.settings import Section
from kedge.core.stage import Input, Stage
from kedge.testing.contracts.stages import StageContract

VALUES: dict[str, dict[str, Any]] = {
    "data": {"files": ["pairs.jsonl"]},
    "sft": {"data": "demonstrations.jsonl"},
    "reward": {"data": "pairs.jsonl"},
    "ppo": {"reward": "reward", "prompts": "prompts.jsonl"},
    "group": {"reward": {"kind": "exact"}, "prompts": "prompts.jsonl"},
    "preference": {"data": "pairs.jsonl"},
    "best_of_n": {"reward": "reward", "prompts": "prompts.jsonl"},
    "evaluate": {"models": ["sft"], "prompts": "prompts.jsonl"},
    "exam": {"models": ["sft"], "exams": ["knowledge"]},
    "gate": {"candidate": "ppo", "baseline": "sft", "from": ["exam"]},
    "tasks": {"models": ["sft"], "prompts": "prompts.jsonl"},
    "revise": {"prompts": "prompts.jsonl", "constitution": "constitution.yaml"},
    "label": {"data": "tasks", "by": {"kind": "people", "project": "shop"}},
    "drift": {"policy": "ppo", "previous": "sft", "prompts": "prompts.jsonl"},
}
TESTS = [name for name in dir(StageContract) if name.startswith("test_")]


def hold(stage: Stage, values: Mapping[str, Any], test: str) -> None:
    """Run one test of the contract on a stage."""
    contract = type("Contract", (StageContract,), {"stage": stage, "values": values})
    getattr(contract(), test)()


@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("name", VALUES)
def test_our_stages_keep_the_contract(name: str, test: str) -> None:
    hold(plugins.find("stages", name), {"kind": name, **VALUES[name]}, test)


def test_every_stage_with_an_entry_point_is_held_to_the_contract() -> None:
    assert set(VALUES) == set(plugins.names("stages"))


class CountSettings(Section):
    kind: Literal["count"]
    data: Annotated[str, Input("records")]
    """What to count."""
    most: int = 3
    """The most."""


class AnyKind(CountSettings):
    kind: str  # pyright: ignore[reportIncompatibleVariableOverride]


class TakesAll(BaseModel):
    kind: Literal["count"]
    data: str = Field(description="What to count.")


class Undocumented(CountSettings):
    least: int = 1


class UnknownInput(Section):
    kind: Literal["count"]
    data: Annotated[str, Input("words")]  # pyright: ignore[reportArgumentType]
    """What to count."""


class WrittenOnce(CountSettings):
    most: int = Field(default=3, serialization_alias="maximum", description="The most.")


def run(context: object, settings: CountSettings) -> dict[str, Any]:
    return {}


def lost(settings: CountSettings) -> list[Finding]:
    return [Finding(level="warning", code="count.most", message="too many", where="maximum")]


COUNT = Stage(
    summary="Count.", settings=CountSettings, makes={"counts": "records"}, explain=lambda _: ["counts"], run=run
)


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({}, set()),
        ({"settings": AnyKind}, {"test_settings_are_named"}),
        ({"settings": TakesAll}, {"test_unknown_settings"}),
        ({"settings": WrittenOnce}, {"test_settings_are_read_again"}),
        ({"settings": Undocumented}, {"test_every_setting_is_documented"}),
        ({"settings": UnknownInput}, {"test_inputs_and_outputs"}),
        ({"makes": {}}, {"test_inputs_and_outputs"}),
        ({"makes": {"counts": "counts"}}, {"test_inputs_and_outputs"}),
        ({"summary": " "}, {"test_it_is_explained"}),
        ({"explain": lambda _: []}, {"test_it_is_explained"}),
        ({"explain": lambda _: ["one\ntwo"]}, {"test_it_is_explained"}),
        ({"check": lost}, {"test_findings_name_settings"}),
        ({"check": lambda _: ["too many"]}, {"test_findings_name_settings"}),
        ({"window": lambda _: 0}, {"test_the_window"}),
        ({"run": None}, {"test_its_function"}),
        ({"run": "kedge.core.files:no_such_function"}, {"test_its_function"}),
        ({"run": lambda context: {}}, {"test_its_function"}),
    ],
)
def test_the_contract_catches(change: dict[str, Any], broken: set[str]) -> None:
    failed: set[str] = set()
    for test in TESTS:
        try:
            hold(replace(COUNT, **change), {"kind": "count", "data": "a.jsonl"}, test)
        except Exception:
            failed.add(test)
    assert len(failed) == len(broken), failed
    assert all(any(test.startswith(start) for start in broken) for test in failed), failed
