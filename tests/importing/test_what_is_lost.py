"""`kedge import`: what would be dropped, or computed wrongly, if nobody looked; each case is a few lines."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kedge.commands.importing.write import ImportedRecipe, import_recipe
from kedge.core.errors import ConfigError
from kedge.importing.rules import Asked

TRL = "model_name_or_path: tiny\ndataset_name: a.jsonl\n"
PPO = f"{TRL}reward_model_path: rm\nkl_coef: 0.1\n"
AXOLOTL = "base_model: tiny\nlearning_rate: 1e-5\ndatasets:\n  - path: a.jsonl\n"
OPENRLHF = "python -m openrlhf.cli.train_{} --pretrain tiny "
GROUP = OPENRLHF.format("ppo_ray") + "--prompt_data a.jsonl --reward_pretrain rm --n_samples_per_prompt 4 "


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    tool: str
    text: str
    stage: dict[str, Any] = field(default_factory=dict[str, Any])
    """Settings of the stage, by path."""
    rows: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Verdicts of fields, and a part of their reasons."""
    processes: int | None = None


CASES = (
    Case(
        name="the weight of a loss counts against that of the likelihood",
        tool="trl",
        text=f"{TRL}precompute_ref_log_probs: true\nloss_type: [sigmoid, sft]\nloss_weights: [0.8, 1.0]\n",
        stage={"method.loss": "sigmoid", "method.sft_weight": 1.25},
        rows={"loss_type": ("changed", "divided by the loss's own weight 0.8")},
    ),
    Case(
        name="a batch of PPO has all minibatches",
        tool="trl",
        text=f"{PPO}per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\nnum_mini_batches: 3\n"
        "total_episodes: 480\n",
        processes=2,
        stage={"batch": 48, "minibatches": 3, "iterations": 10},
    ),
    Case(
        name="the policy of PPO has a field of its own, wherever it stands",
        tool="trl",
        text=f"sft_model_path: mine\n{PPO}",
        rows={"model_name_or_path": ("not needed", "sft_model_path"), "sft_model_path": ("taken", "")},
    ),
    Case(
        name="vLLM over several GPUs",
        tool="trl",
        text=f"{TRL}reward_funcs: [r.brief]\nnum_generations: 4\nuse_vllm: true\nvllm_tensor_parallel_size: 2\n",
        stage={"generator.tensor_parallel": 2},
    ),
    Case(
        name="steps of warm-up go before a share",
        tool="trl",
        text=f"{TRL}packing: false\nmax_steps: 100\nwarmup_steps: 10\nwarmup_ratio: 0.5\n",
        stage={"optimiser.warmup": 0.1},
        rows={"warmup_ratio": ("not needed", "warmup_steps")},
    ),
    Case(
        name="two fields that say otherwise of one setting",
        tool="axolotl",
        text=f"{AXOLOTL}rl: dpo\nrl_beta: 0.3\ntrl: {{beta: 0.2}}\n",
        stage={"method.beta": 0.2},
        rows={"rl_beta": ("refused", "`trl.beta` says otherwise"), "trl.beta": ("taken", "")},
    ),
    Case(
        name="columns of pairs",
        tool="axolotl",
        text=f"{AXOLOTL}    field_chosen: good\n    field_rejected: bad\nrl: dpo\n",
        stage={"data.columns": {"chosen": "good", "rejected": "bad"}},
    ),
    Case(
        name="names inside of messages",
        tool="axolotl",
        text=f"{AXOLOTL}    message_property_mappings: {{role: who, content: content}}\n"
        "    roles: {assistant: [gpt, tutor]}\n",
        rows={
            "datasets[0].message_property_mappings": ("refused", "rename who"),
            "datasets[0].roles": ("refused", "rename tutor"),
        },
    ),
    Case(
        name="the centre of a reward model",
        tool="axolotl",
        text=f"{AXOLOTL}reward_model: true\ncenter_rewards_coefficient: 0.01\n",
        stage={"loss.centre": 0.01},
    ),
    Case(
        name="moments on the host",
        tool="axolotl",
        text=f"{AXOLOTL}deepspeed: zero2_offload_optimizer.json\n",
        rows={"deepspeed": ("changed", "`memory: {offload: [optimiser]}`")},
    ),
    Case(
        name="a clip above that a method has not",
        tool="openrlhf",
        text=f"{GROUP}--advantage_estimator reinforce --eps_clip_low_high 0.2 0.3",
        stage={"method.clip": 0.2},
        rows={"eps_clip_low_high": ("changed", "the clip above, 0.3, is not there")},
    ),
    Case(
        name="weights of KTO",
        tool="openrlhf",
        text=OPENRLHF.format("kto") + "--dataset a.jsonl --desirable_loss_weight 1.2 --undesirable_loss_weight 0.8",
        stage={"method.desirable_weight": 1.2, "method.undesirable_weight": 0.8},
    ),
    Case(
        name="a text in the quotes of bash",
        tool="openrlhf",
        text=OPENRLHF.format("sft") + "--dataset a.jsonl --input_template $'User: {}\\nIt\\'s: ' \\\n  --max_len 64",
        stage={"max_length": 64},
        rows={"input_template": ("refused", "chat template")},
    ),
)


