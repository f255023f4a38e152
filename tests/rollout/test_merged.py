"""Adapters worked into plain layers: the same answers as with them, and nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

from kedge.core.records import repeated
from kedge.models.forward.lora import activate, using, with_lora
from kedge.models.loading.tiny import tiny_model
from kedge.models.settings import LoraSettings
from kedge.rollout.graphs import weights_identity
from kedge.rollout.local import LocalGenerator
from kedge.rollout.merged import MergedLayers
from kedge.rollout.settings import SamplingSettings

PROMPTS = repeated([[70, 80, 90], [65], list(range(100, 111))], ids=[3, 14, 15], answers=2)


def _adapted() -> Any:
    """Two adapters that do something, of which the first answers."""
    model = with_lora(tiny_model(seed=3, hidden=32), LoraSettings(rank=2), name="actor", seed=0)
    with_lora(model, LoraSettings(rank=3, alpha=7), name="critic", seed=1)
    activate(model, "actor")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
    return model


def _sampled(model: PreTrainedModel) -> Any:
    settings = SamplingSettings(max_new_tokens=12)
    return LocalGenerator(model, settings, stop_ids=(258,), pad=256, max_rows=4).generate(PROMPTS, 11)


def _query(model: Any) -> Any:
    return _layer(model, 1).self_attn.q_proj


def _layer(model: Any, index: int) -> Any:
    decoder: Any = model.get_decoder()
    return decoder.layers[index]


def test_answers_and_log_probs_are_those_of_the_adapters() -> None:
    model = _adapted()
    expected = _sampled(model)
    with MergedLayers().within(model):
        assert type(_query(model)) is nn.Linear
        rollouts = _sampled(model)
    with using(model, None):
        unadapted = _sampled(model)
    assert torch.equal(rollouts.tokens_BT, expected.tokens_BT)
    torch.testing.assert_close(rollouts.behaviour_logp_BT, expected.behaviour_logp_BT, atol=1e-5, rtol=0)
    assert not torch.equal(unadapted.tokens_BT, expected.tokens_BT), "an adapter that changes nothing proves nothing"


def test_a_merged_layer_is_the_sum_of_the_base_and_the_active_adapter_alone() -> None:
    model = _adapted()
    layer = _query(model)
    a_RK, b_NR = layer.lora_A["actor"].double(), layer.lora_B["actor"].double()
    expected_NK = layer.base_layer.weight.double() + layer.scaling["actor"] * (b_NR @ a_RK)
    with MergedLayers().within(model):
        torch.testing.assert_close(_query(model).weight.double(), expected_NK, atol=1e-7, rtol=1e-6)
    with using(model, None), MergedLayers().within(model):
        assert torch.equal(_query(model).weight, layer.base_layer.weight)


def test_a_change_too_small_for_the_type_of_the_base_counts_in_the_mean() -> None:
    model = _adapted()
    layer = _query(model)
    a_RK, b_NR = layer.lora_A["actor"], layer.lora_B["actor"]
    layer.base_layer.to(torch.bfloat16)
    with torch.no_grad():
        layer.base_layer.weight.fill_(1.0)  # its neighbours are 1.0078125 and 0.99609375
        layer.base_layer.weight[0, 0] = -3.0
        a_RK.fill_(1.0)
        b_NR.fill_(0.001 / layer.scaling["actor"] / b_NR.shape[1])
    with MergedLayers().within(model):
        found_NK = _query(model).weight.clone()
        assert _layer(model, 0).mlp.down_proj.weight.dtype == torch.float32
    with MergedLayers().within(model):
        assert torch.equal(_query(model).weight, found_NK)
    assert set(found_NK.flatten()[1:].tolist()) == {1.0, 1.0078125}
    share = (found_NK.flatten()[1:] > 1).double().mean().item()
    expected = 0.001 / 0.0078125
    assert abs(share - expected) < 4 * (expected / found_NK.numel()) ** 0.5
    assert found_NK[0, 0].item() in (-3.0, -2.984375)
    with using(model, None), MergedLayers().within(model):
        assert torch.equal(_query(model).weight, layer.base_layer.weight)


def test_the_model_is_as_it_was_even_after_an_error() -> None:
    model = _adapted()
    names = [name for name, _ in model.named_parameters()]
    before = {
        name: (parameter, parameter.data_ptr(), parameter.requires_grad, parameter.detach().clone())
        for name, parameter in model.named_parameters()
    }
    layer, remembered = _query(model), weights_identity(model)
    with pytest.raises(ValueError, match="half way"), MergedLayers().within(model):
        raise ValueError("half way")
    assert _query(model) is layer
    assert [name for name, _ in model.named_parameters()] == names
    for name, parameter in model.named_parameters():
        old, address, is_trainable, numbers = before[name]
        assert (parameter is old, parameter.data_ptr(), parameter.requires_grad) == (True, address, is_trainable)
        assert torch.equal(parameter, numbers)
    assert weights_identity(model) == remembered


def test_merged_layers_are_kept_and_their_matrices_are_not() -> None:
    model, merged_layers = _adapted(), MergedLayers()
    with merged_layers.within(model):
        first = _query(model)
        before_NK = first.weight.clone()
    assert first.weight.numel() == 0
    with torch.no_grad():
        _query(model).lora_B["actor"].mul_(2.0)
    layer = _query(model)
    with merged_layers.within(model):
        assert _query(model) is first
        delta_NK = before_NK - layer.base_layer.weight
        torch.testing.assert_close(first.weight, layer.base_layer.weight + 2 * delta_NK, atol=1e-6, rtol=0)


def test_a_model_without_adapters_is_left_alone(model: LlamaForCausalLM) -> None:
    before = weights_identity(model)
    with MergedLayers().within(model):
        assert weights_identity(model) == before
