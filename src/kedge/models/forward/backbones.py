"""From tokens to hidden states: a model of the role's own, an adapter on a shared base, or layers on a shared trunk.

Everything above (log-probs, values, scores, training) is the same for all three. Rows are right-padded, one sequence
each. Shape letters: B sequences, T token positions, N tokens of packed rows, R of them that are read, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kedge.core.errors import ModelError
from kedge.core.records import Experience, Rollouts, ValueTargets, cut, send, take, trimmed
from kedge.models.forward import sharding
from kedge.models.forward.lora import has_adapters, refusing_unused, required_adapters
from kedge.models.forward.packing import lay_out
from kedge.models.forward.reader import Reader, reader_of, view

T = TypeVar("T")
_PROBE_LENGTH = 8


class Backbone(Protocol):
    """`active` is entered around a forward pass together with its backward pass.

    `hidden` gives the hidden states (R, D) where `read_BT` is True, row by row. Both masks are on the host, from which
    the layout of the pass is made; tokens may be on either side.
    """

    def active(self) -> AbstractContextManager[None]: ...
    def hidden(self, tokens_BT: Tensor, attention_mask_BT: Tensor, read_BT: Tensor) -> Tensor: ...
    def computing(self, compute: Callable[[], T]) -> T:
        """What `compute` gives; the weights of the model outside of its layers, such as its head, are whole within."""
        ...

    def trainable(self) -> list[tuple[str, nn.Parameter]]: ...


class FullBackbone:
    """A model of the role's own."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._reader = _reader_of(model)

    def active(self) -> AbstractContextManager[None]:
        return self._reader.active()

    def hidden(self, tokens_BT: Tensor, attention_mask_BT: Tensor, read_BT: Tensor) -> Tensor:
        del attention_mask_BT  # causal: nothing after the last position that is read matters
        return self.computing(lambda: _read(self._reader, tokens_BT, read_BT))

    def computing(self, compute: Callable[[], T]) -> T:
        return sharding.computing(self.model, compute)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return _trainable(self.model)


class LoraBackbone:
    """A base that several roles share, with one of its adapters; without an adapter it is the base itself."""

    def __init__(self, model: PreTrainedModel, adapter: str | None) -> None:
        self.model = model
        self.adapter = adapter
        self._adapters = required_adapters(model)
        self._active = self._adapters.stack(adapter)
        self._reader = _reader_of(model)

    @contextmanager
    def active(self) -> Generator[None]:
        before = self._adapters.active
        self._adapters.activate(self._active)
        try:
            with self._reader.active():
                yield
        finally:
            self._adapters.activate(before)

    def hidden(self, tokens_BT: Tensor, attention_mask_BT: Tensor, read_BT: Tensor) -> Tensor:
        del attention_mask_BT  # causal: nothing after the last position that is read matters
        return self.computing(lambda: _read(self._reader, tokens_BT, read_BT))

    def computing(self, compute: Callable[[], T]) -> T:
        return sharding.computing(self.model, compute)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """The factors of the adapter; a score head is no part of the backbone."""
        if self.adapter is None:
            return []
        return [pair for pair in self._adapters.parameters(self.adapter) if ".lora_head." not in pair[0]]


class TrunkBackbone:
    """Upper layers of the role's own on a frozen trunk that several roles share."""

    def __init__(self, shared_trunk: SharedTrunk, top: PreTrainedModel, *, owner: nn.Module) -> None:
        """`owner` is the module whose trainable weights are this role's: the top, or the model that it is part of."""
        self._shared_trunk, self._owner = shared_trunk, owner
        self._reader = reader_of(top)

    @contextmanager
    def active(self) -> Generator[None]:
        with self._shared_trunk.active(), self._reader.active():
            yield

    def hidden(self, tokens_BT: Tensor, attention_mask_BT: Tensor, read_BT: Tensor) -> Tensor:
        layout = lay_out(read_BT, self._reader.decoder.device)
        rows = zip(self._shared_trunk.hidden(tokens_BT, attention_mask_BT), layout.lengths, strict=True)
        return self._reader(torch.cat([hidden_TD[:length] for hidden_TD, length in rows]), layout)

    def computing(self, compute: Callable[[], T]) -> T:
        return compute()  # a trunk is never sharded

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return _trainable(self._owner)