def imported(case: Case, folder: Path) -> ImportedRecipe:
    config = folder / ("run.sh" if case.tool == "openrlhf" else "config.yaml")
    config.write_text(case.text)
    asked = Asked(processes=case.processes)
    return import_recipe(case.tool, config, folder / "recipe.yaml", asked)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing_is_lost(case: Case, tmp_path: Path) -> None:
    done = imported(case, tmp_path)
    (stage,) = done.recipe["stages"].values()
    for path, value in case.stage.items():
        found: Any = stage
        for key in path.split("."):
            found = found[key]
        assert found == value, path
    by_field = {row.field: row for row in done.rows}
    for name, (verdict, words) in case.rows.items():
        assert by_field[name].verdict == verdict, name
        assert words in by_field[name].why
    if "sft_model_path" in by_field:
        assert done.recipe["model"] == "mine"


LISTED = {
    "talks": {
        "file_name": "talks.jsonl",
        "formatting": "sharegpt",
        "num_samples": 50,
        "columns": {"messages": "talk"},
        "tags": {"role_tag": "who", "content_tag": "content"},
    },
    "asked": {"file_name": "asked.jsonl", "columns": {"prompt": "q", "query": "about", "response": "a"}},
}


def llama_factory(folder: Path, text: str) -> ImportedRecipe:
    (folder / "dataset_info.json").write_text(json.dumps(LISTED))
    (folder / "config.yaml").write_text(f"model_name_or_path: tiny\n{text}")
    return import_recipe("llama-factory", folder / "config.yaml", folder / "recipe.yaml", Asked())


def test_what_the_list_of_datasets_says_is_taken_or_told(tmp_path: Path) -> None:
    done = llama_factory(tmp_path, "stage: sft\ndataset: talks,asked\nmax_samples: 100\n")
    talks, asked = done.recipe["stages"]["sft"]["data"]
    assert (talks["limit"], asked["limit"]) == (50, 100)
    why = next(row.why for row in done.rows if row.field == "dataset")
    assert "of talks left out: tags.role_tag (" in why
    assert "of asked left out: columns.query (" in why


def test_shares_of_datasets_are_as_many_as_datasets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"2 datasets have 1 shares \(interleave_probs\)"):
        llama_factory(tmp_path, "stage: sft\ndataset: talks,asked\ninterleave_probs: '0.3'\n")


def test_orpo_has_its_likelihood_besides(tmp_path: Path) -> None:
    done = llama_factory(tmp_path, "stage: dpo\npref_loss: orpo\npref_ftx: 0.5\ndataset: asked\n")
    assert done.recipe["stages"]["orpo"]["method"]["sft_weight"] == 1.5


def test_losses_have_as_many_weights(tmp_path: Path) -> None:
    (tmp_path / "dpo.yaml").write_text(f"{TRL}loss_type: [sigmoid, sft]\nloss_weights: [0.8]\n")
    with pytest.raises(ConfigError, match="2 losses have 1 weights"):
        import_recipe("trl", tmp_path / "dpo.yaml", tmp_path / "recipe.yaml", Asked(trainer="dpo"))


