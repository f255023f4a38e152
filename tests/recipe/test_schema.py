"""Recipes: what loads, and the exact words of what does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, model_validator

from kedge.core import plugins
from kedge.core.errors import ConfigError
from kedge.core.settings import Section
from kedge.recipe.schema import load_recipe, recipe_schema

Write = Callable[[str, str], Path]

GOOD = """\
    kedge: 1
    name: hh
    seed: 7
    model: tiny
    stages:
      sft: {kind: sft, data: demos.jsonl}
      reward: {kind: reward, from: sft, data: pairs.jsonl, members: 3}
      ppo: {kind: ppo, from: sft, reward: reward, prompts: prompts.jsonl,
            kl: {start: 0.05, target: 6.0, limit: 12.0, on_limit: rollback}}
      eval: {kind: evaluate, models: [sft, ppo], prompts: heldout.jsonl}
    """


def message_of(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(file, overrides)
    return str(caught.value)


def test_the_recipe_of_the_design_loads_with_its_defaults(write: Write) -> None:
    recipe = load_recipe(write("a.yaml", GOOD))
    resolved = recipe.resolved()
    assert list(resolved["stages"]) == ["sft", "reward", "ppo", "eval"]
    assert resolved["seed"] == 7
    assert resolved["stages"]["reward"]["members"] == 3
    assert resolved["stages"]["reward"]["from"] == "sft"
    assert resolved["stages"]["ppo"]["kl"]["on_limit"] == "rollback"
    assert resolved["stages"]["ppo"]["actor"]["eps"] == 1e-5


def test_what_was_resolved_loads_again_to_the_same_values(write: Write) -> None:
    import json

    first = load_recipe(write("a.yaml", GOOD)).resolved()
    again = load_recipe(write("b.yaml", json.dumps(first))).resolved()
    assert again == first


def test_every_problem_is_reported_at_once_with_its_line_and_the_nearest_name(write: Write) -> None:
    file = write(
        "bad.yaml",
        """\
        kedge: 1
        nam: hh
        seed: seven
        model: tiny
        stages:
          sft:
            kind: sft
            data: demos.jsonl
            epoch: 2
            optimiser:
              lr: -1e-6
          ppo: {kind: ppo, reward: r, prompts: p.jsonl, roles: lorra}
          eval: {kind: evalute, models: [sft]}
          odd: 3
          none: {data: x}
        """,
    )
    assert message_of(file).splitlines() == [
        f"{file}: 9 problem(s)",
        "  line 1: name: is required and missing",
        "  line 2: nam: not a setting here (did you mean 'name'?)",
        "  line 3: seed: must be a whole number, found 'seven'",
        "  line 9: stages.sft.epoch: not a setting here (did you mean 'epochs'?)",
        "  line 11: stages.sft.optimiser.lr: must be greater than 0, found -1e-06",
        "  line 12: stages.ppo.roles: must be 'lora', 'separate' or 'trunk', found 'lorra' (did you mean 'lora'?)",
        "  line 13: stages.eval.kind: no stage of kind 'evalute' (did you mean 'evaluate'?); "
        "installed: best_of_n, data, drift, evaluate, exam, gate, group, label, ppo, preference, revise, reward, sft, "
        "tasks",
        "  line 14: stages.odd: must be a mapping of settings, found 3",
        "  line 15: stages.none.kind: is required and missing; one of best_of_n, data, drift, evaluate, exam, gate, "
        "group, label, ppo, preference, revise, reward, sft, tasks",
    ]


def test_an_unknown_key_without_a_near_name_lists_what_is_allowed(write: Write) -> None:
    text = message_of(write("a.yaml", GOOD), "stages.ppo.kl.xyzzy=1")
    assert "--set stages.ppo.kl.xyzzy=1: stages.ppo.kl.xyzzy: not a setting here" in text
    assert "allowed: start, target, horizon, kind, where, limit, on_limit, rollback_factor, max_rollbacks" in text


def test_a_setting_that_is_gone_is_answered_with_why(write: Write) -> None:
    file = write("a.yaml", GOOD.replace("data: demos.jsonl}", "data: demos.jsonl, packing: true}"))
    assert "packing: is no longer a setting: sequences are always packed without padding" in message_of(file)


def test_a_rule_across_two_settings_names_both_values(write: Write) -> None:
    text = message_of(write("a.yaml", GOOD), "stages.ppo.kl.limit=2")
    assert "stages.ppo.kl: limit 2 must be above target 6" in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("stages.sft.epochs=0", "stages.sft.epochs: must be greater than 0, found 0"),
        ("stages.sft.batch=1.5", "stages.sft.batch: must be a whole number, found 1.5"),
        ("stages.sft.batch=[1]", "stages.sft.batch: must be a whole number, found [1]"),
        ("stages.sft.optimiser=fast", "stages.sft.optimiser: must be a mapping of settings, found 'fast'"),
        ("stages.sft.optimiser.lr=.inf", "stages.sft.optimiser.lr: must be a finite number, found inf"),
        ("stages.eval.models=[]", "stages.eval.models: needs at least 1 item(s), found 0"),
        ("name=a b", "name: must match ^[A-Za-z0-9][A-Za-z0-9_-]*$, found 'a b'"),
        ("kedge=2", "kedge: must be 1, found 2"),
        ("trackers.tensorbord={}", "trackers.tensorbord: no such tracker (did you mean 'tensorboard'?)"),
    ],
)
def test_wrong_values_say_what_was_found_and_what_is_allowed(write: Write, override: str, expected: str) -> None:
    assert expected in message_of(write("a.yaml", GOOD), override)


def test_overrides_are_typed_and_win(write: Write) -> None:
    recipe = load_recipe(write("a.yaml", GOOD), ["stages.sft.optimiser.lr=3e-6", "seed=11", "stages.eval.models=[ppo]"])
    resolved = recipe.resolved()
    assert resolved["stages"]["sft"]["optimiser"]["lr"] == 3e-6
    assert resolved["seed"] == 11
    assert resolved["stages"]["eval"]["models"] == ["ppo"]


@pytest.mark.parametrize("bad", ["stages.sft.lr", "=3", "a..b=3", "seed=[1"])
def test_an_override_that_cannot_be_read_says_so(write: Write, bad: str) -> None:
    assert message_of(write("a.yaml", GOOD), bad).startswith("--set")


def test_extends_puts_the_recipe_over_its_base(write: Write) -> None:
    write("base/b.yaml", GOOD)
    file = write("a.yaml", "extends: base/b.yaml\nname: mine\nstages: {sft: {epochs: 2}}\n")
    resolved = load_recipe(file).resolved()
    assert resolved["name"] == "mine"
    assert resolved["seed"] == 7
    assert resolved["stages"]["sft"]["epochs"] == 2
    assert resolved["stages"]["sft"]["data"] == "demos.jsonl"


def test_a_problem_in_an_extended_file_names_that_file(write: Write) -> None:
    base = write("b.yaml", GOOD.replace("seed: 7", "seed: -7"))
    text = message_of(write("a.yaml", "extends: b.yaml\nname: mine\n"))
    assert f"{base} line 3: seed: must be at least 0, found -7" in text


def test_a_circle_of_extends_is_named(write: Write) -> None:
    write("a.yaml", "extends: b.yaml\n")
    file = write("b.yaml", "extends: a.yaml\n")
    assert message_of(file).endswith("`extends` goes in a circle: b.yaml -> a.yaml -> b.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the file is empty"),
        ("- a\n- b\n", "a recipe is a mapping of settings, found a list at the top"),
        ("kedge: 1\nkedge: 1\n", "line 2: found duplicate key"),
        ("kedge: [1\n", "not valid YAML"),
        ("extends: nowhere.yaml\n", "line 1: extends: there is no file"),
        ("extends: 3\n", "line 1: extends: a file name or a list of them, found 3"),
    ],
)
def test_files_that_are_no_recipe(write: Write, text: str, expected: str) -> None:
    assert expected in message_of(write("a.yaml", text))


def test_a_missing_recipe_lists_its_neighbours(write: Write) -> None:
    file = write("there.yaml", GOOD)
    assert "there is no such recipe" in message_of(file.with_name("gone.yaml"))
    assert "there.yaml" in message_of(file.with_name("gone.yaml"))


def test_a_binary_file_is_no_recipe(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(b"\xff\xfe\x00\x01")
    assert "not UTF-8 text" in message_of(file)


def test_the_schema_knows_every_stage_and_its_nested_settings() -> None:
    schema = recipe_schema()
    assert {"stage.sft", "stage.ppo", "ppo.KLSettings"} <= set(schema["$defs"])
    assert schema["$defs"]["stage.ppo"]["properties"]["kl"]["$ref"] == "#/$defs/ppo.KLSettings"
    assert "extends" in schema["properties"]
    lr = schema["$defs"]["sft.OptimiserSettings"]["properties"]["lr"]
    assert lr["exclusiveMinimum"] == 0
    assert "learning rate" in lr["description"].lower()


GROUP = """\
    kedge: 1
    name: g
    model: tiny
    stages:
      grpo:
        kind: group
        reward: {kind: exact}
        prompts: p.jsonl
        method: METHOD
    """


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("gpro", "grpo.method: there is no method 'gpro' (did you mean 'grpo'?); methods: cispo, dapo, dr_grpo, grpo,"),
        (
            "{clip: 0.1}",
            "grpo.method: a method with settings says which one it is, such as {kind: grpo, clip: 0.1}; found no kind",
        ),
        ("{kind: grpo, clip: 1.5}", "grpo.method.clip: must be less than 1, found 1.5"),
        ("{kind: grpo, clipp: 0.1}", "grpo.method.clipp: not a setting here (did you mean 'clip'?)"),
        ("{kind: rloo, clip: 0.1}", "grpo.method.clip: not a setting here; allowed: kind"),
    ],
)
def test_a_problem_of_a_group_method_is_reported_where_it_was_written(write: Write, method: str, expected: str) -> None:
    text = message_of(write("g.yaml", GROUP.replace("METHOD", method)))
    assert text.splitlines()[0].endswith("1 problem(s)")
    assert f"  line 9: stages.{expected}" in text


@pytest.mark.parametrize(
    ("generator", "expected"),
    [
        ("loca", "generator: there is no generator 'loca' (did you mean 'local'?); generators: local"),
        ("{rows: 3}", "generator: a generator with settings says which one it is, such as {kind: NAME}; found no kind"),
        ("{kind: local, rows: 3}", "generator.rows: not a setting here; allowed: lag, kind"),
        ("3", "generator: must be the name of a generator, or a mapping with its settings, found 3"),
    ],
)
def test_a_problem_of_a_generator_is_reported_where_it_was_written(write: Write, generator: str, expected: str) -> None:
    text = message_of(write("g.yaml", GROUP.replace("method: METHOD", f"generator: {generator}")))
    assert text.splitlines()[0].endswith("1 problem(s)")
    assert f"  line 9: stages.grpo.{expected}" in text


def test_what_was_resolved_of_a_group_method_loads_again_to_the_same_values(write: Write) -> None:
    import json

    first = load_recipe(write("a.yaml", GROUP.replace("METHOD", "{kind: dapo, clip: 0.1}"))).resolved()
    assert first["stages"]["grpo"]["method"] == {"kind": "dapo", "clip": 0.1, "clip_high": 0.28}
    again = load_recipe(write("b.yaml", json.dumps(first))).resolved()
    assert again == first


class Window(Section):
    first: int = Field(default=0, ge=0, alias="from")


class WindowedSettings(Section):
    """Of a method that is installed from elsewhere, with a section inside of its own and a rule across settings."""

    kind: Literal["windowed"] = "windowed"
    window: Window = Window()
    size: int = 1

    @model_validator(mode="after")
    def _fits(self) -> WindowedSettings:
        if self.size < self.window.first:
            raise ValueError(f"size {self.size} is below window.from {self.window.first}")
        return self


@pytest.fixture
def windowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The method `windowed`, as if it were installed."""
    method = replace(plugins.find("algorithms", "grpo"), settings=WindowedSettings)
    real_names, real_find = plugins.names, plugins.find
    monkeypatch.setattr(
        plugins, "names", lambda kind: [*real_names(kind), *(["windowed"] if kind == "algorithms" else [])]
    )
    monkeypatch.setattr(plugins, "find", lambda kind, name: method if name == "windowed" else real_find(kind, name))