def backbone_of(model: PreTrainedModel, adapter: str | None = None) -> Backbone:
    """The backbone of a model of its own; with adapters, with this one or, without a name, the one that is active."""
    if not has_adapters(model):
        return FullBackbone(model)
    return LoraBackbone(model, adapter or required_adapters(model).active[-1])


def base_backbone_of(model: PreTrainedModel) -> Backbone:
    """The same without its adapters."""
    return LoraBackbone(model, None) if has_adapters(model) else FullBackbone(model)


@torch.no_grad()
def _reader_of(model: PreTrainedModel) -> Reader:
    decoder = model.get_decoder()
    if decoder is model:
        raise ModelError(
            f"{type(model).__name__}: transformers names no decoder of it, whose hidden states are read here; use "
            "another model"
        )
    with refusing_unused(model):
        return sharding.computing(model, lambda: reader_of(decoder))


def _read(reader: Reader, tokens_BT: Tensor, read_BT: Tensor) -> Tensor:
    device = reader.decoder.device
    layout = lay_out(read_BT, device)
    return reader(send(tokens_BT, device).flatten().index_select(0, layout.place_N), layout)


def _trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


class SharedTrunk:
    """The lower layers of a decoder, frozen, with a cache of their hidden states for one batch of rollouts.

    Rows are cached by their tokens, so that each is computed once for all roles, alone or among others. The trunk is a
    view: a decoder of the same class over the same layer modules. Trunk and top are compared with the whole decoder, so
    that a model which computes more between its layers is refused instead of being computed wrongly.
    """

    def __init__(self, model: PreTrainedModel, layers: int) -> None:
        decoder = _decoder(model)
        self.layers = layers
        self.num_layers = len(decoder.layers)
        if not 0 < layers < self.num_layers:
            raise ModelError(
                f"trunk: found {layers} shared layers, expected 1 to {self.num_layers - 1} of the {self.num_layers} of "
                f"{type(model).__name__}: each role needs a layer of its own"
            )
        _refuse_mixed_layers(model)
        trunk = view(decoder, decoder.layers[:layers], norm=nn.Identity())
        for module in trunk_modules(model, layers):
            module.requires_grad_(False)
        _check_split(model, trunk, top_of(model, layers))
        self._reader = reader_of(trunk, partial_last_layer=False)
        self._cache: dict[bytes, Tensor] = {}

    def active(self) -> AbstractContextManager[None]:
        """To be entered around `hidden`."""
        return self._reader.active()

    @torch.no_grad()
    def hidden(self, tokens_BT: Tensor, attention_mask_BT: Tensor) -> list[Tensor]:
        """The hidden states (T, D) of every row after the trunk; rows that were computed since `forget` are cached."""
        length_B = attention_mask_BT.sum(dim=1).tolist()
        rows = tokens_BT.cpu().numpy()
        keys = [rows[index, :length].tobytes() for index, length in enumerate(length_B)]
        missing = [index for index, key in enumerate(keys) if key not in self._cache]
        if missing:
            device = self._reader.decoder.device
            layout = lay_out(attention_mask_BT[missing], device)
            tokens_N = torch.from_numpy(rows[missing]).flatten().to(device).index_select(0, layout.place_N)
            hidden_ND = self._reader(tokens_N, layout)
            for index, hidden_TD in zip(missing, hidden_ND.split(layout.lengths), strict=True):
                self._cache[keys[index]] = hidden_TD
        return [self._cache[key] for key in keys]

    def forget(self) -> None:
        """Empty the cache. The trunk never changes: this is to free memory."""
        self._cache.clear()


def trunk_modules(model: PreTrainedModel, layers: int) -> list[nn.Module]:
    """The embedding and the lowest `layers`, which a trunk shares and freezes."""
    decoder = _decoder(model)
    return [decoder.embed_tokens, *decoder.layers[:layers]]


