"""From padded rows to the hidden states that are needed of them, on the cheapest of three paths that a decoder allows.

Packed, with the last layer computed only where its output is needed; packed; or padded, as transformers computes it. A
path is taken if it agrees with the padded one on a few probe rows, so that an unknown architecture is right, if slower.
Shape letters: B rows, T token positions, N tokens of packed rows, M of them in the tails that the last layer is
computed at, R of them whose hidden state is read, H heads, E width of a head, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kedge.core.errors import ModelError
from kedge.models.forward.capture import CapturedLayers
from kedge.models.forward.packing import PLAIN, Layout, attending, lay_out, packed_attention

_PARTIAL_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers `PartialLastLayer` knows."""
_PROBE_READ = ((0, 0, 1, 1, 1), (0, 1, 0, 0, 0), (1, 1, 0, 1, 0))
_MAX_DISTANCE = 1e-4, 0.05
"""Mean difference over mean size, in float32 and in two-byte types, above which two paths do not compute the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A decoder and the path on which it is run."""

    decoder: PreTrainedModel
    is_packed: bool
    has_partial_last_layer: bool
    configs: tuple[Any, ...]
    """The configurations of its modules, in which transformers looks up the attention."""

    def active(self) -> AbstractContextManager[None]:
        """To be entered around a forward pass together with its backward pass."""
        return attending(self.configs) if self.is_packed else nullcontext()

    def __call__(self, input_N: Tensor, layout: Layout) -> Tensor:
        """The hidden states to read (R, D), row by row; from tokens (N), or hidden states of lower layers (N, D)."""
        if not self.is_packed:
            return _run_padded(self.decoder, input_N, layout)
        output = cast(Any, self.decoder)(
            **_named(input_N[None]), position_ids=layout.position_N[None], use_cache=False, layout=layout
        )
        read_R = layout.read_of_tails if self.has_partial_last_layer else layout.read_of_rows
        return _selected(output.last_hidden_state[0], read_R)


def reader_of(decoder: PreTrainedModel, *, partial_last_layer: bool = True) -> Reader:
    """The fastest path that agrees with the padded one. `partial_last_layer` allows the last layer to be partial."""
    owned: list[Any] = [getattr(module, "config", None) for module in decoder.modules()]
    configs = tuple({id(config): config for config in owned if hasattr(config, "_attn_implementation")}.values())
    padded = Reader(decoder=decoder, is_packed=False, has_partial_last_layer=False, configs=configs)
    # Whether the decoder hands further arguments, such as the layout, on to its attention.
    forwards_layout = getattr(decoder, "_supports_attention_backend", False)
    if not forwards_layout or any(config._attn_implementation != PLAIN for config in configs):
        return padded
    packed = replace(padded, is_packed=True)
    last = _partial_last_layer(decoder) if partial_last_layer else None
    candidates = [packed]
    if last is not None:
        whole: Any = decoder
        shortened = view(whole, [*whole.layers[:-1], last], norm=whole.norm)
        candidates.insert(0, replace(packed, decoder=shortened, has_partial_last_layer=True))
    chosen = next((candidate for candidate in candidates if _agree(candidate, padded)), padded)
    return _with_graphs(chosen) if chosen.has_partial_last_layer else chosen


def _with_graphs(reader: Reader) -> Reader:
    """The reader with all layers but the last as CUDA graphs, where they are compiled; else as it is."""
    decoder: Any = reader.decoder
    *lower, last = decoder.layers
    if decoder.device.type != "cuda" or not lower or lower[0]._compiled_call_impl is None:
        return reader
    return replace(reader, decoder=view(decoder, [CapturedLayers(lower), last], norm=decoder.norm))


def view(decoder: Any, layers: Sequence[nn.Module], *, norm: nn.Module) -> PreTrainedModel:
    """A decoder of the same class with these layers: a shallow copy, which shares rotary embeddings and settings."""
    twin = copy.copy(decoder)
    twin._modules = dict(decoder._modules)
    twin.layers = nn.ModuleList(layers)
    twin.norm = norm
    return twin


