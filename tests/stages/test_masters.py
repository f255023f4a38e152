"""Computed in bfloat16, a stage saves the float32 weights of the file that it started from plus what it has learnt.

The steps are so small that bfloat16 would round all of them away, and so are all distances beside its rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kedge.core.world import ALONE
from kedge.models.loading.load import load_causal
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.stages.rl.rounds import starting_model
from kedge.testing import toy

RATE = 1e-6
LEARN = {"lr": RATE, "schedule": "constant", "warmup": 0.0, "weight_decay": 0.0, "eps": 1e-12}
PLAIN = {"kind": "function", "path": "rules.py:plain"}
SAMPLED: dict[str, Any] = {"max_prompt_tokens": 40, "sampling": {"max_new_tokens": 6}}
RL: dict[str, Any] = {"reward": PLAIN, "iterations": 2, "batch": 4, "minibatches": 1, "epochs": 1, "actor": LEARN}
REJECTION = {"kind": "rejection", "rounds": 2, "epochs": 1, "finished": False}
ONLINE = {"rounds": 2, "reward": PLAIN, "answers": 3, "finished": False, **SAMPLED}
CASES: dict[str, dict[str, Any]] = {
    "ppo, separate": {"kind": "ppo", "roles": "separate", "critic": LEARN, **RL, **SAMPLED},
    "ppo, trunk": {"kind": "ppo", "roles": "trunk", "critic": LEARN, **RL, **SAMPLED},
    "ppo, lora": {"kind": "ppo", "roles": "lora", "critic": LEARN, **RL, **SAMPLED},
    "rejection": {"kind": "best_of_n", "method": REJECTION, "reward": PLAIN, "n": 2, "batch": 5, **SAMPLED},
    "bond": {
        "kind": "best_of_n",
        "method": {"kind": "bond", "steps": 2},
        "reward": PLAIN,
        "n": 2,
        "batch": 5,
        **SAMPLED,
    },
    "online dpo": {"kind": "preference", "online": ONLINE, "batch": 8, "max_length": 64, "heldout_share": 0.2},
    "reward": {"kind": "reward", "frozen_layers": 1, "batch": 8, "max_length": 192, "if_unfit": "go_on"},
}


@pytest.fixture(scope="session")
def run_stage(ppo_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def run(name: str) -> Path:
        place, stage = tmp_path_factory.mktemp("masters"), CASES[name]
        (place / "rules.py").write_text("def plain(answer):\n    return len(set(answer.text))\n")
        files = {"prompts": str(ppo_home / "prompts.jsonl")}
        if "online" in stage:
            stage = {**stage, "online": {**stage["online"], **files}}
        elif stage["kind"] == "reward":
            rows = [json.dumps(row) + "\n" for row in toy.pairs(24, 3)]
            (place / "pairs.jsonl").write_text("".join(rows))
            stage = {**stage, "data": "pairs.jsonl", "heldout_share": 0.3}
        else:
            stage = {**stage, **files}
        if "actor" not in stage:
            stage = {**stage, "optimiser": LEARN}
        recipe = {"kedge": 1, "name": "short", "seed": 5, "model": str(ppo_home / "tiny"), "device": "cpu"}
        stages = {"train": {**stage, "memory": {"dtype": "bfloat16"}}}
        (place / "recipe.yaml").write_text(json.dumps({**recipe, "stages": stages}))
        return run_recipe(load_recipe(place / "recipe.yaml"), place / "runs", is_resumed=False, say=print) / "train"

    return run


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in ("ppo, lora", "bond") else []) for name in CASES]
)
def test_what_is_saved_is_the_file_and_what_was_learnt(
    name: str, run_stage: Callable[[str], Path], ppo_home: Path
) -> None:
    stage = run_stage(name)
    steps = max(json.loads(line)["step"] for line in (stage / "metrics.jsonl").read_text().splitlines())
    saved, start = (load_file(folder / "model.safetensors") for folder in (stage / "model", ppo_home / "tiny"))
    assert {weight.dtype for weight in saved.values()} == {torch.float32}
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in start.values())
    distances = {key: (saved[key] - start[key]).abs().max().item() for key in saved.keys() & start.keys()}
    if name == "ppo, lora":  # B has moved from zero, and what it adds is the sum over a rank of 16, times 2
        assert 0 < max(distances.values()) < 32 * steps * RATE
        return
    assert max(distances.values()) < 1.5 * steps * RATE
    frozen = {key for key in distances if "embed" in key or "layers.0." in key}
    if name in ("ppo, trunk", "reward"):
        assert {distances[key] for key in frozen} == {0.0}
        distances = {key: distance for key, distance in distances.items() if key not in frozen}
    assert max(distances.values()) > 0.55 * steps * RATE  # of all rounds and iterations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_start_is_read_again_in_the_type_of_the_policy(dtype: torch.dtype, ppo_home: Path) -> None:
    """Else the distance between the two would have the rounding of one of them in it."""
    place = str(ppo_home / "tiny")
    context: Any = SimpleNamespace(input=lambda name: place, world=ALONE)  # pyright: ignore[reportUnknownLambdaType]
    model = load_causal(ppo_home / "tiny").to(dtype)  # pyright: ignore[reportArgumentType]
    with starting_model(context, model, device="cpu", is_asked_often=False)() as start:
        assert start.model.dtype == dtype
