"""Configurations that must not be misread: each is a file of some tool, and what its refusal has to say."""

from __future__ import annotations

import json
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kedge.commands.importing.write import import_recipe
from kedge.core.errors import ConfigError
from kedge.importing.rules import Asked

SFT: Final = "model_name_or_path: tiny\ndataset_name: a.jsonl\npacking: false\n"
RUN: Final = "python -m openrlhf.cli.train_sft --pretrain tiny --dataset a.jsonl "


@dataclass(frozen=True)
class Case:
    name: str
    tool: str
    text: str | bytes
    says: tuple[str, ...]


CASES: Final = (
    Case("unknown field", "trl", f"{SFT}learning_rat: 1e-5\n", ("line 4: learning_rat", "'learning_rate'")),
    Case("unknown option", "openrlhf", f"{RUN}--learning_rat 1\n", ("learning_rat", "'learning_rate'")),
    Case("not a number", "trl", f"{SFT}learning_rate: fast\n", ("line 4: learning_rate", "'fast'")),
    Case("not finite", "trl", f"{SFT}learning_rate: .nan\n", ("line 4: learning_rate", "must be a number")),
    Case("out of range", "axolotl", "base_model: t\ndatasets: [{path: a}]\nlearning_rate: -1\n",
         ("optimiser.lr", "-1", "learning_rate (line 3)")),
    Case("a tag", "axolotl", "base_model: !!python/object/apply:os.system [ls]\n", ("line 1", "tag")),
    Case("a bomb", "trl", "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcde", "bcdef", strict=True)),
         ("20,000 values",)),
    Case("huge", "llama-factory", b"a: " + b"x" * 2**21, ("larger than 1 MiB",)),
    Case("a huge script", "openrlhf", b"x" * 2**21, ("larger than 1 MiB",)),
    Case("no text", "openrlhf", b"\xff\xfe\x00", ("not UTF-8",)),
    Case("a list", "llama-factory", "- a\n- b\n", ("a list",)),
    Case("empty", "axolotl", "", ("empty",)),
    Case("doubled key", "trl", f"{SFT}packing: true\n", ("line 4", "duplicate key")),
    Case("doubled option", "openrlhf", f"{RUN}--seed 1 --seed 2\n", ("--seed stands twice",)),
    Case("a substitution", "openrlhf", f"{RUN}--seed $(touch ran)\n", ("is known to a shell alone",)),
    Case("a variable", "openrlhf", f"{RUN}--seed $SEED\n", ("--seed", "is known to a shell alone")),
    Case("a batch of none", "openrlhf", RUN.replace("sft", "ppo_ray") + "--train_batch_size 0\n",
         ("train_batch_size", "'0'")),
    Case("an open quote", "openrlhf", f"{RUN}--save_path 'x\n", ("quotation mark",)),
    Case("no command", "openrlhf", "echo hello\n", ("found 0",)),
    Case("two commands", "openrlhf", RUN + "\n" + RUN, ("found 2",)),
    Case("a commented command", "openrlhf", f"# {RUN}\n", ("found 0",)),
    Case("no trainer", "trl", "model_name_or_path: tiny\ndataset_name: a.jsonl\n", ("--trainer",)),
    Case("no model, no data", "trl", "packing: true\n", ("--model", "--data")),
    Case("no list of datasets", "llama-factory", "model_name_or_path: t\ndataset: ours\n", ("--data",)),
    Case("no such stage", "llama-factory", "stage: sfft\n", ("'sfft'", "'sft'")),
    Case("no such method", "axolotl", "rl: dppo\n", ("'dppo'", "'dpo'")),
    Case("no such loss", "trl", f"{SFT.replace('packing: false', 'rpo_alpha: 1')}loss_type: bco_pair\n",
         ("line 4: loss_type", "bco_pair")),
    Case("completions that do not divide", "trl",
         "model_name_or_path: t\ndataset_name: a.jsonl\nnum_generations: 3\nscale_rewards: true\n",
         ("not divisible by 3",)),
)  # fmt: skip


TRAINERS: Final = {
    "trl": {
        "sft": {}, "reward": {}, "dpo": {}, "kto": {}, "orpo": {}, "cpo": {},
        "grpo": {"reward_funcs": ["rewards.brief"]}, "rloo": {"reward_funcs": ["rewards.brief"]},
        "ppo": {"reward_model_path": "rm"},
    },
    "openrlhf": {
        "sft": {}, "rm": {}, "dpo": {}, "kto": {}, "ppo": {"reward_pretrain": "rm"},
        **{f"ppo {name}": {"reward_pretrain": "rm", "advantage_estimator": name, "n_samples_per_prompt": 4}
           for name in ("reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo")},
    },
    "llama-factory": {"pt": {}, "sft": {}, "rm": {}, "dpo": {}, "kto": {}, "ppo": {"reward_model": "rm"}},
    "axolotl": {
        "sft": {}, "reward": {"reward_model": True},
        "grpo": {"rl": "grpo", "micro_batch_size": 8, "trl": {"reward_funcs": ["rewards.brief"]}},
        **{name: {"rl": name} for name in ("dpo", "ipo", "kto", "orpo", "simpo")},
    },
}  # fmt: skip
"""Every trainer of every tool, and what its configuration needs besides a model and data."""
STRANGE: Final = (
    "x",
    "",
    -1,
    0,
    1.5,
    10**30,
    True,
    False,
    None,
    [],
    {},
    [1, "a"],
    [[1]],
    {"a": 1},
    "1,2",
    "[",
    "é\x00",
)


def least(tool: str, trainer: str, folder: Path, extra: dict[str, Any] | None = None) -> Path:
    """The least configuration of a trainer, as a file."""
    fields = {**TRAINERS[tool][trainer], **(extra or {})}
    if tool == "openrlhf":
        data = "prompt_data" if trainer.startswith("ppo") else "dataset"
        fields = {"pretrain": "tiny", data: "a.jsonl", **fields}
        words = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in fields.items())
        module = trainer.split()[0].replace("ppo", "ppo_ray")
        file, text = folder / "run.sh", f"python -m openrlhf.cli.train_{module} {words}\n"
    else:
        named = {
            "trl": {"model_name_or_path": "tiny", "dataset_name": "a.jsonl"},
            "llama-factory": {"model_name_or_path": "tiny", "dataset": "ours", "stage": trainer},
            "axolotl": {"base_model": "tiny", "datasets": [{"path": "a.jsonl"}], "learning_rate": 1e-5},
        }[tool]
        file, text = folder / "config.json", json.dumps({**named, **fields})
        (folder / "dataset_info.json").write_text('{"ours": {"file_name": "a.jsonl"}}')
    file.write_text(text, encoding="utf-8")
    return file


def attempt(case: Case) -> str | None:
    """None where the configuration is refused in the words that it should be, and nothing was run or written."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "config.yaml"
        file.write_bytes(case.text if isinstance(case.text, bytes) else case.text.encode())
        try:
            import_recipe(case.tool, file, Path(name) / "recipe.yaml", Asked())
        except ConfigError as error:
            missing = [words for words in case.says if words not in str(error)]
            if missing:
                return f"says {str(error)!r}, without {missing}"
        else:
            return "it was imported"
        left = [path.name for path in Path(name).iterdir() if path != file]
        return f"left {left}" if left or Path("ran").exists() else None
