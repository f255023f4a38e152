"""Wiring: stages are joined by kind, and what cannot be joined is said before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kedge.core.errors import ConfigError
from kedge.recipe.schema import load_recipe
from kedge.recipe.wiring import connect

Write = Callable[[str, str], Path]

HEAD = "kedge: 1\nname: a\nmodel: tiny\nstages:\n"


def faults_of(file: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        connect(load_recipe(file))
    first, *rest = str(caught.value).splitlines()
    assert first == f"{file}: the pipeline cannot run:"
    return [line.strip() for line in rest]


def test_stages_run_when_their_inputs_are_ready_and_otherwise_as_written(write: Write) -> None:
    file = write(
        "a.yaml",
        HEAD
        + "  eval: {kind: evaluate, models: [sft, ppo], prompts: h.jsonl}\n"
        + "  ppo: {kind: ppo, from: sft, reward: rm, prompts: p.jsonl}\n"
        + "  sft: {kind: sft, data: d.jsonl}\n"
        + "  rm: {kind: reward, from: sft, data: q.jsonl}\n",
    )
    assert connect(load_recipe(file)).order == ("sft", "rm", "ppo", "eval")


def test_an_input_without_a_base_starts_from_the_model_of_the_recipe(write: Write) -> None:
    plan = connect(load_recipe(write("a.yaml", HEAD + "  sft: {kind: sft, data: d.jsonl}\n")))
    base, data = plan.links["sft"]
    assert (base.field, base.source(), base.stage) == ("from", "tiny", "")
    assert data.field == "data"


def test_a_relative_file_belongs_to_the_recipe_that_names_it(write: Write, tmp_path: Path) -> None:
    write("base/b.yaml", HEAD + "  sft: {kind: sft, data: d.jsonl}\n")
    file = write("a.yaml", "extends: base/b.yaml\nstages: {sft: {heldout: e.jsonl}}\n")
    _, data, heldout = connect(load_recipe(file)).links["sft"]
    assert Path(data.source()) == tmp_path / "base/d.jsonl"
    assert Path(heldout.source()) == tmp_path / "e.jsonl"


def test_data_of_any_kind_serves_where_records_are_wanted(write: Write) -> None:
    file = write(
        "a.yaml",
        HEAD
        + "  revise: {kind: revise, prompts: p.jsonl, constitution: c.yaml}\n"
        + "  prep: {kind: data, files: [revise.pairs, q.jsonl]}\n"
        + "  rm: {kind: reward, data: prep}\n",
    )
    plan = connect(load_recipe(file))
    assert plan.order == ("revise", "prep", "rm")
    assert [(link.stage, link.output) for link in plan.links["prep"]] == [("revise", "pairs"), ("", "")]
    model = write("b.yaml", HEAD + "  sft: {kind: sft, data: d.jsonl}\n  prep: {kind: data, files: [sft]}\n")
    assert faults_of(model) == ["prep.files: needs records, but sft.model is model"]


def test_an_output_is_chosen_by_name_and_the_first_is_the_default(write: Write) -> None:
    file = write(
        "a.yaml",
        HEAD + "  prep: {kind: data, files: [d.jsonl]}\n" + "  sft: {kind: sft, data: prep, heldout: prep.heldout}\n",
    )
    _, data, heldout = connect(load_recipe(file)).links["sft"]
    assert (data.stage, data.output) == ("prep", "train")
    assert (heldout.stage, heldout.output) == ("prep", "heldout")


def test_a_file_wins_over_an_output_that_does_not_exist(write: Write) -> None:
    write("prep.jsonl", "{}")
    file = write("a.yaml", HEAD + "  prep: {kind: data, files: [d.jsonl]}\n  sft: {kind: sft, data: prep.jsonl}\n")
    _, data = connect(load_recipe(file)).links["sft"]
    assert data.stage == ""


def test_every_wrong_connection_is_named(write: Write) -> None:
    file = write(
        "a.yaml",
        HEAD
        + "  prep: {kind: data, files: [d.jsonl]}\n"
        + "  sft: {kind: sft, data: preb, heldout: prep.heldut}\n"
        + "  ppo: {kind: ppo, from: sft, reward: sft, prompts: prep}\n",
    )
    assert faults_of(file) == [
        "sft.data: there is no file 'preb' and no stage of that name (did you mean 'prep'?)",
        "sft.heldout: prep makes train, heldout, not 'heldut' (did you mean 'heldout'?)",
        "ppo.reward: needs reward_model, but sft.model is model",
    ]


def test_stages_that_wait_for_each_other_are_named(write: Write) -> None:
    file = write(
        "a.yaml", HEAD + "  a: {kind: sft, from: b, data: d.jsonl}\n  b: {kind: sft, from: a, data: d.jsonl}\n"
    )
    assert faults_of(file)[0].startswith("stages wait for each other: ")
