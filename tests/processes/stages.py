"""Every kind of stage on a tiny model, by one process or several: functions of a world.

Each process writes into a folder of its own; what a stage reads is made before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from kedge.core import plugins
from kedge.core.stage import Stage
from kedge.core.world import World
from kedge.data.template import template_hash
from kedge.models.loading.tiny import make_tiny
from kedge.models.reward.ensemble import Ensemble, lora_members, save_ensemble
from kedge.models.reward.reward_files import build, save
from kedge.models.reward.reward_model import RewardModel
from kedge.models.settings import LoraSettings, MeanOfMembers
from kedge.recipe.together import SharedTracker
from kedge.runs import Run, new_manifest
from kedge.runs.folder import RunTracker
from kedge.runtime.processes import ProcessWorld
from kedge.stages.shared.context import Context
from kedge.stages.shared.interrupt import StopRequest
from kedge.testing import toy

RULES = """
def plain(answer):
    return None if answer.text.startswith("9") else sum(letter < "\\x80" for letter in answer.text) / 8

def by_size(answers):
    return [-len(answer.text) / 10 for answer in answers]
"""
PLAIN = {"kind": "function", "path": "rules.py:plain"}
SIZE = {"kind": "function", "path": "rules.py:by_size"}
# A large eps: AdamW would blow the rounding of tiny gradients up to whole steps.
LEARN = {"lr": 3e-3, "schedule": "constant", "warmup": 0.0, "eps": 1e-3}
LEARNT = {"from": "tiny", "batch": 7, "micro_batch": 3, "optimiser": LEARN, "max_steps": 3}
SUPERVISED = {**LEARNT, "max_length": 160}
SAMPLED = {"prompts": "prompts.jsonl", "max_prompt_tokens": 120, "sampling": {"max_new_tokens": 8}}
RL: dict[str, Any] = {
    "from": "tiny", **SAMPLED, "gold": SIZE, "memory": {"dtype": "float32", "lora": {"rank": 2}}, "iterations": 2,
    "batch": 5, "micro_batch": 3, "actor": LEARN, "logging": {"every": 1, "samples": 5},
}  # fmt: skip
PPO: dict[str, Any] = {"kind": "ppo", **RL, "epochs": 1, "minibatches": 2, "critic": LEARN}
PREFERENCE: dict[str, Any] = {
    "kind": "preference", "data": "pairs.jsonl", "heldout": "others.jsonl", **SUPERVISED, "eval": {"every": 2},
    "samples": 1, "sample_tokens": 4,
}  # fmt: skip
BEST_OF: dict[str, Any] = {
    "kind": "best_of_n", **LEARNT, **SAMPLED, "reward": PLAIN, "gold": SIZE, "n": 3, "rows": 16,
}  # fmt: skip
LOOKS = {"exam": ["knowledge", "own.yaml"], "limit": 3, "every": 1}

STAGES: dict[str, dict[str, Any]] = {
    "sft": {
        "kind": "sft", "data": "demonstrations.jsonl", "heldout": "demonstrations.jsonl", **SUPERVISED, "samples": 1,
        "eval": {"every": 2}, "sample_tokens": 4,
    },
    "reward": {
        "kind": "reward", "data": "pairs.jsonl", "heldout": "others.jsonl", "if_unfit": "go_on", **SUPERVISED,
    },
    "reward of two members": {
        "kind": "reward", "data": "pairs.jsonl", "members": 2, "lora": {"rank": 2}, "if_unfit": "go_on", **SUPERVISED,
    },
    "dpo": {**PREFERENCE, "method": "dpo", "lora": {"rank": 2}},
    "kto": {**PREFERENCE, "method": "kto"},
    "online": {
        **PREFERENCE, "method": "dpo", "data": None, "heldout": None,
        "online": {**SAMPLED, "rounds": 2, "reward": SIZE, "answers": 3, "finished": False, "rows": 16},
    },
    "ppo, separate": {
        **PPO, "reward": "ensemble", "roles": "separate", "ema": 0.9, "kl": {"start": 0.05, "limit": 50.0},
        "loss": {"imitate": {"data": "demonstrations.jsonl", "batch": 3}}, "eval": LOOKS,
    },
    "ppo, lora": {
        **PPO, "roles": "lora", "scores": {"normalise": "standard"},
        "reward": {"kind": "mix", "parts": {"model": {"kind": "model", "from": "judge-lora"}, "plain": PLAIN}},
    },
    "ppo, trunk": {**PPO, "reward": "judge", "roles": "trunk", "answers": 2},
    "grpo": {
        "kind": "group", **RL, "method": "grpo", "reward": PLAIN, "roles": "separate", "answers": 3, "max_rounds": 2,
        "eval": LOOKS,
    },
    "remax": {"kind": "group", **RL, "method": "remax", "reward": "judge", "roles": "lora"},
    "rejection": {**BEST_OF, "method": {"kind": "rejection", "rounds": 2, "finished": False}},
    "bond": {**BEST_OF, "method": {"kind": "bond", "steps": 2, "anchors": 4}},
    "evaluate": {
        "kind": "evaluate", "models": ["tiny", "tiny-other"], "reward": "judge", "gold": SIZE,
        "prompts": "prompts.jsonl", "answers": 2, "max_new_tokens": 8, "rows": 16,
    },
    "exam": {
        "kind": "exam", "models": ["tiny", "tiny-other"], "exams": ["knowledge", "own.yaml"], "limit": 7, "rows": 3,
        "dtype": "float32",
    },
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "tdpo": {**PREFERENCE, "method": "tdpo"},
    "tdpo, lora": {**PREFERENCE, "method": "tdpo", "lora": {"rank": 2}},
    "sft, lora": {**STAGES["sft"], "lora": {"rank": 2, "dropout": 0.0}},
    "reward, frozen": {**STAGES["reward"], "frozen_layers": 1, "members": 2},
}
"""What sharded weights do otherwise than replicated ones."""
_INPUTS = ("from", "data", "heldout", "prompts", "reward", "models")


def write_inputs(home: Path) -> None:
    """What the stages read: models, reward models and an ensemble of two, data, rules."""
    tiny = make_tiny(home / "tiny", hidden=32, layers=2)
    make_tiny(home / "tiny-other", hidden=32, layers=2, seed=9)
    save(_knowing(build(tiny, seed=3, dtype="float32")), home / "judge")
    (adapted,) = lora_members(build(tiny, seed=4, dtype="float32"), LoraSettings(rank=2), count=1, seed=7)
    save(_knowing(_moved(adapted)), home / "judge-lora")
    members = lora_members(build(tiny, seed=5, dtype="float32"), LoraSettings(rank=2), count=2, seed=8)
    ensemble = Ensemble(members=tuple(_knowing(_moved(member)) for member in members), combine=MeanOfMembers())
    save_ensemble(ensemble, home / "ensemble")
    tables = {
        "demonstrations": toy.demonstrations(20, 2),
        "pairs": toy.pairs(24, 3),
        "others": toy.pairs(9, 8),
        "prompts": toy.prompts(11, 4),
    }
    for name, rows in tables.items():
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (home / "rules.py").write_text(RULES, encoding="utf-8")
    own = "kedge_exam: 1\nname: own\nkind: open\nitems: own.jsonl\nmax_new_tokens: 5\n"
    (home / "own.yaml").write_text(own, encoding="utf-8")
    questions = [json.dumps({"question": f"Say {number}", "answer": "x"}) + "\n" for number in range(5)]
    (home / "own.jsonl").write_text("".join(questions), encoding="utf-8")


def _knowing(reward: RewardModel) -> RewardModel:
    facts = replace(reward.facts, template_hash=template_hash(reward.tokenizer), max_length=192)
    return replace(reward, facts=facts)


@torch.no_grad()
def _moved(reward: RewardModel) -> RewardModel:
    """As after some training: a new adapter changes nothing."""
    for name, parameter in reward.model.named_parameters():
        if "lora_B." in name:
            parameter.copy_(0.03 * torch.sin(torch.arange(parameter.numel()) + 2.0).view_as(parameter))
    return reward


def run_stage(
    world: World, home: Path, name: str, folder: Path, changes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """One stage in a folder of this process, and what it wrote: metrics, samples, weights and answers, untimed.
    `changes` are of its settings."""
    settings, place = {**(STAGES | MORE)[name], **(changes or {})}, folder / f"process-{world.rank}"
    kind: Stage = plugins.find("stages", settings["kind"])
    parsed, run = kind.settings.model_validate(settings), kind.load_run()
    assert run is not None
    manifest = new_manifest(name="stage", kind=settings["kind"], seed=3, settings={})
    os.environ["KEDGE_CACHE"] = str(folder / f"cache-{world.rank}")
    with Run.create(place, manifest=manifest) as stage_run:
        context = Context(
            name="stage",
            seed=3,
            run=stage_run,
            tracker=SharedTracker(world, RunTracker(stage_run), StopRequest(world)),
            device="cpu",
            chat_template=None,
            recipe_folder=home,
            sources={field: [str(home / path) for path in paths] for field, paths in _sources(settings).items()},
            say=lambda _: None,
            world=world,
        )
        run(context, parsed)
    return _facts(place)


def run_sharded(world: ProcessWorld, home: Path, name: str, folder: Path) -> dict[str, Any]:
    """The same with sharded weights."""
    world.shard_weights()
    return run_stage(world, home, name, folder)


def _sources(settings: Mapping[str, Any], under: str = "") -> dict[str, list[str]]:
    """The inputs of a stage by the names of their fields: what is a path among its settings."""
    sources: dict[str, list[str]] = {}
    for field, value in settings.items():
        path = f"{under}{field}"
        if field in _INPUTS and isinstance(value, str | list):
            sources[path] = [value] if isinstance(value, str) else value
        elif isinstance(value, Mapping):
            sources |= _sources(value, f"{path}.")
    return sources


def _facts(place: Path) -> dict[str, Any]:
    def weights(pattern: str) -> dict[str, Any]:
        return {str(file.relative_to(place)): load_file(file) for file in sorted(place.glob(pattern))}

    return {
        "metrics": _lines(place / "metrics.jsonl"),
        "samples": _lines(place / "samples.jsonl"),
        "events": [line["code"] for line in _lines(place / "events.jsonl")],
        "checkpoints": weights("checkpoints/**/*.safetensors"),
        "model": weights("model/**/*.safetensors"),
        "answers": {
            file.name: _lines(file) for file in sorted([*place.glob("answers*.jsonl"), *place.glob("items.jsonl")])
        },
    }


def _lines(file: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    return [{name: value for name, value in line.items() if not _is_timed(name)} for line in lines]


def _is_timed(name: str) -> bool:
    return name in ("at", "tokens/per_second") or name.startswith("time/")
