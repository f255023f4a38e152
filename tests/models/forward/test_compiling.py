"""Compiled layers, without compiling: which calls would run the compiled program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kedge.core.records import repeated
from kedge.models.forward.reader import compile_layers, uncompiled
from kedge.models.loading.tiny import tiny_model
from kedge.rollout.local import LocalGenerator
from kedge.rollout.settings import SamplingSettings


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what its compiler imports
def test_generation_runs_the_layers_as_they_are_written() -> None:
    plain, model = tiny_model(hidden=32), tiny_model(hidden=32)
    compile_layers(model)
    calls: list[str] = []
    layers: list[Any] = list(model.model.layers)
    for layer in layers:
        assert layer._compiled_call_impl is not None
        layer._compiled_call_impl = lambda *_, **__: calls.append("compiled")
    prompts = repeated([[70, 71], [80]], ids=[0, 1], answers=2)
    sampling = SamplingSettings(max_new_tokens=5)
    tokens = [
        LocalGenerator(sampled, sampling, stop_ids=[258], pad=256, max_rows=4).generate(prompts, seed=3).tokens_BT
        for sampled in (plain, model)
    ]
    assert torch.equal(*tokens)
    assert calls == []
    before = [layer._compiled_call_impl for layer in layers]
    with uncompiled(model):
        assert [layer._compiled_call_impl for layer in layers] == [None, None]
    assert [layer._compiled_call_impl for layer in layers] == before
