"""From rows to the hidden states that are read of them, by the cheapest of three ways that a decoder allows.

Packed, with the last layer only where something is read; packed; or padded, as transformers computes it. A way is taken
if it agrees with the padded one on a few rows, so that a model which does more is computed right, if not fast.
Shape letters: B rows, T token positions, N tokens of rows laid end to end, R of them that are read, D width.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kedge.core.errors import ModelError
from kedge.models.forward.compiling import uncompiled
from kedge.models.forward.packed_attention import PLAIN, attending
from kedge.models.forward.packing import Layout, lay_out
from kedge.models.forward.partial_last_layer import tail_of
from kedge.models.forward.views import view

_PROBE_READ = ((0, 0, 1, 1, 1), (0, 1, 0, 0, 0), (1, 1, 0, 1, 0))
_FAR = 1e-4, 0.05
"""Mean distance over mean size, in float32 and in two-byte types, beyond which two ways do not compute the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A decoder, and how it reads."""

    decoder: PreTrainedModel
    is_packed: bool
    has_tail: bool
    configs: tuple[Any, ...]
    """The settings of its layers."""

    def active(self) -> AbstractContextManager[None]:
        """To be entered around a forward pass together with its backward pass."""
        return attending(self.configs) if self.is_packed else nullcontext()

    def __call__(self, input_N: Tensor, layout: Layout) -> Tensor:
        """Hidden states (R, D) where they are read, row by row; from tokens (N) or from hidden states below (N, D)."""
        if not self.is_packed:
            return _padded(self.decoder, input_N, layout)
        output = cast(Any, self.decoder)(
            **_named(input_N[None]), position_ids=layout.position_N[None], use_cache=False, layout=layout
        )
        return _picked(output.last_hidden_state[0], layout.read_of_tails if self.has_tail else layout.read_of_rows)


def reader_of(decoder: PreTrainedModel, *, with_tail: bool = True) -> Reader:
    """The first way that agrees with the padded one. Without `with_tail` all layers are computed everywhere."""
    found: list[Any] = [getattr(one, "config", None) for one in decoder.modules()]
    configs = tuple({id(one): one for one in found if hasattr(one, "_attn_implementation")}.values())
    padded = Reader(decoder=decoder, is_packed=False, has_tail=False, configs=configs)
    is_open = getattr(decoder, "_supports_attention_backend", False)  # hands what it is given on to its attention
    if not is_open or any(config._attn_implementation != PLAIN for config in configs):
        return padded
    packed = replace(padded, is_packed=True)
    tail = tail_of(decoder) if with_tail else None
    ways = [packed]
    if tail is not None:
        whole: Any = decoder
        ways.insert(0, replace(packed, decoder=view(whole, [*whole.layers[:-1], tail], norm=whole.norm), has_tail=True))
    return next((way for way in ways if _agree(way, padded)), padded)


def _padded(decoder: PreTrainedModel, input_N: Tensor, layout: Layout) -> Tensor:
    """One row each, padded on the right: nothing sees what lies behind it."""
    rows, width = layout.shape
    flat = input_N.new_zeros(rows * width, *input_N.shape[1:]).index_copy(0, layout.place_N, input_N)
    output = cast(Any, decoder)(**_named(flat.unflatten(0, (rows, width))), use_cache=False)
    return _picked(output.last_hidden_state.flatten(0, 1).index_select(0, layout.place_N), layout.read_of_rows)


def _named(x: Tensor) -> dict[str, Tensor]:
    return {"inputs_embeds" if x.is_floating_point() else "input_ids": x}


def _picked(hidden_ND: Tensor, read_R: Tensor | None) -> Tensor:
    return hidden_ND if read_R is None else hidden_ND.index_select(0, read_R)


@torch.no_grad()
def _agree(way: Reader, plain: Reader) -> bool:
    """On a few rows of random numbers they come close to each other.

    In two-byte types rounding could hide that rows see each other: there a row must not depend on another one at all.
    """
    device, dtype = plain.decoder.device, plain.decoder.dtype
    layout = lay_out(torch.tensor(_PROBE_READ, device=device).bool())
    shape = len(layout.place_N), plain.decoder.config.get_text_config().hidden_size
    probe_ND = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    changed_ND = probe_ND.clone()
    changed_ND[: layout.lengths[0]] *= -1
    with uncompiled(plain.decoder), uncompiled(way.decoder):
        expected_RD = plain(probe_ND, layout).float()
        try:
            with way.active():
                found_RD, beside_RD = way(probe_ND, layout).float(), way(changed_ND, layout).float()
        except ModelError:  # its attention asks for more than packed attention knows
            return False
    is_narrow = dtype.itemsize == 2
    far = (found_RD - expected_RD).abs().mean() / expected_RD.abs().mean()
    others = slice(sum(_PROBE_READ[0]), None)
    return far.item() <= _FAR[is_narrow] and (not is_narrow or torch.equal(found_RD[others], beside_RD[others]))
