from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kedge.core.errors import ModelError
from kedge.models.loading.describe import ModelFacts, describe
from kedge.models.loading.tiny import make_tiny


def test_facts_come_from_the_config_alone(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", hidden=64, layers=3)
    save_file({"unrelated": torch.zeros(1)}, folder / "model.safetensors")
    # 259·64; a layer: 64·(64+32+32+64) + 3·64·192 + 128; 64 for the last norm; tied weights count once
    parameters = 259 * 64 + 3 * (64 * 192 + 3 * 64 * 192 + 128) + 64
    assert describe(folder, dtype="bfloat16") == ModelFacts(
        source=str(folder),
        architecture="LlamaForCausalLM",
        parameters=parameters,
        dtype="bfloat16",
        weights_bytes=2 * parameters,
        window=1024,
        vocab_size=259,
        hidden_size=64,
        layers=3,
        tied_embeddings=True,
        head_dim=16,
    )
    assert describe(folder, dtype="float32").weights_bytes == 4 * parameters


def test_a_head_that_log_probs_cannot_be_computed_from_is_told(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", hidden=32, layers=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "final_logit_softcapping": 30.0}))
    assert "final_logit_softcapping = 30.0" in describe(folder).head_problem


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", hidden=32, layers=1)
    whole = (folder / "model.safetensors").read_bytes()
    for content in (b"not weights at all", whole[:-100]):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelError, match=r"model\.safetensors: damaged or not whole"):
            describe(folder)


def test_unreachable_hub() -> None:
    with pytest.raises(ModelError, match="hub model 'no-such-org/nothing' could not be loaded"):
        describe("no-such-org/nothing")
