"""SFT stages from end to end: what is told, sampled, left out, and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kedge.core.errors import DataError
from kedge.models.loading.tiny import make_tiny
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.stages.sft.settings import STAGE, SFTSettings
from kedge.testing import toy

Run = Callable[[str], Path]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    make_tiny(tmp_path / "tiny", hidden=32, layers=1)
    rows = {"d": toy.demonstrations(40, 1), "h": toy.demonstrations(6, 2)}
    for name, made in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))

    def run_stage(stage: str) -> Path:
        text = f"kedge: 1\nname: short\nseed: 3\nmodel: ./tiny\nstages:\n  sft: {{kind: sft, data: d.jsonl, {stage}}}\n"
        (tmp_path / "short.yaml").write_text(text)
        return run_recipe(load_recipe(tmp_path / "short.yaml"), tmp_path / "runs", is_resumed=False, say=print) / "sft"

    return run_stage


def records(folder: Path, journal: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{journal}.jsonl").read_text().splitlines()]


def test_the_loss_falls_and_held_out_prompts_are_answered_before_and_after(run: Run) -> None:
    how = "heldout: h.jsonl, epochs: 3, batch: 8, max_length: 192, samples: 2, sample_tokens: 5, optimiser: {lr: 1e-2}"
    folder = run(how)
    logged = records(folder, "metrics")
    assert [one["step"] for one in logged] == list(range(1, 16))
    assert logged[0]["train/loss"] == pytest.approx(5.56, abs=0.06)  # log 259: it begins with knowing nothing
    assert logged[-1]["heldout/loss"] < 4.0
    sampled = records(folder, "samples")
    assert [(one["step"], one["number"]) for one in sampled] == [(0, 0), (0, 1), (15, 0), (15, 1)]
    for one, row in zip(sampled, toy.demonstrations(6, 2)[:2] * 2, strict=True):
        assert row["messages"][0]["content"] in one["prompt"]
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.config.vocab_size == 259


def test_adapters_on_a_cpu_are_trained_and_saved_in_float32(run: Run) -> None:
    folder = run("batch: 8, max_length: 192, samples: 0, lora: {rank: 2}, optimiser: {lr: 1e-2}")
    weights = load_file(folder / "model/model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    is_narrow = [torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights.values() if tensor.ndim > 1]
    assert not any(is_narrow)  # and what it learnt was not rounded on the way
    base = AutoModelForCausalLM.from_pretrained(folder.parents[2] / "tiny")
    witness = PeftModel.from_pretrained(base, folder / "adapter").eval()
    tokens_BT = torch.arange(1, 9)[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder / "model")(tokens_BT).logits
        torch.testing.assert_close(witness(tokens_BT).logits, expected, rtol=1e-5, atol=1e-5)


def test_how_a_step_is_cut_changes_nothing_of_the_run(run: Run, tmp_path: Path) -> None:
    how = "batch: 8, max_length: 192, samples: 0, optimiser: {lr: 1e-3}"
    losses: list[list[float]] = []
    for size in (8, 3):
        folder = run(f"{how}, micro_batch: {size}")
        losses.append([one["train/loss"] for one in records(folder, "metrics")])
        (tmp_path / "runs").rename(tmp_path / f"runs-{size}")
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_conversations_that_are_too_long_are_left_out_and_counted(run: Run) -> None:
    lengths = sorted(
        len("".join(f"<{one['role']}\n{one['content']}>\n" for one in row["messages"]))
        for row in toy.demonstrations(40, 1)
    )
    folder = run(f"batch: 8, max_length: {lengths[29]}, samples: 0")
    left_out = sum(length > lengths[29] for length in lengths)
    events = {one["code"]: one["message"] for one in records(folder, "events")}
    assert events["sft.too_long"].startswith(f"{left_out} conversations of `data` are longer than {lengths[29]} tokens")
    assert events["sft.data"].startswith(f"{40 - left_out} conversations with ")


def test_nothing_left_to_learn_is_refused(run: Run) -> None:
    with pytest.raises(DataError, match=r"at most 8 tokens .* and 40 are longer; raise max_length"):
        run("max_length: 8, samples: 0")


def test_patience_without_held_out_data_is_refused_by_the_check() -> None:
    settings = SFTSettings.model_validate({"kind": "sft", "data": "d.jsonl", "eval": {"patience": 2}})
    (found,) = STAGE.check(settings)
    assert (found.level, found.code, found.where) == ("fatal", "sft.patience", "eval.patience")
    assert list(STAGE.check(SFTSettings.model_validate({"kind": "sft", "data": "d.jsonl"}))) == []
