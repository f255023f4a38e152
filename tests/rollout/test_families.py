"""Which models the kernels can decode, and why others cannot."""

from __future__ import annotations

from typing import Any

import pytest
from adapted import add_adapters
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from kedge.rollout.families import unsupported_reason

_SMALL: dict[str, Any] = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
_HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}


def _llama(**changes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**_SMALL, **_HEADS, **changes}))


def test_plain_decoders_are_supported() -> None:
    assert unsupported_reason(_llama()) is None
    assert unsupported_reason(Qwen2ForCausalLM(Qwen2Config(**_SMALL, **_HEADS))) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        ({"hidden_size": 48}, "widths (48, 96, 24)"),
        ({"head_dim": 96}, "widths (64, 96, 96)"),
        ({"mlp_bias": True}, "its inner products have biases"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "of kind dynamic"),
    ],
)
def test_what_the_kernels_do_not_compute_is_named(changes: dict[str, Any], expected: str) -> None:
    assert expected in (unsupported_reason(_llama(**changes)) or "")


def test_adapters_are_supported_unless_their_base_is_not_plain_or_their_rank_too_large() -> None:
    adapted, large, quantised = _llama(), _llama(), _llama()
    add_adapters(adapted, {"actor": 5, "critic": 200})
    assert unsupported_reason(adapted) is None
    add_adapters(large, {"actor": 57, "critic": 200}, targets=("o_proj",))
    assert unsupported_reason(large) == "0.self_attn.o_proj has adapters of rank 257, more than 256"
    add_adapters(quantised, {"actor": 2})
    decoder: Any = quantised.get_decoder()
    decoder.layers[0].self_attn.o_proj.base_layer = nn.Bilinear(2, 2, 2)
    assert unsupported_reason(quantised) == (
        "0.self_attn.o_proj is a torch.nn.modules.linear.Bilinear, not a plain linear layer"
    )


def test_other_families_and_sliding_windows_are_named() -> None:
    assert unsupported_reason(GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=1))) == (
        "gpt2 is not one of llama, mistral, qwen2"
    )
    sliding = Qwen2Config(**_SMALL, **_HEADS, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    assert unsupported_reason(Qwen2ForCausalLM(sliding)) == "not all of its layers attend to everything"