class PartialLastLayer(nn.Module):
    """The last layer of a decoder like Llama's, with queries from the tails only; keys and values come from everywhere.

    It calls the modules of `layer`, so that adapters on them and changes of their weights take effect. Whoever uses it
    compares it with the whole layer first: it knows nothing of what other architectures add. With recomputed
    activations its own are kept all the same: the backward pass begins with them.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], layout: Layout, **_: Any
    ) -> Tensor:
        """(1, N, D) to (1, M, D)."""
        layer: Any = self.layer
        attention: Any = layer.self_attn
        all_ND = layer.input_layernorm(hidden_states)[0]
        tail_MD = all_ND.index_select(0, layout.tail_M)
        cos_N1E, sin_N1E = (x[0, :, None] for x in position_embeddings)
        cos_M1E, sin_M1E = (x.index_select(0, layout.tail_M) for x in (cos_N1E, sin_N1E))
        query_MHE, key_NHE, value_NHE = (
            project(x).unflatten(-1, (-1, attention.head_dim))
            for project, x in ((attention.q_proj, tail_MD), (attention.k_proj, all_ND), (attention.v_proj, all_ND))
        )
        if hasattr(attention, "q_norm"):
            query_MHE, key_NHE = attention.q_norm(query_MHE), attention.k_norm(key_NHE)
        attended_MHE = packed_attention(
            _rotated(query_MHE, cos_M1E, sin_M1E),
            _rotated(key_NHE, cos_N1E, sin_N1E),
            value_NHE,
            layout.tails,
            layout.rows,
            dropout=attention.attention_dropout if attention.training else 0.0,
        )
        hidden_MD = hidden_states[0].index_select(0, layout.tail_M) + attention.o_proj(attended_MHE.flatten(-2))
        return (hidden_MD + layer.mlp(layer.post_attention_layernorm(hidden_MD)))[None]


def _partial_last_layer(decoder: Any) -> PartialLastLayer | None:
    """For the last layer of `decoder`; None for an architecture whose layers are not known.

    It is never compiled: that takes as long as all other layers together, which share one program, and gains 1 of N.
    """
    is_known = decoder.config.model_type in _PARTIAL_FAMILIES
    return PartialLastLayer(decoder.layers[-1]) if is_known else None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, with the two halves of a head apart."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def _run_padded(decoder: PreTrainedModel, input_N: Tensor, layout: Layout) -> Tensor:
    """Each row padded on the right, where causal attention does not reach."""
    rows, width = layout.shape
    flat = input_N.new_zeros(rows * width, *input_N.shape[1:]).index_copy(0, layout.place_N, input_N)
    output = cast(Any, decoder)(**_named(flat.unflatten(0, (rows, width))), use_cache=False)
    return _selected(output.last_hidden_state.flatten(0, 1).index_select(0, layout.place_N), layout.read_of_rows)


def _named(x: Tensor) -> dict[str, Tensor]:
    """Tokens and embeddings have arguments of their own in transformers."""
    return {"inputs_embeds" if x.is_floating_point() else "input_ids": x}


def _selected(hidden_ND: Tensor, read_R: Tensor | None) -> Tensor:
    return hidden_ND if read_R is None else hidden_ND.index_select(0, read_R)


@torch.no_grad()
def _agree(candidate: Reader, padded: Reader) -> bool:
    """Whether the two give the same hidden states, within rounding, for a few rows of random embeddings.

    In two-byte types rounding could hide that rows attend to each other: there, a change of one row must leave the
    others as they are to the last bit.
    """
    device, dtype = padded.decoder.device, padded.decoder.dtype
    layout = lay_out(torch.tensor(_PROBE_READ).bool(), device)
    shape = len(layout.place_N), padded.decoder.config.get_text_config().hidden_size
    probe_ND = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    changed_ND = probe_ND.clone()
    changed_ND[: layout.lengths[0]] *= -1
    with uncompiled(padded.decoder), uncompiled(candidate.decoder):
        expected_RD = padded(probe_ND, layout).float()
        try:
            with candidate.active():
                hidden_RD, changed_RD = (candidate(x_ND, layout).float() for x_ND in (probe_ND, changed_ND))
        except ModelError:  # its attention asks for more than packed attention knows
            return False
    is_narrow = dtype.itemsize == 2
    distance = (hidden_RD - expected_RD).abs().mean() / expected_RD.abs().mean()
    other_rows = slice(sum(_PROBE_READ[0]), None)
    is_separate = not is_narrow or torch.equal(hidden_RD[other_rows], changed_RD[other_rows])
    return distance.item() <= _MAX_DISTANCE[is_narrow] and is_separate


_MAX_PROGRAMS = 32
"""Of one block: roles that learn or are frozen, with gradients or without, rows of equal or of unequal lengths, each
first for one shape and then for all. They are a dozen; torch would stop at 8 and run the rest uncompiled."""


def compile_layers(model: PreTrainedModel) -> None:
    """Compile every transformer block in place; lengths that change make one more program, not one each."""
    dynamo = cast(Any, torch._dynamo)  # pyright: ignore[reportPrivateUsage]: it has no public settings
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, _MAX_PROGRAMS)
    for layer in _layers(model):
        layer.compile(dynamic=True)


@contextmanager
def uncompiled(model: PreTrainedModel) -> Generator[None]:
    """Inside of the block, the layers run uncompiled."""
    layers = _layers(model)
    compiled_calls = [layer._compiled_call_impl for layer in layers]
    for layer in layers:
        layer._compiled_call_impl = None
    try:
        yield
    finally:
        for layer, call in zip(layers, compiled_calls, strict=True):
            layer._compiled_call_impl = call


def _layers(model: PreTrainedModel) -> list[Any]:
    """The blocks of a decoder; a model without such a list has none to compile."""
    layers = getattr(cast(Any, model.get_decoder()), "layers", ())
    return list(layers) if isinstance(layers, nn.ModuleList) else []


@contextmanager
def evaluating(module: nn.Module) -> Generator[None]:
    """Evaluation mode (no dropout) inside of the block; afterwards, and after an error, the mode it had before.

    >>> layer = nn.Dropout().train()
    >>> with evaluating(layer):
    ...     print(layer.training)
    False
    >>> layer.training
    True
    """
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)
