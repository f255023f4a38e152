"""Every stage that trains stops when a callback asks it to, and goes on to the same end, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import kedge

DEMONSTRATIONS = [{"prompt": f"Say {letter}", "completion": f"{letter} it is."} for letter in "abcdefghijkl"]
PAIRS = [{"prompt": f"Say {n}", "chosen": f"{n} is it", "rejected": f"no {n}"} for n in range(14)]
SUPERVISED: dict[str, Any] = {"batch": 4, "micro_batch": 4, "max_length": 64, "optimiser": {"lr": 1e-3}}
SAMPLED: dict[str, Any] = {
    "prompts": ["a", "b", "c", "d"], "reward": lambda answer: len(answer.text) / 8, "max_prompt_tokens": 40,
    "sampling": {"max_new_tokens": 6}, "n": 2,
}  # fmt: skip
STAGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sft": (kedge.SFT, {"data": DEMONSTRATIONS, "samples": 0, **SUPERVISED}),
    "reward": (kedge.Reward, {"data": PAIRS, "if_unfit": "go_on", **SUPERVISED}),
    "dpo": (kedge.Preference, {"data": PAIRS, "samples": 0, **SUPERVISED}),
    "rejection": (kedge.BestOfN, {"batch": 1, "method": {"kind": "rejection", "finished": False}, **SAMPLED}),
    "bond": (kedge.BestOfN, {"batch": 2, "method": {"kind": "bond", "steps": 3}, **SAMPLED}),
}


@pytest.mark.parametrize("name", STAGES)
def test_a_stopped_stage_goes_on_to_the_same_end(name: str, tiny: str, tmp_path: Path) -> None:
    make, settings = STAGES[name]
    stage = make(tiny, device="cpu", **settings)
    whole = stage.run(tmp_path / "whole/run", say=None)
    stopped = stage.run(tmp_path / "stopped/run", on_step=lambda step, metrics: step == 2, say=None)
    assert (stopped.status, max(record["step"] for record in stopped.metrics())) == ("interrupted", 2)
    resumed = stage.run(tmp_path / "stopped/run", resume=True, say=None)
    assert resumed.status == "done"
    weights, expected = (load_file(run.only_stage().model / "model.safetensors") for run in (resumed, whole))
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
