"""`kedge import`: three configurations of each tool, field by field; and what is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from tests.importing.cases import CASES, STRANGE, TRAINERS, Case, attempt, least
from tests.importing.expected import EXPECTED
from typer.testing import CliRunner

from kedge.cli.main import app
from kedge.commands.importing.write import TOOLS, ImportedRecipe, import_recipe, write_recipe
from kedge.core.errors import ConfigError
from kedge.core.yaml.source import read_tree
from kedge.importing import axolotl, llama_factory, openrlhf, trl
from kedge.importing.rules import Asked
from kedge.recipe.schema import load_recipe

CONFIGS = Path(__file__).parent / "configs"
OPEN = ("datasets", "test_datasets", "trl", "vllm")
NAMES = sorted(EXPECTED)
VERDICTS = ("taken", "changed", "not needed", "refused")
SECRETS = ("hf_abcdefghijklmnop", "hf_thisisnotarealtoken", "0123456789abcdef0123456789abcdef01234567")


def tool_of(name: str) -> str:
    return name.rsplit("-", 1)[0]


def imported_into(folder: Path, name: str, **asked: Any) -> ImportedRecipe:
    """A configuration of ours, written as a recipe."""
    imported = import_recipe(tool_of(name), CONFIGS / name, folder / "recipe.yaml", Asked(**asked))
    write_recipe(imported)
    return imported


def fields_of(name: str) -> list[str]:
    """Every field of a configuration, read by this test's own eyes."""
    if name.endswith(".sh"):
        command = (CONFIGS / name).read_text().partition("openrlhf.cli")[2].partition("EOF")[0]
        return ["(launcher)", *(word[2:].partition("=")[0] for word in command.split() if word.startswith("--"))]
    fields: list[str] = []
    for key, value in read_tree(CONFIGS / name).values.items():
        if key in OPEN and isinstance(value, list):
            parts = enumerate(cast("list[dict[str, Any]]", value))
            fields += [f"{key}[{at}].{inner}" for at, part in parts for inner in part]
        elif key in OPEN:
            fields += [f"{key}.{inner}" for inner in value]
        else:
            fields.append(key)
    return fields


@pytest.mark.parametrize("name", NAMES)
def test_every_field_has_one_verdict_and_the_recipe_is_sound(name: str, tmp_path: Path) -> None:
    imported = imported_into(tmp_path, name)
    written = [row.field for row in imported.rows if not row.is_default]
    assert sorted(written) == sorted(fields_of(name))
    assert all(row.why or row.becomes for row in imported.rows)
    verdicts = {row.field: row.verdict for row in imported.rows if not row.is_default}
    expected = {field: verdict for verdict in VERDICTS for field in EXPECTED[name].get(verdict, "").split()}
    assert verdicts == expected
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert recipe.tree.values == imported.recipe
    stage = next(iter(imported.recipe["stages"].values()))
    for path, value in EXPECTED[name]["stage"].items():
        found: Any = stage
        for key in path.split("."):
            found = found[key]
        assert found == value, path


@pytest.mark.parametrize("name", NAMES)
def test_no_secret_is_copied(name: str, tmp_path: Path) -> None:
    imported = imported_into(tmp_path, name)
    text = (tmp_path / "recipe.yaml").read_text() + (tmp_path / "recipe.import.md").read_text()
    assert not [secret for secret in SECRETS if secret in text + json.dumps(imported.as_dict())]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_cannot_be_read_is_refused_in_words(case: Case) -> None:
    assert attempt(case) is None


def test_fields_that_nobody_knows_may_be_left_out(tmp_path: Path) -> None:
    config = tmp_path / "sft.yaml"
    config.write_text("model_name_or_path: tiny\ndataset_name: a.jsonl\nlearning_rat: 1\nmy_api_key: abc\n")
    imported = import_recipe("trl", config, tmp_path / "recipe.yaml", Asked(), skip_unknown=True)
    unknown = {row.field: row.value for row in imported.rows if row.verdict == "unknown"}
    assert unknown == {"learning_rat": "1", "my_api_key": "(hidden)"}


def test_the_command_writes_both_files_and_overwrites_nothing(tmp_path: Path) -> None:
    to = tmp_path / "new" / "mine.yaml"
    words = ["import", "trl", str(CONFIGS / "trl-sft.yaml"), "--to", str(to), "--model", "tiny", "--json"]
    answered = CliRunner().invoke(app, words)
    assert answered.exit_code == 0, answered.output
    told = json.loads(answered.stdout)
    assert told["recipe"]["model"] == "tiny"
    assert load_recipe(to).settings.model == "tiny"
    page = to.with_suffix(".import.md").read_text()
    assert all(f"| `{row['field']}` |" in page for row in told["fields"])
    again = CliRunner().invoke(app, words)
    assert isinstance(again.exception, ConfigError)
    assert "already there" in str(again.exception)


def test_the_command_prints_the_table(tmp_path: Path) -> None:
    words = ["import", "axolotl", str(CONFIGS / "axolotl-dpo.yaml"), "--to", str(tmp_path / "r.yaml")]
    answered = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert answered.exit_code == 0, answered.output
    assert "rl_beta" in answered.stdout
    assert "by its default" in answered.stdout
    assert "kedge check" in answered.stdout


def test_an_unknown_tool_is_told_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'axolotl'"):
        import_recipe("axolot", tmp_path / "x", tmp_path / "r.yaml", Asked())