def top_of(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """The layers from `layers` on and the final norm, as a decoder over the same modules."""
    decoder = _decoder(model)
    return _without_embedding(view(decoder, decoder.layers[layers:], norm=decoder.norm))


def own_top(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """As `top_of`, with copies of the weights."""
    shared = top_of(model, layers)
    copies = [copy.deepcopy(layer) for layer in cast(Any, shared).layers]
    return _without_embedding(view(_decoder(model), copies, norm=copy.deepcopy(cast(Any, shared).norm)))


def same_trunk(model: PreTrainedModel, other: PreTrainedModel, layers: int) -> bool:
    """Whether two models have the same embeddings and the same weights in their lowest `layers`, to the last bit."""
    trunks = (trunk_modules(whole, layers) for whole in (model, other))
    return all(
        weight.shape == other_weight.shape and weight.dtype == other_weight.dtype and torch.equal(weight, other_weight)
        for module, other_module in zip(*trunks, strict=True)
        for weight, other_weight in zip(module.parameters(), other_module.parameters(), strict=True)
    )


def _without_embedding(decoder: PreTrainedModel) -> PreTrainedModel:
    """A top starts from hidden states; the embedding belongs to the trunk."""
    cast(Any, decoder).embed_tokens = None
    return decoder


def _decoder(model: PreTrainedModel) -> Any:
    decoder: Any = model.get_decoder()
    if not all(hasattr(decoder, name) for name in ("layers", "norm", "embed_tokens", "rotary_emb")):
        raise ModelError(
            f"{type(model).__name__} cannot be cut into a trunk and tops: its decoder has no layers, norm, "
            "embed_tokens and rotary_emb as Llama has; use roles: lora or separate"
        )
    return decoder


def _refuse_mixed_layers(model: PreTrainedModel) -> None:
    kinds = set(getattr(model.config, "layer_types", None) or ())
    if len(kinds) > 1:
        raise ModelError(
            f"{type(model).__name__} has layers of several kinds ({', '.join(sorted(kinds))}), which are told apart by "
            "their number: it cannot be cut into a trunk and tops; use roles: lora or separate"
        )


@torch.no_grad()
def _check_split(model: PreTrainedModel, trunk: PreTrainedModel, top: PreTrainedModel) -> None:
    """Trunk and top, one after the other, must give what the whole decoder gives, to the last bit."""
    probe_BT = torch.arange(_PROBE_LENGTH, device=model.device)[None] % model.config.get_text_config().vocab_size
    whole = _decoder(model)(input_ids=probe_BT, use_cache=False).last_hidden_state
    below = cast(Any, trunk)(input_ids=probe_BT, use_cache=False).last_hidden_state
    split = cast(Any, top)(inputs_embeds=below, use_cache=False).last_hidden_state
    if not torch.equal(whole, split):
        gap = (whole - split).abs().max().item()
        raise ModelError(
            f"{type(model).__name__} does more between its layers than a trunk and a top compute (they differ by "
            f"{gap:.3g}); use roles: lora or separate"
        )


RecordT = TypeVar("RecordT", Rollouts, Experience, ValueTargets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Generic[RecordT]):
    """The rows of one pass, as wide as the longest; their masks are on the host too, where passes are laid out."""

    record: RecordT
    index_R: Tensor
    """Their places in the whole record, on its device."""
    attention_mask_RT: Tensor
    response_mask_RT: Tensor

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return int(self.attention_mask_RT.sum())


def micro_batches(
    record: RecordT, *, rows: int | None = None, tokens: int | None = None, shares: int = 1
) -> list[Part[RecordT]]:
    """At most `rows` rows each, or `tokens` of their tokens, longest first; none larger than one of `shares` of all.

    Which rows share one changes speed and memory, never the sum of their losses. The host waits for the device once.
    """
    rollouts = record if isinstance(record, Rollouts) else record.rollouts
    attention_mask_BT, response_mask_BT = (
        torch.stack([rollouts.attention_mask_BT, rollouts.response_mask_BT]).cpu().unbind()
    )
    lengths: list[int] = attention_mask_BT.sum(dim=1).tolist()
    parts: list[Part[RecordT]] = []
    for indices in cut(range(len(lengths)), length=lengths.__getitem__, rows=rows, tokens=tokens, shares=shares):
        host_index_R, width = torch.tensor(indices), lengths[indices[0]]
        index_R = send(host_index_R, rollouts.tokens_BT.device)
        parts.append(
            Part(
                record=trimmed(take(record, index_R), width),
                index_R=index_R,
                attention_mask_RT=attention_mask_BT[host_index_R, :width],
                response_mask_RT=response_mask_BT[host_index_R, :width],
            )
        )
    return parts
