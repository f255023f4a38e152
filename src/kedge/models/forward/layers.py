"""A layer of a decoder like Llama's on packed rows, with as few launches as it needs.

It calls the parts of a layer of transformers, so that adapters on them and changes of their weights take effect. On a
GPU what lies between the products runs as kernels of our own, and the residual stream is float32, as the generator's
is: some models have entries of ten thousand in it, beside which bfloat16 loses the others.
Shape letters: N tokens of packed rows, M of them in the tails, H heads, E width of a head, D width, F inner width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from kedge.models.forward.lora import LoraLinear
from kedge.models.forward.low_rank import Product, products
from kedge.models.forward.packing import Layout, packed_attention
from kedge.models.forward.sharding import through

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers have these parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """What a layer computes between its products."""

    add_norm: Callable[[Tensor, Tensor | None, Any], tuple[Tensor, Tensor]]
    """The stream with something added to it, and the norm of that."""
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Rotary position embedding of (N, H, E), by cosines and sines (N, E)."""
    gate: Callable[[Any, Tensor, Tensor], Tensor]
    """The product of the activation of the first (N, F) and the second; the activation is that of the module."""


def _add_norm(stream_ND: Tensor, added_ND: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    sum_ND = stream_ND if added_ND is None else stream_ND + added_ND
    return sum_ND, norm(sum_ND)


def _rotate(x_NHE: Tensor, cos_NE: Tensor, sin_NE: Tensor) -> Tensor:
    """The two halves of a head are turned against each other."""
    low, high = x_NHE.chunk(2, dim=-1)
    return x_NHE * cos_NE[:, None] + torch.cat((-high, low), dim=-1) * sin_NE[:, None]


def _gate(mlp: Any, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    return mlp.act_fn(gate_NF) * up_NF


PLAIN = Operations(add_norm=_add_norm, rotate=_rotate, gate=_gate)


class PackedLayer(nn.Module):
    """One layer on packed rows; with `tails`, queries come from the tails only, keys and values from everywhere.

    Whoever uses it compares it with the layer first: it knows nothing of what other architectures add.
    """

    def __init__(self, layer: nn.Module, operations: Operations, *, tails: bool) -> None:
        super().__init__()
        self.layer = layer
        self._operations, self._tails = operations, tails
        self._through = through(layer)

    @property
    def is_sharded(self) -> bool:
        return self._through is not None

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], layout: Layout, **_: Any
    ) -> Tensor:
        """(1, N, D) to (1, N, D), or to (1, M, D) with tails."""
        run = self._keep_or_recompute if self._through is None else partial(self._through, self._keep_or_recompute)
        return run(hidden_states, *position_embeddings, layout)[None]

    def _keep_or_recompute(self, hidden_1ND: Tensor, cos_1NE: Tensor, sin_1NE: Tensor, layout: Layout) -> Tensor:
        layer: Any = self.layer
        # A partial last layer keeps its activations: the backward pass begins with them.
        if layer.training and getattr(layer, "gradient_checkpointing", False) and not self._tails:
            run = cast(Callable[..., Tensor], checkpoint)
            return run(self._run, hidden_1ND, cos_1NE, sin_1NE, layout, use_reentrant=False)
        return self._run(hidden_1ND, cos_1NE, sin_1NE, layout)

    def _run(self, hidden_1ND: Tensor, cos_1NE: Tensor, sin_1NE: Tensor, layout: Layout) -> Tensor:
        layer, operations = cast(Any, self.layer), self._operations
        is_fused = operations is not PLAIN
        stream_ND = hidden_1ND[0].float() if is_fused else hidden_1ND[0]
        stream_ND, normed_ND = operations.add_norm(stream_ND, None, layer.input_layernorm)
        attended_ND = self._attention(layer.self_attn, normed_ND, cos_1NE[0], sin_1NE[0], layout)
        if self._tails:
            stream_ND = stream_ND.index_select(0, layout.tail_M)
        stream_ND, normed_ND = operations.add_norm(stream_ND, attended_ND, layer.post_attention_layernorm)
        gate_NF, up_NF = _products(normed_ND, (layer.mlp.gate_proj, layer.mlp.up_proj))
        return stream_ND + layer.mlp.down_proj(operations.gate(layer.mlp, gate_NF, up_NF))

    def _attention(self, attention: Any, normed_ND: Tensor, cos_NE: Tensor, sin_NE: Tensor, layout: Layout) -> Tensor:
        heads = (-1, attention.head_dim)
        if self._tails:
            tail_MD, cos_ME, sin_ME = (x.index_select(0, layout.tail_M) for x in (normed_ND, cos_NE, sin_NE))
            (query_MD,) = _products(tail_MD, (attention.q_proj,))
            key_ND, value_ND = _products(normed_ND, (attention.k_proj, attention.v_proj))
        else:
            cos_ME, sin_ME = cos_NE, sin_NE
            query_MD, key_ND, value_ND = _products(normed_ND, (attention.q_proj, attention.k_proj, attention.v_proj))
        query_MHE, key_NHE, value_NHE = (x.unflatten(-1, heads) for x in (query_MD, key_ND, value_ND))
        if hasattr(attention, "q_norm"):
            query_MHE = self._head_norm(query_MHE, attention.q_norm)
            key_NHE = self._head_norm(key_NHE, attention.k_norm)
        attended_MHE = packed_attention(
            self._operations.rotate(query_MHE, cos_ME, sin_ME),
            self._operations.rotate(key_NHE, cos_NE, sin_NE),
            value_NHE,
            layout.tails if self._tails else layout.rows,
            layout.rows,
            dropout=attention.attention_dropout if attention.training else 0.0,
        )
        return attention.o_proj(attended_MHE.flatten(-2))

    def _head_norm(self, x_NHE: Tensor, norm: Any) -> Tensor:
        return self._operations.add_norm(x_NHE.flatten(0, 1), None, norm)[1].view(x_NHE.shape)