@pytest.mark.parametrize("tool", [trl, openrlhf, llama_factory, axolotl])
def test_every_default_has_a_rule(tool: Any) -> None:
    """A default without a rule would be left out in silence."""
    for name in (file for file in NAMES if tool_of(file).replace("-", "_") == tool.__name__.rsplit(".", 1)[1]):
        source = tool.source_of(CONFIGS / name, Asked(), Path())
        assert not [field for field in source.defaults if field not in tool.TABLE]


def test_processes_make_the_batch(tmp_path: Path) -> None:
    alone = imported_into(tmp_path / "a", "llama-factory-sft.yaml").recipe
    four = imported_into(tmp_path / "b", "llama-factory-sft.yaml", processes=4).recipe
    assert alone["stages"]["sft"]["batch"] * 4 == four["stages"]["sft"]["batch"]
    assert four["placement"] == {"processes": 4}


def test_weights_in_parts_stay_in_parts(tmp_path: Path) -> None:
    parts = {"processes": "auto", "weights": "shard"}
    assert imported_into(tmp_path / "a", "openrlhf-ppo.sh").recipe["placement"] == parts  # ZeRO-3
    assert imported_into(tmp_path / "b", "axolotl-grpo.yaml").recipe["placement"] == parts  # FSDP
    assert imported_into(tmp_path / "c", "openrlhf-dpo.sh").recipe["placement"] == {"processes": "auto"}  # ZeRO-2


PPO_RAY = "python -m openrlhf.cli.train_ppo_ray --pretrain a/b --prompt_data p.jsonl --reward_pretrain c/d "


@pytest.mark.parametrize(
    ("command", "moved"),
    [
        (f"{PPO_RAY} --adam_offload", ["optimiser"]),
        (f"{PPO_RAY} --adam_offload --ref_reward_offload", ["optimiser", "reference", "reward"]),
        (f"{PPO_RAY} --ref_offload", ["reference"]),
        (f"{PPO_RAY} --ref_offload --lora_rank 8", None),  # it shares the policy's weights
        (
            f"{PPO_RAY.replace('--reward_pretrain c/d', '--remote_rm_url http://x/y')} --ref_reward_offload",
            ["reference"],
        ),
        (f"{PPO_RAY} --adam_offload --zero_stage 3", None),  # weights in parts are not moved
        ("python -m openrlhf.cli.train_sft --pretrain a/b --dataset d.jsonl --adam_offload", ["optimiser"]),
    ],
)
def test_what_openrlhf_keeps_on_the_host_is_kept_there(command: str, moved: list[str] | None, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(command)
    imported = import_recipe("openrlhf", tmp_path / "run.sh", tmp_path / "recipe.yaml", Asked())
    write_recipe(imported)
    assert load_recipe(tmp_path / "recipe.yaml").tree.values == imported.recipe
    (stage,) = imported.recipe["stages"].values()
    assert stage.get("memory", {}).get("offload") == moved
    verdicts = {row.verdict for row in imported.rows if row.field.endswith("offload")}
    assert verdicts == {"taken" if moved else "not needed"}


def test_files_are_named_from_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "sft.yaml").write_text("model_name_or_path: tiny\ndataset_name: rows.jsonl\npacking: false\n")
    (tmp_path / "there" / "rows.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    imported = import_recipe("trl", Path("there/sft.yaml"), Path("here/recipe.yaml"), Asked())
    assert imported.recipe["stages"]["sft"]["data"] == "../there/rows.jsonl"


ALL = [(tool, trainer) for tool, trainers in TRAINERS.items() for trainer in trainers]


@pytest.mark.parametrize(("tool", "trainer"), ALL)
def test_every_trainer_makes_a_sound_recipe(tool: str, trainer: str, tmp_path: Path) -> None:
    asked = Asked(trainer=trainer) if tool == "trl" else Asked()
    imported = import_recipe(tool, least(tool, trainer, tmp_path), tmp_path / "recipe.yaml", asked)
    write_recipe(imported)
    assert load_recipe(tmp_path / "recipe.yaml").tree.values == imported.recipe


@pytest.mark.slow
@pytest.mark.parametrize(("tool", "trainer"), ALL)
def test_strange_values_are_taken_or_refused_in_words(tool: str, trainer: str, tmp_path: Path) -> None:
    """Whatever stands in a field, there is a recipe that passes the schema, or an error of ours."""
    asked = Asked(trainer=trainer) if tool == "trl" else Asked()
    shift = ALL.index((tool, trainer))
    plain = [name for name in TOOLS[tool].TABLE if "[]" not in name and "." not in name and name != "(launcher)"]
    for index, name in enumerate(plain):
        value = STRANGE[(index + shift) % len(STRANGE)]
        if tool == "openrlhf" and not isinstance(value, str):
            value = str(value)
        with suppress(ConfigError):
            import_recipe(tool, least(tool, trainer, tmp_path, {name: value}), tmp_path / "recipe.yaml", asked)


RUNS = ("trl-sft.yaml", "openrlhf-ppo.sh", "llama-factory-sft.yaml", "axolotl-dpo.yaml")
"""Two steps each, of a model with random weights."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_an_imported_recipe_runs(name: str, tmp_path: Path) -> None:
    import kedge

    imported = imported_into(tmp_path, name, model="tiny")
    (stage,) = imported.recipe["stages"]
    overrides = ["device=cpu", f"stages.{stage}.memory.recompute=false", "trackers={}"]
    if stage == "ppo":
        (tmp_path / "rules.py").write_text("def short(answer):\n    return 1 - len(answer.text) / 100\n")
        overrides += ['stages.ppo.reward={kind: function, path: "rules.py:short"}']
    run = kedge.Recipe.load(tmp_path / "recipe.yaml", sets=overrides).run(tmp_path / "run", say=None)
    assert len([step for step in run.metrics() if step["step"] > 0]) >= 2
