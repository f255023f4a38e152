"""From padded rows to the hidden states that are needed of them, on the cheapest of three paths that a decoder allows.

Packed, with the last layer computed only where its output is needed; packed; or padded, as transformers computes it. A
path is taken if it agrees with the padded one on a few probe rows, so that an unknown architecture is right, if slower.
Shape letters: B rows, T token positions, N tokens of packed rows, M of them in the tails that the last layer is
computed at, R of them whose hidden state is read, H heads, E width of a head, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Hashable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from logging import getLogger
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kedge.core.errors import ModelError
from kedge.models.forward.capture import CapturedLayers
from kedge.models.forward.layers import PLAIN as PLAIN_OPERATIONS
from kedge.models.forward.layers import PackedLayer, StreamNorm, operations_for
from kedge.models.forward.packing import PLAIN, Layout, attending, lay_out

_log = getLogger(__name__)
_PROBE_LENGTH = 8
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
    """The fastest path that agrees with the padded one. `partial_last_layer` allows the last layer to be partial.

    A decoder whose tokens see later ones is refused: to pad rows on the right would change what it computes.
    """
    owned: list[Any] = [getattr(module, "config", None) for module in decoder.modules()]
    configs = tuple({id(config): config for config in owned if hasattr(config, "_attn_implementation")}.values())
    padded = Reader(decoder=decoder, is_packed=False, has_partial_last_layer=False, configs=configs)
    _refuse_looking_ahead(decoder)
    # Whether the decoder hands further arguments, such as the layout, on to its attention.
    forwards_layout = getattr(decoder, "_supports_attention_backend", False)
    if not forwards_layout or any(config._attn_implementation != PLAIN for config in configs):
        return padded
    packed = replace(padded, is_packed=True)
    candidates = [*_in_own_layers(packed, partial_last_layer=partial_last_layer), packed]
    chosen = next((candidate for candidate in candidates if _agree(candidate, padded)), padded)
    if chosen is not candidates[0]:
        path = "packed through the layers of transformers" if chosen.is_packed else "padded"
        _log.warning("%s: rows run %s, which is slower: our own way gives something else", type(decoder).__name__, path)
    return _with_graphs(chosen)


def _in_own_layers(packed: Reader, *, partial_last_layer: bool) -> list[Reader]:
    """The decoder in layers of our own where it may be one that they know: all of them on a GPU, or the last one."""
    decoder: Any = packed.decoder
    operations = operations_for(decoder)
    if operations is None or (operations is PLAIN_OPERATIONS and not partial_last_layer):
        return []
    is_fused = operations is not PLAIN_OPERATIONS
    *lower, last = decoder.layers
    layers = [PackedLayer(layer, operations, tails=False) if is_fused else layer for layer in lower]
    layers.append(PackedLayer(last, operations, tails=partial_last_layer))
    has_norm = not isinstance(decoder.norm, nn.Identity)
    norm = StreamNorm(decoder.norm, operations) if is_fused and has_norm else decoder.norm
    return [replace(packed, decoder=view(decoder, layers, norm=norm), has_partial_last_layer=partial_last_layer)]


def _with_graphs(reader: Reader) -> Reader:
    """The reader with all layers but the last as CUDA graphs, where they are our own and compiled; else as it is."""
    decoder: Any = reader.decoder
    lower = list(getattr(decoder, "layers", ()))[:-1]
    if not lower or not isinstance(lower[0], PackedLayer) or lower[0].layer._compiled_call_impl is None:
        return reader
    if lower[0].is_sharded:  # a graph would read weights where they no longer are
        return reader
    last = decoder.layers[-1]
    return replace(reader, decoder=view(decoder, [CapturedLayers(lower), last], norm=decoder.norm))


def view(decoder: Any, layers: Sequence[nn.Module], *, norm: nn.Module | None = None) -> PreTrainedModel:
    """A decoder of the same class with these layers, and with this last norm if one is given: a shallow copy, which
    shares rotary embeddings and settings."""
    twin = copy.copy(decoder)
    twin._modules = dict(decoder._modules)
    twin.layers = nn.ModuleList(layers)
    if norm is not None:
        twin.norm = norm
    return twin


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


def _agree(candidate: Reader, padded: Reader) -> bool:
    """Whether the two compute the same, within rounding: one layer of each kind by itself.

    Rounding in two-byte types grows with every layer, in some models to more than any mistake would make: a whole
    decoder of them cannot be told from a wrong one.
    """
    layers, plain_layers = ([*getattr(reader.decoder, "layers", ())] for reader in (candidate, padded))
    if not layers:
        return _gives_the_same(candidate, padded)
    kinds = {_kind(layer): place for place, layer in reversed([*enumerate(plain_layers)][:-1])}
    places = [*kinds.values(), len(layers) - 1]
    return all(
        _gives_the_same(_of_layer(candidate, layers[place]), _of_layer(padded, plain_layers[place])) for place in places
    )


def _kind(layer: nn.Module) -> Hashable:
    """Equal for layers that compute the same with other numbers."""
    shapes = tuple((name, weight.shape) for name, weight in layer.named_parameters())
    return type(layer), getattr(layer, "attention_type", None), shapes


def _of_layer(reader: Reader, layer: nn.Module) -> Reader:
    """One layer of a decoder; the last one with the norm after it, which would hide how large the others' output is.
    A decoder whose norm has another name keeps it after each."""
    decoder: Any = reader.decoder
    is_last = layer is decoder.layers[-1]
    one_layer = view(decoder, [layer], norm=None if is_last or not hasattr(decoder, "norm") else nn.Identity())
    return replace(reader, decoder=one_layer, has_partial_last_layer=reader.has_partial_last_layer and is_last)


@torch.no_grad()
def _refuse_looking_ahead(decoder: PreTrainedModel) -> None:
    """An error where another last token changes the hidden states before it."""
    probe_TD = _probe(decoder, _PROBE_LENGTH)
    rows_2TD = torch.stack([probe_TD, torch.cat([probe_TD[:-1], -probe_TD[-1:]])])
    with uncompiled(decoder), evaluating(decoder):
        hidden_TD, changed_TD = cast(Any, decoder)(inputs_embeds=rows_2TD, use_cache=False).last_hidden_state[:, :-1]
    if not _is_near(changed_TD, hidden_TD):
        raise ModelError(
            f"{type(decoder).__name__}: its tokens see those after them, so it cannot learn to predict them; expected "
            "a decoder, whose tokens see those before them alone"
        )


def _probe(decoder: PreTrainedModel, num_tokens: int) -> Tensor:
    """Random embeddings, as wide as the decoder's own: in some models they are narrower than its layers."""
    embedding = getattr(decoder, "embed_tokens", None)
    width = getattr(embedding, "embedding_dim", None) or decoder.config.get_text_config().hidden_size
    probe_ND = torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(0))
    return probe_ND.to(decoder.device, decoder.dtype)


