"""A decoder cut in two: a trunk of lower layers that is frozen and computed once a sequence, and tops above it.

The cut is a view: trunk and tops are decoders of the same class over the same layer modules. It is checked by a
forward of both against the whole, so that a model which does more between its layers is refused, not miscomputed.
Shape letters: B sequences, T token positions, D width.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kedge.core.errors import ModelError
from kedge.models.forward.packing import lay_out
from kedge.models.forward.reader import reader_of
from kedge.models.forward.views import view

_PROBE_LENGTH = 8


class SharedTrunk:
    """The trunk of a decoder, with a memory of the rows of one batch of rollouts.

    A row is known by its tokens, so that a row is computed once whoever asks for it, alone or among others.
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
        for part in (decoder.embed_tokens, *decoder.layers[:layers]):
            part.requires_grad_(False)
        _check_cut(model, trunk, top_of(model, layers))
        self._reader = reader_of(trunk, with_tail=False)
        self._rows: dict[bytes, Tensor] = {}

    def active(self) -> AbstractContextManager[None]:
        """To be entered around `below`."""
        return self._reader.active()

    @torch.no_grad()
    def below(self, tokens_BT: Tensor, attention_mask_BT: Tensor) -> list[Tensor]:
        """The trunk's hidden states (T, D) of every row, from memory where it was seen since the last `forget`."""
        length_B = attention_mask_BT.sum(dim=1).tolist()
        rows = tokens_BT.cpu().numpy()
        keys = [rows[index, :length].tobytes() for index, length in enumerate(length_B)]
        new = [index for index, key in enumerate(keys) if key not in self._rows]
        if new:
            layout = lay_out(attention_mask_BT[new])
            hidden_ND = self._reader(tokens_BT[new].flatten()[layout.place_N], layout)
            for index, hidden_TD in zip(new, hidden_ND.split(layout.lengths), strict=True):
                self._rows[keys[index]] = hidden_TD
        return [self._rows[key] for key in keys]

    def forget(self) -> None:
        """The trunk never changes; only the room is needed again."""
        self._rows.clear()


def top_of(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """The layers from `layers` on and the final norm, as a decoder over the same modules."""
    decoder = _decoder(model)
    return _without_embedding(view(decoder, decoder.layers[layers:], norm=decoder.norm))


def own_top(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """The same with weights of its own."""
    shared = top_of(model, layers)
    parts = [copy.deepcopy(layer) for layer in cast(Any, shared).layers]
    return _without_embedding(view(_decoder(model), parts, norm=copy.deepcopy(cast(Any, shared).norm)))


def same_trunk(model: PreTrainedModel, other: PreTrainedModel, layers: int) -> bool:
    """Whether two models have the same weights up to and including layer `layers`, to the last bit."""
    mine, theirs = ([*_decoder(one).layers[:layers], _decoder(one).embed_tokens] for one in (model, other))
    pairs = zip(mine, theirs, strict=True)
    return all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
        for one, two in pairs
        for a, b in zip(one.parameters(), two.parameters(), strict=True)
    )


def _without_embedding(decoder: PreTrainedModel) -> PreTrainedModel:
    """A top reads hidden states; the embedding below belongs to the trunk."""
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
def _check_cut(model: PreTrainedModel, trunk: PreTrainedModel, top: PreTrainedModel) -> None:
    probe_BT = torch.arange(_PROBE_LENGTH, device=model.device)[None] % model.config.get_text_config().vocab_size
    whole = _decoder(model)(input_ids=probe_BT, use_cache=False).last_hidden_state
    below = cast(Any, trunk)(input_ids=probe_BT, use_cache=False).last_hidden_state
    cut = cast(Any, top)(inputs_embeds=below, use_cache=False).last_hidden_state
    if not torch.equal(whole, cut):
        gap = (whole - cut).abs().max().item()
        raise ModelError(
            f"{type(model).__name__} does more between its layers than a trunk and a top compute (they differ by "
            f"{gap:.3g}); use roles: lora or separate"
        )
