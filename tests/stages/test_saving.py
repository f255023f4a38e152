"""What a stage says of the update that it loses by saving in two-byte numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kedge.core.world import ALONE
from kedge.models.forward.lora import required_adapters
from kedge.models.loading.start import start_causal
from kedge.models.loading.tiny import make_tiny, tiny_tokenizer
from kedge.models.settings import LoraSettings, SaveDType
from kedge.stages.shared.policy import save_policy


@pytest.mark.parametrize(
    ("dtype", "size", "level"), [("bfloat16", 1e-4, "warning"), ("bfloat16", 0.1, "info"), ("float32", 1e-4, None)]
)
def test_the_share_that_is_lost_is_an_event(tmp_path: Path, dtype: SaveDType, size: float, level: str | None) -> None:
    model = start_causal(str(make_tiny(tmp_path / "base")), lora=LoraSettings(rank=2), device="cpu", seed=1)
    masters = {name: torch.full_like(weight, size) for name, weight in required_adapters(model).parameters("policy")}
    events: list[tuple[Any, ...]] = []
    context = SimpleNamespace(
        world=ALONE,
        folder=tmp_path / "sft",
        event=lambda *told, **evidence: events.append((*told, evidence)),
        once=lambda action: action(),
    )
    folder = save_policy(cast(Any, context), model, tiny_tokenizer(), weights=masters, dtype=dtype)
    assert (folder.parent / "adapter" / "adapter_model.safetensors").is_file()
    assert [(event[0], event[1]) for event in events] == ([(level, "save.rounded")] if level else [])
    if level:
        share = events[0][3]["share"]
        assert f"{share:.1%} of the entries of the update" in events[0][2]
        assert (share > 0.9) if level == "warning" else (share < 0.1)