def test_prompts_are_counted_up_to_their_limit(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n" * 100)
    sizes = "--rollout_batch_size 8 --train_batch_size 8 --num_episodes 2 --max_samples 16"
    done = imported(Case(name="", tool="openrlhf", text=f"{GROUP}{sizes}"), tmp_path)
    assert done.recipe["stages"]["ppo"]["iterations"] == 4


def test_options_may_stand_in_arrays(tmp_path: Path) -> None:
    """As the scripts that OpenRLHF ships write them."""
    script = tmp_path / "train.sh"
    script.write_text(
        'HOME_OF_ALL="out"\nSAVE="${HOME_OF_ALL}/mine"\n'
        "MODEL_ARGS=(\n  --pretrain tiny  # --ref_pretrain other)\n  #don't: --reward_pretrain ${RM}\n"
        '  --save_path "${SAVE}"\n)\n'
        "SIZES=(--train_batch_size 8 --max_epochs 2)\nSIZES+=(--param_dtype bf16\n  --max_samples 16)\n"
        "NOTES=('of several\nlines')\n"
        'torchrun -m openrlhf.cli.train_sft ${MODEL_ARGS[@]} "${SIZES[@]}" --dataset a.jsonl\n'
    )
    done = import_recipe("openrlhf", script, tmp_path / "recipe.yaml", Asked())
    stage = done.recipe["stages"]["sft"]
    assert (done.recipe["model"], done.recipe["name"], stage["batch"], stage["epochs"]) == ("tiny", "mine", 8, 2)
    lines = {row.field: row.line for row in done.rows}
    assert (lines["pretrain"], lines["max_epochs"], lines["max_samples"], lines["dataset"]) == (4, 8, 10, 13)


def test_an_array_that_is_not_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(f"{OPENRLHF.format('sft')} ${{ARGS[@]}}\n")
    with pytest.raises(ConfigError, match="known to a shell alone"):
        import_recipe("openrlhf", tmp_path / "train.sh", tmp_path / "recipe.yaml", Asked())


def test_data_that_nobody_knows_are_told_by_their_name(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model_name_or_path: tiny\nstage: kto\ndataset: kto_en_demo\n")
    with pytest.raises(ConfigError, match=r"line 3: dataset: kto_en_demo: no dataset_info.json .* give --data"):
        import_recipe("llama-factory", tmp_path / "config.yaml", tmp_path / "recipe.yaml", Asked())


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ("use_galore: true\ngalore_layerwise: true\ngalore_target: all\ngalore_rank: 128", ["use_galore"]),
        ("use_apollo: true\napollo_rank: 256\napollo_scale_type: tensor", ["use_apollo"]),
        ("use_badam: true\nbadam_mode: layer\nbadam_switch_interval: 50", ["use_badam"]),
        ("fp8: true\nfp8_backend: torchao", ["fp8", "fp8_backend"]),
        ("use_eaft_loss: true\neaft_alpha: 1.0", ["use_eaft_loss"]),
    ],
)
def test_other_ways_to_learn_are_refused_and_not_unknown(fields: str, refused: list[str], tmp_path: Path) -> None:
    done = llama_factory(tmp_path, f"stage: sft\nfinetuning_type: full\ndataset: asked\n{fields}\n")
    named = [line.partition(":")[0] for line in fields.splitlines()]
    assert [row.field for row in done.rows if row.field in named and row.verdict == "refused"] == refused


@pytest.mark.parametrize(
    ("tool", "text", "of_the_data"),
    [
        ("llama-factory", "model_name_or_path: tiny\nstage: sft\ndataset: x\nmax_samples: 9\n", "max_samples"),
        ("openrlhf", f"{GROUP}--rollout_batch_size 8 --train_batch_size 8 --max_samples 16", "max_samples"),
        ("openrlhf", f"{OPENRLHF.format('sft')}--dataset x.jsonl --input_key q", "input_key"),
        ("axolotl", f"{AXOLOTL}    split: test\n", "datasets[0].split"),
        ("axolotl", f"{AXOLOTL}    field_messages: talk\n", "datasets[0].field_messages"),
    ],
)
def test_what_is_said_of_data_goes_with_them(tool: str, text: str, of_the_data: str, tmp_path: Path) -> None:
    """With --data the recipe has none of it, and the table said "a part of `data`"."""
    (tmp_path / "b.jsonl").write_text("{}\n" * 100)
    config = tmp_path / ("train.sh" if tool == "openrlhf" else "config.yaml")
    config.write_text(text)
    done = import_recipe(tool, config, tmp_path / "recipe.yaml", Asked(data="b.jsonl"))
    row = next(row for row in done.rows if row.field == of_the_data)
    assert (row.verdict, "--data stands in the place" in row.why) == ("refused", True)
    (stage,) = done.recipe["stages"].values()
    assert stage.get("prompts", stage.get("data")) == "b.jsonl"
    if "prompts" in stage:
        assert stage["iterations"] == 13  # a pass over the 100 rows of that file, and not over 16
