"""One setting of a section leaves its siblings as the stage has them: for every stage, section and setting there is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import kedge
from kedge.core import plugins
from kedge.core.errors import ConfigError
from kedge.core.settings import Section
from kedge.recipe.schema import Recipe, load_recipe, recipe_of

PRICED = {"length": {"price": 0.1, "most": 100}}
MINIMAL: dict[str, dict[str, Any]] = {
    "sft": {"data": "d.jsonl"},
    "reward": {"data": "p.jsonl"},
    "preference": {"data": "p.jsonl", "lora": {}, "online": {"prompts": "p.jsonl", "reward": "r"}},
    "best_of_n": {"prompts": "p.jsonl", "reward": "r"},
    "ppo": {"prompts": "p.jsonl", "reward": "r", "loss": {"imitate": {"data": "d.jsonl"}}, "scores": PRICED},
    "group": {"prompts": "p.jsonl", "reward": "r", "loss": {"imitate": {"data": "d.jsonl"}}, "scores": PRICED},
    "evaluate": {"models": ["tiny"], "prompts": "p.jsonl"},
    "exam": {"models": ["tiny"], "exams": ["knowledge"]},
    "gate": {"candidate": "tiny", "baseline": "tiny", "from": ["eval"]},
    "tasks": {"models": ["tiny"], "prompts": "p.jsonl"},
    "revise": {"prompts": "p.jsonl", "constitution": "c.yaml"},
    "label": {"data": "t.jsonl", "by": {"project": "shop"}},
    "data": {"files": ["d.jsonl"]},
    "drift": {"policy": "tiny", "prompts": "p.jsonl"},
}
"""What each kind cannot do without; optional sections are given, so that their settings are tried too."""
CHOICES = ("method", "combine", "generator")
"""Sections of which there are several, told apart by their `kind`."""
TOP: dict[str, Any] = {"kedge": 1, "name": "n", "model": "tiny", "alerts": {}}


def recipe(kind: str, sets: dict[str, Any]) -> Recipe:
    return recipe_of({**TOP, "stages": {"s": {"kind": kind, **MINIMAL[kind]}}}, sets)


def leaves(section: Section, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """The path, annotation and value of every setting that is no section, in sections below the top one."""
    for name, info in type(section).model_fields.items():
        value, here = getattr(section, name), (*path, info.alias or name)
        if isinstance(value, Section):
            yield from leaves(value, here)
        elif name != "kind" or len(get_args(info.annotation)) > 1:  # `kind` with one value says which section it is
            yield here, info.annotation, value


def other_values(annotation: Any, value: Any) -> Iterator[Any]:
    """Values of the same type, one of which fits whatever bounds a setting has."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, str):
        yield from (option for option in get_args(annotation) if isinstance(option, str))
        yield "other"
    elif isinstance(value, int | float):
        yield from (value / 2, value * 2, value + 1, value + 2, 0.5)
    elif isinstance(value, tuple):
        yield from ([option] for of_items in get_args(annotation) for option in get_args(of_items))
    yield from (2, 0.5, 20, 5, True, "other", ["other"], [{"url": "http://x"}], [{"run": ["x"]}], {})


