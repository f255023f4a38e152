"""A decoding step, one more token for every row that has a slot: forward, draw, record. Here module by module.

Runs any model that `for_decoding` takes, on any device; the faster steps of `graphs` are tested against it.
Shape letters: R slots, T positions, S columns, D width, V vocabulary, F numbers a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kedge.algorithms.logprobs import logits_of
from kedge.rollout.cache import RowCache
from kedge.rollout.settings import SamplingSettings


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
        scaled_RV = logits_of(hidden_RD, self.head_VD) / settings.temperature
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


State: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""The host's copy of `Slots.state_FR`."""

FIELDS = ("token", "column", "drawn", "key", "place", "alive", "at")
TOKEN, COLUMN, DRAWN, KEY, PLACE, ALIVE, AT = range(len(FIELDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """`state_FR` in the order of FIELDS: the last token and its column, how many tokens the answer has, the row's key,
    its place in the cache, 1 while it grows, and the steps since the last look; then what those steps drew."""

    state_FR: Tensor
    token_KR: Tensor
    logp_KR: Tensor

    @property
    def token_R(self) -> Tensor:
        return self.state_FR[TOKEN]

    @property
    def column_R(self) -> Tensor:
        return self.state_FR[COLUMN]

    @property
    def drawn_R(self) -> Tensor:
        return self.state_FR[DRAWN]

    @property
    def key_R(self) -> Tensor:
        return self.state_FR[KEY]

    @property
    def place_R(self) -> Tensor:
        return self.state_FR[PLACE]

    @property
    def alive_R(self) -> Tensor:
        return self.state_FR[ALIVE]

    @property
    def at_R(self) -> Tensor:
        return self.state_FR[AT]

    def first(self, rows: int) -> Slots:
        """The first slots, over the same memory."""
        return Slots(state_FR=self.state_FR[:, :rows], token_KR=self.token_KR[:, :rows], logp_KR=self.logp_KR[:, :rows])


def empty_slots(rows: int, steps: int, device: torch.device) -> Slots:
    return Slots(
        state_FR=torch.zeros(len(FIELDS), rows, dtype=torch.int64, device=device),
        token_KR=torch.zeros(steps, rows, dtype=torch.int64, device=device),
        logp_KR=torch.zeros(steps, rows, dtype=torch.float32, device=device),
    )


def no_rows(rows: int) -> State:
    """No row in any slot, and each slot at a place of its own.

    >>> no_rows(3)[PLACE].tolist(), no_rows(3)[ALIVE].tolist()
    ([0, 1, 2], [0, 0, 0])
    """
    state_FR = np.zeros((len(FIELDS), rows), dtype=np.int64)
    state_FR[PLACE] = np.arange(rows)
    return state_FR


def advance(slots: Slots, token_R: Tensor, logp_R: Tensor, stop_V: Tensor, *, most: int) -> None:
    """Record the drawn tokens; growing rows take theirs, and end with a stop token or once they have `most` tokens."""
    row_R = torch.arange(len(token_R), device=token_R.device)
    slots.token_KR[slots.at_R, row_R] = token_R
    slots.logp_KR[slots.at_R, row_R] = logp_R
    slots.at_R.add_(1)
    alive_R = slots.alive_R.clone()
    slots.token_R.copy_(torch.where(alive_R.bool(), token_R, slots.token_R))
    slots.column_R.add_(alive_R)
    slots.drawn_R.add_(alive_R)
    ended_R = stop_V[token_R] | (slots.drawn_R >= most)
    slots.alive_R.mul_(~ended_R)


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def row_keys(seed: int, group_B: Tensor, answer_B: Tensor) -> Tensor:
    """One int64 key a row, from the seed, the prompt's id and the answer's index, on the device of `group_B`."""
    start = torch.tensor((seed + 2**63) % 2**64 - 2**63, device=group_B.device)
    return folded(folded(_mixed(start), group_B), answer_B)


def folded(key_B: Tensor, number_B: Tensor) -> Tensor:
    """A key of its own for each number under a key."""
    return _mixed(key_B + (number_B + 1) * _GOLDEN)


def draw(scaled_BV: Tensor, key_B: Tensor, *, top_k: int | None, top_p: float) -> Tensor:
    """One token a row, from softmax(scaled) limited to the allowed tokens."""
    if top_k is not None or top_p < 1:
        scaled_BV = scaled_BV.masked_fill(~allowed(scaled_BV, top_k=top_k, top_p=top_p), -torch.inf)
    return (scaled_BV - log_waits(key_B, scaled_BV.shape[1])).argmax(-1)


def allowed(scaled_BV: Tensor, *, top_k: int | None, top_p: float) -> Tensor:
    """True on the `top_k` likeliest tokens, and of those on the smallest set with at least `top_p` of their mass.

    Among equally likely tokens the lower id goes first.

    >>> scaled_BV = torch.tensor([[1.0, 4.0, 2.0, 1.0]]).log()  # probabilities 1/8, 1/2, 1/4, 1/8
    >>> allowed(scaled_BV, top_k=3, top_p=1.0).tolist(), allowed(scaled_BV, top_k=None, top_p=0.5).tolist()
    ([[True, True, True, False]], [[False, True, False, False]])
    """
    keep_BV = torch.ones_like(scaled_BV, dtype=torch.bool)
    if top_k is not None and top_k < scaled_BV.shape[1]:
        keep_BV = _likeliest(scaled_BV, top_k)
    if top_p < 1:
        keep_BV &= _nucleus(scaled_BV.masked_fill(~keep_BV, -torch.inf), top_p)
    return keep_BV


def log_waits(key_B: Tensor, size: int) -> Tensor:
    """log E for independent exponential times E, `size` of them a row: minus a Gumbel variable, in float32 (B, V).

    E = -log(1 - u) keeps its precision where it is short, and the shortest waits are those that win.
    """
    counter_V = torch.arange(1, size + 1, device=key_B.device) * _GOLDEN
    bits_BV = _mixed(key_B[:, None] + counter_V)
    uniform_BV = _shifted(bits_BV, 11).to(torch.float32).add_(0.5).mul_(2.0**-53)
    # In float32 the largest numbers round to 1, and would wait for ever.
    return uniform_BV.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_().log_()


def _likeliest(scaled_BV: Tensor, count: int) -> Tensor:
    count_B1 = torch.full_like(scaled_BV[:, :1], count, dtype=torch.int64)
    return _first(scaled_BV, scaled_BV.topk(count).values[:, -1:], count_B1)


def _nucleus(scaled_BV: Tensor, mass: float) -> Tensor:
    # float64: a sum of 100 thousand float32 probabilities would be off by more than the rarest of them.
    top_B1 = scaled_BV.amax(-1, keepdim=True).double()
    weight_BV = (scaled_BV.double() - top_B1).exp_()
    total_B1 = weight_BV.sum(-1, keepdim=True)
    # Tokens rarer than (1 - mass) / V hold less than 1 - mass between them: none of them needs to be sorted.
    rare_B1 = total_B1 * ((1 - mass) / scaled_BV.shape[1])
    size = int((weight_BV >= rare_B1).sum(-1).max())
    ordered_BK = scaled_BV.topk(size).values
    reached_BK = (ordered_BK.double() - top_B1).exp_().cumsum(-1)
    # Rounding may leave even the last sum short: then all of these are taken.
    last_B1 = (reached_BK < mass * total_B1).sum(-1, keepdim=True).clamp_(max=size - 1)
    return _first(scaled_BV, ordered_BK.gather(1, last_B1), last_B1 + 1)


def _first(scaled_BV: Tensor, last_B1: Tensor, count_B1: Tensor) -> Tensor:
    """True on the `count` likeliest tokens, where the last of them has logit `last`; the lower ids of those with it."""
    above_BV, tied_BV = scaled_BV > last_B1, scaled_BV == last_B1
    room_B1 = count_B1 - above_BV.sum(-1, keepdim=True)
    return above_BV | (tied_BV & (tied_BV.cumsum(-1) <= room_B1))


def _mixed(x: Tensor) -> Tensor:
    """The output function of SplitMix64: 64 bits in, 64 well-mixed bits out. int64 products wrap around."""
    x = _shifted(x, 30).bitwise_xor_(x).mul_(_MIX_1)
    x = _shifted(x, 27).bitwise_xor_(x).mul_(_MIX_2)
    return _shifted(x, 31).bitwise_xor_(x)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left: torch only knows signed integers of 64 bits."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
