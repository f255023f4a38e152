"""How a role gets from tokens to hidden states: a model of its own, an adapter on a shared one, or a top on a trunk.

Everything above (log-probs, values, scores, learning) is the same for all three. Rows are right-padded, one sequence
each. Shape letters: B sequences, T token positions, R of them that are read, D width.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from kedge.models.forward.lora import base_of
from kedge.models.forward.packing import lay_out
from kedge.models.forward.reader import reader_of
from kedge.models.roles.shared_trunk import SharedTrunk


class Backbone(Protocol):
    """`active` is entered around a forward pass together with its backward pass.

    `hidden` gives the hidden states (R, D) where `read_BT` is True, row by row.
    """

    def active(self) -> AbstractContextManager[None]: ...
    def hidden(self, tokens_BT: Tensor, attention_mask_BT: Tensor, read_BT: Tensor) -> Tensor: ...
    def trainable(self) -> list[tuple[str, nn.Parameter]]: ...


class FullBackbone:
    """A model of its own."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._reader = reader_of(model.get_decoder())

    def active(self) -> AbstractContextManager[None]:
        return self._reader.active()

    def hidden(self, tokens_BT: Tensor, attention_mask_BT: Tensor, read_BT: Tensor) -> Tensor:
        del attention_mask_BT  # nothing behind the last position that is read is seen
        layout = lay_out(read_BT)
        return self._reader(tokens_BT.flatten()[layout.place_N], layout)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, one) for name, one in self.model.named_parameters() if one.requires_grad]


class LoraBackbone:
    """A base that several roles share, under one of its adapters, or under none: then it is the base itself."""

    def __init__(self, model: PeftModel, adapter: str | None) -> None:
        self.model = model
        self.adapter = adapter
        self._reader = reader_of(base_of(model).get_decoder())

    @contextmanager
    def active(self) -> Generator[None]:
        with _only(self.model, self.adapter), self._reader.active():
            yield

    def hidden(self, tokens_BT: Tensor, attention_mask_BT: Tensor, read_BT: Tensor) -> Tensor:
        del attention_mask_BT  # nothing behind the last position that is read is seen
        layout = lay_out(read_BT)
        return self._reader(tokens_BT.flatten()[layout.place_N], layout)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        mine = f".{self.adapter}."
        return [(name, one) for name, one in self.model.named_parameters() if ".lora_" in name and mine in name]


class TrunkBackbone:
    """Upper layers of its own on a frozen trunk that several roles share."""

    def __init__(self, cut: SharedTrunk, top: PreTrainedModel, *, names: nn.Module) -> None:
        """`names` is the module whose trainable weights are this role's (the top, or the whole model it is of)."""
        self._cut, self._names = cut, names
        self._reader = reader_of(top)

    @contextmanager
    def active(self) -> Generator[None]:
        with self._cut.active(), self._reader.active():
            yield

    def hidden(self, tokens_BT: Tensor, attention_mask_BT: Tensor, read_BT: Tensor) -> Tensor:
        layout = lay_out(read_BT)
        rows = zip(self._cut.below(tokens_BT, attention_mask_BT), layout.lengths, strict=True)
        return self._reader(torch.cat([hidden_TD[:length] for hidden_TD, length in rows]), layout)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, one) for name, one in self._names.named_parameters() if one.requires_grad]


@contextmanager
def _only(model: PeftModel, adapter: str | None) -> Generator[None]:
    """Within, `adapter` answers (none: the base). What is trainable stays so; afterwards the adapter before answers."""
    before = cast(str, model.active_adapter)
    trainable = [(one, one.requires_grad) for one in model.parameters()]
    try:
        if adapter is None:
            with model.disable_adapter():
                _restore(trainable)
                yield
        else:
            _switch(model, adapter, trainable)
            yield
    finally:
        _switch(model, before, trainable)
        _restore(trainable)


def _switch(model: PeftModel, adapter: str, trainable: list[tuple[nn.Parameter, bool]]) -> None:
    if model.active_adapter != adapter:
        model.set_adapter(adapter)
        _restore(trainable)


def _restore(trainable: list[tuple[nn.Parameter, bool]]) -> None:
    """peft freezes the adapters that do not answer; here each belongs to a role that learns in its turn."""
    for one, flag in trainable:
        if one.requires_grad != flag:
            one.requires_grad_(flag)


def device_of(body: Backbone) -> torch.device:
    return body.trainable()[0][1].device
