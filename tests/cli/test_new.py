"""`kedge new` and the recipes that we ship: they are listed, written whole, and pass the check."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.data.reading import load, prompt_key
from kedge.recipe.templates import START, free_folder, template_folder

Kedge = Callable[..., Any]


YOURS = ("cai", "hh", "reward-alpacaeval", "reward-finegrained", "reward-hh", "reward-polite", "rlaif")
"""Recipes whose data, or whose judge, people bring themselves."""
SHIPPED = [path.stem for path in sorted(template_folder().glob("*.yaml")) if path.stem not in YOURS]


def test_the_list_has_every_recipe_with_its_summary_and_begins_with_where_to_start(kedge: Kedge) -> None:
    done = kedge("new")
    assert done.code == 0
    listed = {line.split()[0]: line for line in done.out.splitlines()[1:] if line[:1].isalpha()}
    assert list(listed)[: len(START)] == list(START) == ["tiny", "loop", "gpu", "hh", "real-demo"]
    assert set(listed) >= {path.stem for path in template_folder().glob("*.yaml")}
    assert "Laptop, a minute" in listed["tiny"]


@pytest.mark.parametrize("name", ["tiny", "loop"])
def test_what_is_written_is_fit_to_run(kedge: Kedge, tmp_path: Path, name: str) -> None:
    done = kedge("new", name, "--to", "mine")
    assert done.code == 0
    assert done.out.splitlines()[0] == f"wrote mine/{name}.yaml"
    assert done.out.splitlines()[-1] == f"next: kedge check mine/{name}.yaml"
    checked = kedge("check", f"mine/{name}.yaml", "--json")
    (report,) = json.loads(checked.out)
    assert [one["message"] for one in report["findings"] if one["level"] in ("warning", "fatal")] == []
    assert (checked.code, report["is_fit"]) == (0, True)


@pytest.mark.slow
def test_every_recipe_with_shipped_data_passes_the_check(kedge: Kedge) -> None:
    """On the built-in model, for the weights of the real one may be missing."""
    recipes = [str(template_folder() / f"{name}.yaml") for name in SHIPPED]
    done = kedge("check", *recipes, "--set", "model=tiny", "--json")
    fatal = [
        finding["message"]
        for report in json.loads(done.out)
        for finding in report["findings"]
        # The built-in model has a token a byte, by which the prompts of a real one are long.
        if finding["level"] == "fatal" and (report["name"], finding["code"]) != ("real-demo", "prompts.too_long")
    ]
    assert fatal == []


def test_data_that_people_bring_themselves_is_asked_for_by_its_name(kedge: Kedge) -> None:
    kedge("new", "hh")
    done = kedge("check", "hh.yaml", "--set", "model=tiny")
    assert done.code == 2
    for file in ("hh.demonstrations.jsonl", "hh.train.jsonl", "hh.heldout.jsonl"):
        assert f"data/{file}: there is no folder 'data'" in " ".join(done.out.split())


def test_nothing_is_overwritten(kedge: Kedge, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/pairs.jsonl").write_text("mine\n")
    done = kedge("new", "tiny")
    assert (done.code, done.out) == (2, "")
    assert done.err == ("error: data/pairs.jsonl: already there, and nothing is overwritten; use --to another folder\n")
    assert (tmp_path / "data/pairs.jsonl").read_text() == "mine\n"
    assert not (tmp_path / "tiny.yaml").exists()


def test_an_unknown_template_names_the_nearest(kedge: Kedge) -> None:
    done = kedge("new", "tinny")
    assert done.code == 2
    assert done.err.startswith("error: no template named 'tinny' (did you mean 'tiny'?); there are: tiny, loop, ")


def test_the_shipped_files_are_small_and_held_out_prompts_are_nowhere_else() -> None:
    folder = template_folder() / "data"
    keys = {path.stem: {prompt_key(one) for one in load(path)} for path in folder.glob("*.jsonl")}
    assert set(keys) == {"demonstrations", "pairs", "prompts", "heldout-prompts"}
    assert all(path.stat().st_size < 150_000 for path in folder.iterdir())
    others = set[int]().union(*(keys[name] for name in keys if name != "heldout-prompts"))
    assert len(keys["heldout-prompts"]) == 400
    assert not keys["heldout-prompts"] & others


def test_a_folder_in_use_is_numbered(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").mkdir()
    assert free_folder(tmp_path / "demo") == tmp_path / "demo-3"
    assert free_folder(tmp_path / "new") == tmp_path / "new"