@pytest.mark.usefixtures("windowed")
@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("{kind: windowed, window: {from: -1}}", "method.window.from: must be at least 0, found -1"),
        ("{kind: windowed, window: {form: 1}}", "method.window.form: not a setting here (did you mean 'from'?)"),
        ("{kind: windowed, window: {from: 2}}", "method: size 1 is below window.from 2"),
        ("{kind: windowed, window: 3}", "method.window: must be a mapping of settings, found 3"),
    ],
)
def test_sections_inside_of_an_installed_method_have_their_paths(write: Write, method: str, expected: str) -> None:
    assert f"  line 9: stages.grpo.{expected}" in message_of(write("g.yaml", GROUP.replace("METHOD", method)))


@pytest.mark.usefixtures("windowed")
def test_an_installed_method_is_resolved_by_the_names_that_a_recipe_uses(write: Write) -> None:
    recipe = load_recipe(write("g.yaml", GROUP.replace("METHOD", "{kind: windowed, window: {from: 1}}")))
    assert recipe.resolved()["stages"]["grpo"]["method"] == {"kind": "windowed", "window": {"from": 1}, "size": 1}


@pytest.mark.usefixtures("windowed")
def test_the_schema_knows_the_settings_of_every_installed_method() -> None:
    variants = recipe_schema()["$defs"]["stage.group"]["properties"]["method"]["anyOf"]
    assert variants[0]["enum"] == [*plugins.names("algorithms")]
    sections = {variant["properties"]["kind"]["const"]: variant["properties"] for variant in variants[1:]}
    assert set(sections) == set(plugins.names("algorithms"))
    assert sections["grpo"]["clip"]["exclusiveMaximum"] == 1
    assert "window" in sections["windowed"]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("gone_module:X", "algorithm 'broken' needs 'gone_module'"),
        ("kedge.core.files:write_text", "algorithm 'broken' is a function, expected a GroupMethod"),
    ],
)
def test_a_method_that_cannot_be_used_is_a_problem_of_the_recipe_that_names_it(
    write: Write, monkeypatch: pytest.MonkeyPatch, target: str, expected: str
) -> None:
    real, broken = plugins._installed, {"broken": EntryPoint("broken", target, "kedge.algorithms")}
    monkeypatch.setattr(plugins, "_installed", lambda kind: {**real(kind), **(broken if kind == "algorithms" else {})})
    assert f"line 9: stages.grpo.method: {expected}" in message_of(write("g.yaml", GROUP.replace("METHOD", "broken")))
    variants = recipe_schema()["$defs"]["stage.group"]["properties"]["method"]["anyOf"]
    assert len(variants) == 1 + len(real("algorithms"))  # the names, and the sections of all others


def test_true_is_no_number(write: Write) -> None:
    told = message_of(
        write(
            "truth.yaml",
            """\
            kedge: 1
            name: n
            seed: true
            model: tiny
            stages:
              sft: {kind: sft, data: d.jsonl, batch: true, micro_batch: false, lora: {rank: 4, rslora: true},
                    optimiser: {lr: true}}
            """,
        )
    )
    assert "4 problem(s)" in told
    for place, expected in (
        ("line 3: seed", "must be a whole number, found 'true'"),
        ("line 6: stages.sft.batch", "must be a whole number, found 'true'"),
        ("line 6: stages.sft.micro_batch", "found 'false'"),
        ("line 7: stages.sft.optimiser.lr", "must be a number, found 'true'"),
    ):
        assert any(place in line and expected in line for line in told.splitlines()), told
