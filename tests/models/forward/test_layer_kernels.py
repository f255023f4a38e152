"""The kernels of a layer against plain torch. They need a GPU, or Triton's interpreter, which runs them on the CPU:

TRITON_INTERPRET=1 pytest -m gpu tests/models/forward/test_layer_kernels.py        # with triton >= 3.8 installed
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen3Config, Qwen3ForCausalLM
from transformers import Qwen2ForCausalLM as Qwen2

from kedge.models.forward.layers import PLAIN, PackedLayer, fused
from kedge.models.forward.packing import attending, lay_out
from kedge.models.forward.reader import reader_of

pytestmark = pytest.mark.gpu
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 10 * len(shape) + sum(shape)))
    return x.to(DEVICE, dtype).requires_grad_()


def assert_same_gradients(
    ours: Callable[..., Sequence[Tensor]], plain: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
) -> None:
    """Outputs, and the gradients of all inputs for gradients of the outputs that are drawn."""
    results: list[list[Tensor]] = []
    for function in (ours, plain):
        outputs = function(*inputs)
        upstream = [drawn(*y.shape, seed=3 + at).detach().to(y.dtype) for at, y in enumerate(outputs)]
        results.append([*outputs, *torch.autograd.grad(outputs, list(inputs), upstream)])
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def norm_of(stream: Tensor, added: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = stream if added is None else stream + added
    return total, total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight


@pytest.mark.parametrize(("rows", "width"), [(3, 576), (1, 8), (700, 48)])
def test_a_norm_and_what_is_added_before_it(rows: int, width: int) -> None:
    stream, added, weight = drawn(rows, width), drawn(rows, width, seed=1), drawn(width)

    def ours(stream: Tensor, weight: Tensor, *added: Tensor) -> tuple[Tensor, Tensor]:
        norm = SimpleNamespace(weight=weight, variance_epsilon=1e-5)
        return fused().add_norm(stream, *(added or (None,)), norm)

    def plain(stream: Tensor, weight: Tensor, *added: Tensor) -> tuple[Tensor, Tensor]:
        return norm_of(stream, *(added or (None,)), weight)

    assert_same_gradients(ours, plain, [stream, weight, added])
    assert_same_gradients(ours, plain, [stream, weight])
    assert_same_gradients(lambda *x: ours(*x)[1:], lambda *x: plain(*x)[1:], [stream, weight])


@pytest.mark.parametrize(("heads", "width"), [(9, 64), (1, 8), (3, 80)])
def test_a_rotation(heads: int, width: int) -> None:
    angle = drawn(7, width // 2).detach()
    cos, sin = (torch.cat([x, x], dim=-1) for x in (angle.cos(), angle.sin()))
    x = drawn(7, heads, width)
    assert_same_gradients(lambda x: [fused().rotate(x, cos, sin)], lambda x: [PLAIN.rotate(x, cos, sin)], [x])
    beside = drawn(7, 2 * heads, width)  # heads of a larger matrix
    assert_same_gradients(
        lambda x: [fused().rotate(x[:, heads:], cos, sin)], lambda x: [PLAIN.rotate(x[:, heads:], cos, sin)], [beside]
    )


def test_a_gate() -> None:
    inputs = drawn(5, 700), drawn(5, 700, seed=1)
    assert_same_gradients(lambda g, u: [fused().gate(None, g, u)], lambda g, u: [silu(g) * u], inputs)


SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
    "qwen2": lambda: Qwen2(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32)),
}


@pytest.mark.parametrize("family", MODELS)
def test_a_layer_gives_what_the_layer_of_transformers_gives(family: str) -> None:
    torch.manual_seed(0)
    model: Any = MODELS[family]().to(DEVICE).eval()
    layer = model.model.layers[0]
    layout = lay_out(torch.tensor([[0, 0, 1, 1, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]).bool(), torch.device(DEVICE))
    hidden = drawn(1, len(layout.place_N), 64)
    rotation = model.model.rotary_emb(hidden, layout.position_N[None])
    weights = [hidden, *layer.parameters()]
    results: list[list[Tensor]] = []
    for module in (layer, PackedLayer(layer, fused(), tails=False), PackedLayer(layer, fused(), tails=True)):
        with attending([model.config]):
            output = module(hidden, position_embeddings=rotation, layout=layout, attention_mask=None)[0]
        read = output if output.shape[0] == len(layout.tail_M) else output.index_select(0, layout.tail_M)
        results.append([read, *torch.autograd.grad(read.square().sum(), weights)])
    for ours in results[1:]:
        for actual, expected in zip(ours, results[0], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item() + 1e-7)


@pytest.mark.skipif(IS_INTERPRETED, reason="only a GPU has the attention in bfloat16")
@pytest.mark.parametrize("family", MODELS)
def test_a_decoder_in_bfloat16_is_nearer_to_float32_than_that_of_transformers(family: str) -> None:
    torch.manual_seed(0)
    model: Any = MODELS[family]().to(DEVICE).bfloat16().eval()
    mask = torch.tensor([[1] * 40, [1] * 25 + [0] * 15]).bool()
    tokens = torch.randint(0, 300, mask.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    reader = reader_of(model.get_decoder())
    layout = lay_out(mask, torch.device(DEVICE))
    with torch.no_grad():
        with reader.active():
            ours = reader(tokens.flatten().index_select(0, layout.place_N), layout).float()
        theirs = model.model(tokens, attention_mask=mask.to(DEVICE)).last_hidden_state[mask.to(DEVICE)].float()
        exact = model.float().model(tokens, attention_mask=mask.to(DEVICE)).last_hidden_state[mask.to(DEVICE)]
    assert any(isinstance(layer, PackedLayer) for layer in reader.decoder.layers[:-1])
    assert ours.shape == theirs.shape
    assert (ours - exact).abs().mean() < (theirs - exact).abs().mean()


@pytest.mark.skipif(IS_INTERPRETED, reason="only a GPU has the attention in bfloat16")
def test_a_decoder_whose_rounding_grows_with_its_depth_runs_in_our_layers_too() -> None:
    torch.manual_seed(0)
    deep = LlamaConfig(**SIZES | {"num_hidden_layers": 48}, initializer_range=0.4)
    model: Any = LlamaForCausalLM(deep).to(DEVICE).bfloat16().eval()
    decoder = reader_of(model.get_decoder()).decoder
    assert all(isinstance(layer, PackedLayer) for layer in cast(Any, decoder).layers)