class StreamNorm(nn.Module):
    """The norm after the last layer: from a float32 stream to the type of the weights."""

    def __init__(self, norm: nn.Module, operations: Operations) -> None:
        super().__init__()
        self.norm = norm
        self._operations = operations

    def forward(self, stream_1ND: Tensor) -> Tensor:
        return self._operations.add_norm(stream_1ND[0], None, self.norm)[1][None]


def operations_for(decoder: Any) -> Operations | None:
    """How its layers can be computed here: by kernels on a GPU in a two-byte type; None where they are not known."""
    layers = list(getattr(decoder, "layers", ()))
    if decoder.config.model_type not in _FAMILIES or not layers or any(map(_has_window, layers)):
        return None
    is_narrow = decoder.device.type == "cuda" and decoder.dtype.itemsize == 2
    is_fused = is_narrow and decoder.config.hidden_act == "silu" and find_spec("triton") is not None
    return fused() if is_fused else PLAIN


def _has_window(layer: Any) -> bool:
    """Whether its queries see a part of the keys only."""
    attention = layer.self_attn
    return getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None)) is not None


@cache
def fused() -> Operations:
    """Kernels in Triton."""
    return Operations(add_norm=_fused_add_norm, rotate=_fused_rotate, gate=_fused_gate)


def _products(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """The outputs of linear layers that read the same input, together where they are plain."""
    parts = [_product(layer) for layer in layers]
    plain = [part for part in parts if part is not None]
    return products(x, plain) if len(plain) == len(layers) else tuple(layer(x) for layer in layers)


def _product(layer: nn.Module) -> Product | None:
    if isinstance(layer, LoraLinear):
        return layer.product()
    if type(layer) is not nn.Linear or torch.is_autocast_enabled(layer.weight.device.type):
        return None
    return Product(weight_NK=layer.weight, bias_N=layer.bias)


def _fused_add_norm(stream_ND: Tensor, added_ND: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    return cast("tuple[Tensor, Tensor]", _AddNorm.apply(stream_ND, added_ND, norm.weight, norm.variance_epsilon))


class _AddNorm(torch.autograd.Function):
    """The stream is given back where nothing is added too: its gradient is then added in the kernel of the norm's."""

    @staticmethod
    def forward(ctx: Any, stream_ND: Tensor, added_ND: Tensor | None, weight_D: Tensor, eps: float) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        from kedge.models.forward.kernels.elementwise import add_norm

        stream_ND = stream_ND.contiguous()
        added_ND = None if added_ND is None else added_ND.contiguous()
        sum_ND, normed_ND, inverse_N = add_norm(stream_ND, added_ND, weight_D, eps)
        ctx.save_for_backward(sum_ND, weight_D, inverse_N)
        ctx.adds = added_ND is not None
        ctx.set_materialize_grads(False)
        return sum_ND, normed_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_sum_ND: Tensor | None, of_normed_ND: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        from kedge.models.forward.kernels.elementwise import add_norm_backward

        sum_ND, weight_D, inverse_N = ctx.saved_tensors
        return *add_norm_backward(
            sum_ND,
            weight_D,
            inverse_N,
            None if of_sum_ND is None else of_sum_ND.contiguous(),
            of_normed_ND.contiguous(),
            adds=ctx.adds,
            needs_weight=ctx.needs_input_grad[2],
        ), None


def _fused_rotate(x_NHE: Tensor, cos_NE: Tensor, sin_NE: Tensor) -> Tensor:
    return cast(Tensor, _Rotate.apply(x_NHE, cos_NE.to(x_NHE.dtype), sin_NE.to(x_NHE.dtype)))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NHE: Tensor, cos_NE: Tensor, sin_NE: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        from kedge.models.forward.kernels.elementwise import rotate

        ctx.save_for_backward(cos_NE, sin_NE)
        return rotate(x_NHE, cos_NE, sin_NE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_out_NHE: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        from kedge.models.forward.kernels.elementwise import rotate

        return rotate(of_out_NHE, *ctx.saved_tensors, back=True), None, None


def _fused_gate(mlp: Any, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    del mlp
    return cast(Tensor, _Gate.apply(gate_NF, up_NF))


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_NF: Tensor, up_NF: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        from kedge.models.forward.kernels.elementwise import gate

        ctx.save_for_backward(gate_NF, up_NF)
        return gate(gate_NF, up_NF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_out_NF: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        from kedge.models.forward.kernels.elementwise import gate_backward

        gate_NF, up_NF = ctx.saved_tensors
        return gate_backward(gate_NF, up_NF, of_out_NF.contiguous())