def _is_near(x: Tensor, expected: Tensor) -> bool:
    """Whether two results are the same within rounding."""
    distance = (x.float() - expected.float()).abs().mean() / expected.float().abs().mean()
    return distance.item() <= _MAX_DISTANCE[expected.dtype.itemsize == 2]


@torch.no_grad()
def _gives_the_same(candidate: Reader, padded: Reader) -> bool:
    """Whether the two give the same hidden states, within rounding, for a few rows of random embeddings.

    In two-byte types rounding could hide that rows attend to each other: there, a change of one row must leave the
    others as they are to the last bit.
    """
    layout = lay_out(torch.tensor(_PROBE_READ).bool(), padded.decoder.device)
    probe_ND = _probe(padded.decoder, len(layout.place_N))
    changed_ND = probe_ND.clone()
    changed_ND[: layout.lengths[0]] *= -1
    with uncompiled(padded.decoder), uncompiled(candidate.decoder):
        expected_RD = padded(probe_ND, layout)
        try:
            with candidate.active():
                hidden_RD, changed_RD = (candidate(x_ND, layout) for x_ND in (probe_ND, changed_ND))
        except ModelError:  # its attention asks for more than packed attention knows
            return False
    is_narrow = probe_ND.dtype.itemsize == 2
    other_rows = slice(sum(_PROBE_READ[0]), None)
    is_separate = not is_narrow or torch.equal(hidden_RD[other_rows], changed_RD[other_rows])
    return _is_near(hidden_RD, expected_RD) and is_separate


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
