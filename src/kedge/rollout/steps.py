"""A decoding step, one more token for every row that has a slot: forward, draw, record. Here module by module.

Runs any model that `for_decoding` takes, on any device; the faster steps of `graphs` are tested against it.
Shape letters: R slots, T positions, S columns, D width, V vocabulary, F numbers a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from kedge.rollout.cache import RowCache
from kedge.rollout.sampling import draw, folded
from kedge.rollout.settings import SamplingSettings
from kedge.rollout.slots import Slots, State, advance, empty_slots


class Steps(Protocol):
    """Runs decoding steps over a cache and its slots."""

    @property
    def cache(self) -> RowCache: ...

    @property
    def slots(self) -> Slots: ...

    def step(self, rows: int, filled: int) -> None:
        """One more token for the first slots, whose rows have at most `filled` tokens so far."""
        ...

    def relocate(self, state_FR: State, source: list[int], target: list[int]) -> None:
        """The rows of some slots take the slots of others, which are free; the host's state is changed in place."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """How hidden states become tokens."""

    head_VD: Tensor
    stop_V: Tensor
    settings: SamplingSettings

    @property
    def is_limited(self) -> bool:
        return self.settings.top_k is not None or self.settings.top_p < 1

    def draw(self, hidden_RD: Tensor, key_R: Tensor, drawn_R: Tensor) -> tuple[Tensor, Tensor]:
        """A token for each row, and its log-prob among all tokens; `drawn_R` tokens of the answer came before it."""
        settings = self.settings
        scaled_RV = linear(hidden_RD, self.head_VD).float() / settings.temperature
        open_RV = scaled_RV
        if settings.min_new_tokens:
            open_RV = scaled_RV.masked_fill(self.stop_V & (drawn_R < settings.min_new_tokens)[:, None], -torch.inf)
        token_R = draw(open_RV, folded(key_R, drawn_R), top_k=settings.top_k, top_p=settings.top_p)
        return token_R, scaled_RV.gather(1, token_R[:, None])[:, 0] - scaled_RV.logsumexp(-1)

    def draw_and_advance(self, slots: Slots, hidden_RD: Tensor) -> None:
        token_R, logp_R = self.draw(hidden_RD, slots.key_R, slots.drawn_R)
        advance(slots, token_R, logp_R, self.stop_V, most=self.settings.max_new_tokens)


def last_hidden(
    model: PreTrainedModel, cache: RowCache, tokens_RT: Tensor, positions_RT: Tensor, mask: Tensor | None
) -> Tensor:
    backbone: Any = model.get_decoder()
    output = backbone(
        input_ids=tokens_RT, position_ids=positions_RT, attention_mask=mask, past_key_values=cache, use_cache=True
    )
    return output.last_hidden_state


class EagerSteps:
    """A row's place in the cache is its slot, so attention reads the cache as it lies; rows that move are copied."""

    def __init__(self, model: PreTrainedModel, sampler: Sampler, *, places: int, columns: int, window: int) -> None:
        self._model, self._sampler = model, sampler
        self.cache = RowCache(places, columns)
        self.slots = empty_slots(places, window, model.device)

    def step(self, rows: int, filled: int) -> None:
        slots, filled = self.slots.first(rows), min(filled, self.cache.columns)
        own_RS = torch.arange(filled, device=slots.column_R.device) <= slots.column_R[:, None]
        self.cache.at_tokens(slots.column_R, filled)
        hidden_R1D = last_hidden(
            self._model, self.cache, slots.token_R[:, None], slots.column_R[:, None], own_RS[:, None, None]
        )
        self._sampler.draw_and_advance(slots, hidden_R1D[:, 0])

    def relocate(self, state_FR: State, source: list[int], target: list[int]) -> None:
        del state_FR
        self.cache.move(source, target)
