"""The form and its YAML: each changes the other, and what is wrong is said at its field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from studio_site import RECIPE, StudioSite

from kedge.core import plugins
from kedge.core.yaml.editing import tree_of_text
from kedge.recipe.templates import template_folder
from kedge.web.studio import drafts
from kedge.web.studio.drafts import Change, changed
from kedge.web.studio.fields import Field, Group, form_of

ALL_KINDS = f"""\
kedge: 1
name: all
model: tiny
stages:
{"".join(f"  {kind}: {{kind: {kind}}}{chr(10)}" for kind in plugins.names("stages"))}"""


def key(*path: str) -> str:
    return json.dumps(list(path))


def field_at(text: str, *path: str) -> Field:
    form = form_of(tree_of_text(text, Path("r.yaml")).values)
    return next(part for part in form.fields() if part.path == path)


def test_every_stage_kind_has_a_form_with_words() -> None:
    form = form_of(tree_of_text(ALL_KINDS, Path("r.yaml")).values)
    assert {group.kind for group in form.stages} == set(plugins.names("stages"))
    assert all(group.parts for group in form.stages)
    wordless = [part.path for part in form.parts() if not part.help and part.path[-1] != "kind"]
    assert wordless == []


def test_fields_have_types_defaults_and_bounds() -> None:
    batch = field_at(RECIPE, "stages", "sft", "batch")
    assert (batch.control, batch.value, batch.default, batch.bounds) == ("number", "4", "32", "at least 1")
    too_long = field_at(RECIPE, "stages", "sft", "too_long")
    assert (too_long.choices, too_long.value, too_long.default) == (("refuse", "drop", "cut"), "", "drop")
    assert field_at(RECIPE, "stages", "sft", "data").is_required
    assert field_at(RECIPE, "stages", "sft", "optimiser", "lr").default == "2e-05"


def test_the_default_is_the_one_of_the_stage() -> None:
    text = RECIPE + "  ppo: {kind: ppo, prompts: data/demos.jsonl, reward: sft}\n"
    assert field_at(text, "stages", "ppo", "actor", "lr").default == "1e-06"
    assert field_at(text, "stages", "ppo", "checkpoints", "every").default == "10"


def test_a_change_keeps_comments_and_everything_else() -> None:
    after = changed(RECIPE, Change(operation="set", path=("stages", "sft", "optimiser", "lr"), text="1e-3"))
    assert after == RECIPE.replace("batch: 4}", "batch: 4, optimiser: {lr: 0.001}}")
    assert changed(after, Change(operation="unset", path=("stages", "sft", "optimiser"))) == RECIPE


def test_an_empty_field_is_the_default_again() -> None:
    assert "batch" not in changed(RECIPE, Change(operation="set", path=("stages", "sft", "batch"), text=" "))


@pytest.mark.parametrize(
    ("path", "typed", "written"),
    [
        (("name",), "1.0", "name: '1.0'  # the run"),
        (("stages", "sft", "heldout"), "data/x.jsonl", "heldout: data/x.jsonl"),
        (("stages", "sft", "heldout"), '["a.jsonl", "b.jsonl"]', "heldout: [a.jsonl, b.jsonl]"),
        (("stages", "sft", "max_steps"), "null", "max_steps:"),
        (("stages", "sft", "micro_batch"), "auto", "micro_batch: auto"),
        (("stages", "sft", "lora", "rank"), "8", "lora: {rank: 8}"),
    ],
)
def test_what_is_typed_gets_its_type(path: Sequence[str], typed: str, written: str) -> None:
    assert written in changed(RECIPE, Change(operation="set", path=tuple(path), text=typed))


def test_a_list_may_be_words_between_commas() -> None:
    text = RECIPE + "  prepare: {kind: data, files: [data/demos.jsonl]}\n"
    path = ("stages", "prepare", "files")
    assert field_at(text, *path).value == "data/demos.jsonl"
    assert "files: [a.jsonl, b.jsonl]" in changed(text, Change(operation="set", path=path, text="a.jsonl, b.jsonl"))


def test_a_part_and_its_settings_are_chosen() -> None:
    text = RECIPE + "  ppo: {kind: ppo, prompts: data/demos.jsonl, reward: sft}\n"
    lag = changed(text, Change(operation="set", path=("stages", "ppo", "generator", "lag"), text="1"))
    assert "generator: {kind: local, lag: 1}" in lag
    judged = changed(text, Change(operation="kind", path=("stages", "ppo", "reward"), text="regex"))
    form = form_of(tree_of_text(judged, Path("r.yaml")).values)
    reward = next(part for part in form.parts() if part.path == ("stages", "ppo", "reward"))
    assert isinstance(reward, Group)
    assert reward.kind == "regex"
    assert any(part.path[-1] == "pattern" for part in reward.parts)


@pytest.mark.parametrize("name", ["loop", "rounds", "cai"])
def test_templates_survive_a_change(name: str) -> None:
    """Changed at its seed, nothing but that line of a recipe is another one."""
    file = template_folder() / f"{name}.yaml"
    text = file.read_text()
    after = changed(text, Change(operation="set", path=("seed",), text="12345"))
    assert tree_of_text(after, file).values == {**tree_of_text(text, file).values, "seed": 12345}
    assert after.count("#") == text.count("#")


BAD = (
    (("name",), "a b", "must match"),
    (("seed",), "-1", "at least 0"),
    (("seed",), "7.5", "whole number"),
    (("model",), "../up", "leads out of the project"),
    (("device",), "gpu", "must be 'auto', 'cpu' or 'cuda'"),
    (("stages", "sft", "batch"), "many", "whole number"),
    (("stages", "sft", "epochs"), "-2", "greater than 0"),
    (("stages", "sft", "too_long"), "shorten", "must be 'refuse', 'drop' or 'cut'"),
    (("stages", "sft", "data"), "data/none.jsonl", "there is no file"),
    (("stages", "sft", "data"), "stf", "there is no file 'stf' and no stage of that name"),
    (("stages", "sft", "optimiser", "lr"), "fast", "must be a number"),
    (("stages", "sft", "memory", "recompute"), "perhaps", "must be true or false"),
    (("stages", "sft", "lora", "targets"), "[1]", "must be text"),
    (("trackers",), "{tensorbord: {}}", "did you mean 'tensorboard'"),
)  # fmt: skip


@pytest.mark.parametrize(("path", "typed", "words"), BAD, ids=[f"{'.'.join(path)}={typed}" for path, typed, _ in BAD])
def test_bad_input_is_answered_at_its_field(site: StudioSite, path: Sequence[str], typed: str, words: str) -> None:
    text = RECIPE.replace("sft: {", "sft: {") + "  stf2: {kind: sft, data: data/demos.jsonl}\n"
    base = site.recipe(text)
    reply = site.change(base, "set", path, typed)
    texts = [line for at, lines in reply["problems"].items() for line in lines if at.startswith(key(*path)[:-1])]
    assert any(words in line for line in texts), reply["problems"]
    assert site.post("/run/start", {"file": "first.yaml", "base": reply["hash"]}).json()["problems"]
    assert site.commands == []


def test_what_yaml_cannot_hold_is_refused_at_its_field(site: StudioSite) -> None:
    base = site.recipe()
    reply = site.change(base, "set", ("stages", "sft", "batch"), "[1, 2")
    assert "cannot read the value" in reply["refused"][key("stages", "sft", "batch")][0]
    assert (site.folder / "first.yaml").read_text() == RECIPE


def test_an_unknown_key_is_told_at_its_section(site: StudioSite) -> None:
    base = site.recipe(RECIPE.replace("batch: 4", "bach: 4"))
    reply = site.post(
        "/recipe/text", {"file": "first.yaml", "base": base, "text": RECIPE.replace("batch", "bach")}
    ).json()
    assert "did you mean 'batch'" in reply["problems"][key("stages", "sft")][0]


def test_yaml_that_cannot_be_read_is_told_at_the_top_and_kept(site: StudioSite) -> None:
    base = site.recipe()
    reply = site.post("/recipe/text", {"file": "first.yaml", "base": base, "text": "a: [1\n"}).json()
    assert not reply["is_readable"]
    assert "line" in reply["top"][0]
    assert (site.folder / "first.yaml").read_text() == "a: [1\n"
    assert site.get("/recipe", file="first.yaml").status_code == 200


def test_yaml_changes_the_form(site: StudioSite) -> None:
    base = site.recipe()
    text = RECIPE.replace("batch: 4", "batch: 8, lora: {rank: 4}")
    reply = site.post("/recipe/text", {"file": "first.yaml", "base": base, "text": text}).json()
    assert reply["values"][key("stages", "sft", "batch")] == "8"
    assert reply["values"][key("stages", "sft", "lora", "rank")] == "4"
    assert 'data-path="[&#34;stages&#34;, &#34;sft&#34;, &#34;lora&#34;]"' in reply["html"]
    again = {"file": "first.yaml", "base": reply["hash"], "shape": reply["shape"], "text": text.replace("8", "9")}
    assert "html" not in site.post("/recipe/text", again).json()


def test_a_second_tab_overwrites_nothing(site: StudioSite) -> None:
    base = site.recipe()
    site.change(base, "set", ("seed",), "5")
    body = {"file": "first.yaml", "base": base, "operation": "set", "path": ["seed"], "text": "6"}
    late = site.post("/recipe/change", body)
    assert late.status_code == 409
    assert "another tab" in late.json()["error"]
    assert "seed: 5" in (site.folder / "first.yaml").read_text()


def test_two_tabs_at_the_same_moment_overwrite_nothing(site: StudioSite) -> None:
    """Both have read the recipe before either has saved it."""
    base = site.recipe()
    one, two = (drafts.read_draft(site.project, "first.yaml") for _ in range(2))
    drafts.save_text(one, RECIPE + "seed: 5\n", base=base)
    with pytest.raises(drafts.Outdated, match="another tab"):
        drafts.save_text(two, RECIPE + "seed: 6\n", base=base)
    assert "seed: 5" in (site.folder / "first.yaml").read_text()


def test_a_recipe_in_another_encoding_is_refused_and_kept(site: StudioSite) -> None:
    written = RECIPE.replace("the run", "Grüße").encode("latin-1")
    (site.folder / "first.yaml").write_bytes(written)
    shown = site.get("/recipe", file="first.yaml")
    assert (shown.status_code, "save it as UTF-8" in shown.json()["error"]) == (400, True)
    assert (site.folder / "first.yaml").read_bytes() == written


def test_findings_of_the_check_stand_at_their_fields(site: StudioSite) -> None:
    base = site.recipe(RECIPE + "  eval: {kind: evaluate, models: [sft], prompts: data/demos.jsonl}\n")
    finding = {"level": "fatal", "code": "x", "where": "", "fix": "", "evidence": {}}
    site.reports |= {
        "models": [{"name": "tiny", "is": "", "findings": [finding | {"message": "no such model"}]}],
        "stages": {
            "sft": {"kind": "sft", "lines": [], "findings": [
                finding | {"message": "nothing to evaluate", "where": "eval.patience"},
                finding | {"code": "y", "message": "3 lines are broken", "where": "data/demos.jsonl:3"},
            ]},
            "eval": {"kind": "evaluate", "lines": [], "findings": [
                finding | {"message": "no room", "fix": "allow shorter answers (max_new_tokens)", "where": "eval"},
            ]},
        },
        "findings": [finding | {"code": "device.missing", "message": "there is no GPU"}],
    }  # fmt: skip
    reply = site.post("/run/start", {"file": "first.yaml", "base": base}).json()
    assert reply["problems"] == {
        key("model"): ["no such model"],
        key("stages", "sft", "eval", "patience"): ["nothing to evaluate"],
        key("stages", "sft", "data"): ["3 lines are broken"],
        key("stages", "eval", "max_new_tokens"): ["no room (allow shorter answers (max_new_tokens))"],
        key("device"): ["there is no GPU"],
    }
    assert site.commands == []


def test_stages_come_and_go(site: StudioSite) -> None:
    base = site.recipe()
    reply = site.change(base, "add_stage", ("stages", "judge"), "evaluate")
    assert "is required and missing" in str(reply["problems"])
    refused = site.change(reply["hash"], "add_stage", ("stages", "judge"), "evaluate")["refused"]
    assert "already" in str(refused)
    gone = site.change(reply["hash"], "remove_stage", ("stages", "judge"))
    assert gone["text"] == RECIPE


def test_a_recipe_comes_from_a_template_with_its_data(site: StudioSite) -> None:
    reply = site.post("/new", {"template": "tiny", "name": "mine", "model": "tiny"}).json()
    assert reply == {"go": "/recipe?file=mine.yaml"}
    assert "name: mine" in (site.folder / "mine.yaml").read_text()
    assert (site.folder / "data" / "pairs.jsonl").is_file()
    assert "there is a recipe" in site.post("/new", {"template": "tiny", "name": "mine"}).json()["problems"]["name"]


def test_a_template_gets_by_a_file_of_the_same_name(site: StudioSite) -> None:
    """Who has uploaded pairs.jsonl of their own can start from a template, and keeps them."""
    own, shipped = site.folder / "data" / "pairs.jsonl", site.folder / "data" / "tiny-pairs.jsonl"
    own.write_text("mine\n")
    assert site.post("/new", {"template": "tiny", "name": "other"}).json() == {"go": "/recipe?file=other.yaml"}
    assert own.read_text() == "mine\n"
    assert len(shipped.read_text().splitlines()) == 600
    assert "data/tiny-pairs.jsonl" in (text := (site.folder / "other.yaml").read_text())
    assert "data/pairs.jsonl" not in text
    shipped.write_text("mine, too\n")
    clash = site.post("/new", {"template": "tiny", "name": "third"})
    assert (clash.status_code, "rename one first" in clash.json()["error"]) == (400, True)
    assert not (site.folder / "third.yaml").exists()


def test_a_function_of_a_shipped_file_that_got_another_name_is_found_there(site: StudioSite) -> None:
    (site.folder / "data" / "help_desk.py").write_text("mine = 1\n")
    assert "go" in site.post("/new", {"template": "loop", "name": "other"}).json()
    text = (site.folder / "other.yaml").read_text()
    assert text.count("data/loop-help_desk.py:truth") == 2