def at(values: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


def without(values: Any, path: tuple[str, ...]) -> Any:
    """A copy of nested mappings without one of their leaves."""
    first, *rest = path
    return {
        key: without(value, tuple(rest)) if key == first else value
        for key, value in values.items()
        if rest or key != first
    }


def settings_below(kind: str) -> list[tuple[tuple[str, ...], Any, Any]]:
    section = recipe(kind, {}).stages["s"]
    return [leaf for leaf in leaves(section, ("stages", "s")) if len(leaf[0]) > 3]


CASES = [(kind, *leaf) for kind in MINIMAL for leaf in settings_below(kind)]
CASES += [("data", *leaf) for leaf in leaves(recipe("data", {}).settings, ()) if leaf[0][0] == "alerts"]


def test_every_kind_of_stage_is_tried_and_has_many_settings() -> None:
    assert set(MINIMAL) == set(plugins.names("stages"))
    assert len(CASES) > 200


@pytest.mark.parametrize("kind", MINIMAL)
def test_one_setting_leaves_all_others_as_they_are(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.core.optimiser.eight_bit_package", lambda: "bitsandbytes")  # as if it were installed
    before = recipe(kind, {}).resolved()
    for case_kind, path, annotation, value in CASES:
        if case_kind != kind:
            continue
        after = changed(kind, path, annotation, value)
        assert at(after, path) != at(before, path)
        assert without(after, path) == without(before, path), f"{'.'.join(path)} changed others"


def changed(kind: str, path: tuple[str, ...], annotation: Any, value: Any) -> dict[str, Any]:
    """The resolved recipe with another value at `path`, the first that fits."""
    before = recipe(kind, {}).resolved()
    for candidate in other_values(annotation, value):
        sets = {".".join(path): candidate}
        if path[-2] in CHOICES and path[-1] != "kind":  # a part of one of several sections says of which
            sets = {".".join((*path[:-1], "kind")): at(before, path[:-1])["kind"], **sets}
        try:
            after = recipe(kind, sets).resolved()
        except ConfigError:
            continue
        if at(after, path) != at(before, path):
            return after
    raise AssertionError(f"no other value of {'.'.join(path)} fits")


PPO_ACTOR = {"lr": 1e-6, "schedule": "constant", "eps": 1e-5, "clip": 0.5}
YAML = """\
kedge: 1
name: n
model: tiny
stages:
  ppo: {kind: ppo, reward: r, prompts: p.jsonl, actor: {clip: 0.5}, checkpoints: {keep: 5}}
"""


def assert_keeps(stage: dict[str, Any]) -> None:
    assert {key: stage["actor"][key] for key in PPO_ACTOR} == PPO_ACTOR
    assert (stage["checkpoints"]["every"], stage["checkpoints"]["keep"]) == (10, 5)


def test_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(YAML)
    assert_keeps(load_recipe(file).resolved()["stages"]["ppo"])


def test_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(YAML.replace(", actor: {clip: 0.5}, checkpoints: {keep: 5}", ""))
    sets = ["stages.ppo.actor.clip=0.5", "stages.ppo.checkpoints={keep: 5}"]
    assert_keeps(load_recipe(file, sets).resolved()["stages"]["ppo"])


def test_in_a_script() -> None:
    made = kedge.PPO("tiny", reward="r", prompts="p.jsonl", actor={"clip": 0.5}, checkpoints={"keep": 5})
    assert_keeps(made.recipe().resolved()["stages"]["ppo"])


def test_the_published_rate_of_a_method_and_a_stage_of_its_own_go_together() -> None:
    stage = recipe("preference", {"stages.s.optimiser.clip": 0.5}).resolved()["stages"]["s"]
    assert stage["optimiser"]["lr"] == pytest.approx(5e-6)
    assert stage["optimiser"]["warmup"] == 0.1


class Inner(Section):
    deep: int = 1
    other: int = 1


class Middle(Section):
    inner: Inner = Inner()
    beside: int = 1


class Chosen(Section):
    kind: str = "chosen"
    size: int = 1


class Outer(Section):
    middle: Middle = Middle(inner=Inner(deep=7), beside=7)
    choice: Chosen | Inner = Chosen(size=7)


def test_defaults_of_sections_inside_of_sections_are_kept() -> None:
    given: dict[str, Any] = {"middle": {"inner": {"other": 3}}}
    assert Outer.model_validate(given).middle == Middle(inner=Inner(deep=7, other=3), beside=7)
    assert given == {"middle": {"inner": {"other": 3}}}  # what was given is left as it was


def test_a_section_of_another_kind_has_nothing_of_the_default() -> None:
    assert Outer.model_validate({"choice": {"kind": "chosen"}}).choice == Chosen(size=7)
    assert Outer.model_validate({"choice": {"deep": 2}}).choice == Inner(deep=2)


def test_a_section_that_is_given_whole_stays_as_it_is() -> None:
    assert Outer.model_validate({"middle": Middle(beside=3)}).middle == Middle(beside=3)
