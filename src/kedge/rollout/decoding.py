"""One batch on its way from prompts to rollouts: rows wait, take a slot, grow by a token a step, and leave.

A step's numbers stay on the device; the host only learns which rows ended. Where a bucket has more places than there
are rows, one row more than was asked for stands in, and is thrown away at the end.
Shape letters: B rows, T positions, R slots in use, S columns, U distinct prompts, D width, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from kedge.core.errors import NumericsError
from kedge.core.records import Rollouts
from kedge.models import heads
from kedge.rollout.cache import RowCache
from kedge.rollout.prompts import Prompts
from kedge.rollout.sampling import draw, folded, row_keys
from kedge.rollout.settings import SamplingSettings

_REFILL_SHARE = 8
"""Rows that wait are let in when one slot in so many is free: a forward of few prompts costs nearly one of many."""


class Decoding:
    """A row that ends gives its slot to the last one, so the slots in use are always the first, and only those are run;
    the free ones go to rows that wait. Nothing that is sampled depends on any of it."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Prompts,
        settings: SamplingSettings,
        *,
        seed: int,
        stop_ids: Collection[int],
        pad: int,
        decode: Callable[[list[int]], str] | None,
        buckets: Sequence[int],
    ) -> None:
        device = model.device
        self._backbone: Any = model.get_decoder()
        self._head_VD = heads.lm_head(model)
        self._prompts, self._settings, self._decode, self._buckets = prompts, settings, decode, buckets
        lengths = [*map(len, prompts.tokens), 1]
        width = max(lengths) + settings.max_new_tokens
        rows = [[*tokens, *[pad] * (width - len(tokens))] for tokens in (*prompts.tokens, (pad,))]
        self._tokens_BT = torch.tensor(rows, device=device)
        self._logp_BT = torch.zeros_like(self._tokens_BT, dtype=torch.float32)
        self._prompt_B = torch.tensor(lengths, device=device)
        self._length_B = self._prompt_B.clone()
        group_B, answer_B = (torch.tensor([*ids, 0], device=device) for ids in (prompts.group, prompts.answer))
        self._key_B = row_keys(seed, group_B, answer_B)
        self._stop_V = torch.zeros(len(self._head_VD), dtype=torch.bool, device=device)
        self._stop_V[sorted(stop_ids)] = True

        places = _bucket(min(buckets[-1], len(prompts.tokens)), buckets)
        self._cache = RowCache(places, width)
        self._places = places
        self._slots: list[int] = []
        self._row_R: Tensor | None = None
        self._lengths = np.array(lengths)
        self._stopped: list[int] = []
        # Neighbours of like length share a forward with little padding, and answers to one prompt its computation.
        self._waiting = deque(sorted(range(len(prompts.tokens)), key=lambda row: -lengths[row]))

    def run(self) -> None:
        while self._waiting or self._slots:
            free = self._places - len(self._slots)
            if self._waiting and (not self._slots or free * _REFILL_SHARE >= self._places):
                ended = self._admit(free)
            else:
                ended = self._step()
            self._drop(ended)

    def rollouts(self, version: int) -> Rollouts:
        longest = int(self._lengths.max())
        tokens_BT, logp_BT = self._tokens_BT[:-1, :longest], self._logp_BT[:-1, :longest]
        length_B1, prompt_B1 = self._length_B[:-1, None], self._prompt_B[:-1, None]
        index_T = torch.arange(longest, device=tokens_BT.device)
        finished_B = self._stop_V[tokens_BT.gather(1, length_B1 - 1)[:, 0]]
        finished_B[self._stopped] = True
        self._check_finite(logp_BT)
        return Rollouts(
            tokens_BT=tokens_BT.contiguous(),
            attention_mask_BT=index_T < length_B1,
            response_mask_BT=(index_T >= prompt_B1) & (index_T < length_B1),
            behaviour_logp_BT=logp_BT.contiguous(),
            group_B=torch.tensor(self._prompts.group, device=tokens_BT.device),
            finished_B=finished_B,
            version=version,
        )

    def _admit(self, free: int) -> list[int]:
        """Rows that wait take the free slots: their prompts are read, and their first tokens drawn."""
        rows = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        first: dict[tuple[int, ...], int] = {}
        for row in rows:
            first.setdefault(self._prompts.tokens[row], row)
        order = {prompt: index for index, prompt in enumerate(first)}
        source_R = self._on_device([order[self._prompts.tokens[row]] for row in rows])
        slot_R = self._on_device(range(len(self._slots), len(self._slots) + len(rows)))
        row_U = self._on_device(list(first.values()))
        index_T = torch.arange(max(map(len, first)), device=row_U.device)

        self._cache.at_prompts(slot_R, source_R)
        tokens_UT = self._tokens_BT[row_U, : len(index_T)]
        hidden_UTD = self._forward(tokens_UT, index_T.expand_as(tokens_UT), None)
        hidden_UD = heads.at_last(hidden_UTD, index_T < self._prompt_B[row_U, None])
        before = len(self._slots)
        self._slots += rows
        self._row_R = None
        return self._sample(self._on_device(rows), hidden_UD[source_R], first_slot=before)

    def _step(self) -> list[int]:
        """One more token for every row that has a slot."""
        row_R = self._run_rows()
        column_R = self._length_B[row_R] - 1
        filled = int(self._lengths[self._slots].max())
        theirs_RS = torch.arange(filled, device=row_R.device) <= column_R[:, None]
        self._cache.at_tokens(column_R, filled)
        tokens_R1 = self._tokens_BT[row_R, column_R, None]
        hidden_R1D = self._forward(tokens_R1, column_R[:, None], theirs_RS[:, None, None])
        return self._sample(row_R, hidden_R1D[:, 0], first_slot=0)

    def _run_rows(self) -> Tensor:
        """The rows of the slots in use, and the one that stands in up to the size of the bucket."""
        if self._row_R is None:
            spare = _bucket(len(self._slots), self._buckets) - len(self._slots)
            self._row_R = self._on_device([*self._slots, *[-1] * spare])
        return self._row_R

    def _forward(self, tokens_RT: Tensor, positions_RT: Tensor, mask: Tensor | None) -> Tensor:
        output = self._backbone(
            input_ids=tokens_RT,
            position_ids=positions_RT,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.last_hidden_state

    def _sample(self, row_R: Tensor, hidden_RD: Tensor, *, first_slot: int) -> list[int]:
        """Draw and record a token for each row; the slots, from `first_slot` on, of those that ended."""
        settings = self._settings
        place_R = self._length_B[row_R]
        drawn_R = place_R - self._prompt_B[row_R]
        scaled_RV = linear(hidden_RD, self._head_VD).float() / settings.temperature
        open_RV = scaled_RV
        if settings.min_new_tokens:
            open_RV = scaled_RV.masked_fill(self._stop_V & (drawn_R < settings.min_new_tokens)[:, None], -torch.inf)
        token_R = draw(open_RV, folded(self._key_B[row_R], drawn_R), top_k=settings.top_k, top_p=settings.top_p)
        logp_R = scaled_RV.gather(1, token_R[:, None])[:, 0] - scaled_RV.logsumexp(-1)

        self._tokens_BT[row_R, place_R] = token_R
        self._logp_BT[row_R, place_R] = logp_R
        self._length_B[row_R] = place_R + 1
        self._length_B[-1] = 1  # the row that stands in does not grow
        rows = self._slots[first_slot:]
        self._lengths[rows] += 1
        ended_R = self._stop_V[token_R] | (drawn_R + 1 == settings.max_new_tokens)
        ended = {first_slot + index for index, has_ended in enumerate(ended_R[: len(rows)].tolist()) if has_ended}
        return sorted(ended | self._stopped_by_text(first_slot))

    def _stopped_by_text(self, first_slot: int) -> set[int]:
        if not self._settings.stop or self._decode is None:
            return set()
        found: set[int] = set()
        for slot, row in enumerate(self._slots[first_slot:], start=first_slot):
            answer = self._tokens_BT[row, len(self._prompts.tokens[row]) : self._lengths[row]].tolist()
            if len(answer) >= self._settings.min_new_tokens:
                text = self._decode(answer)
                if any(stop in text for stop in self._settings.stop):
                    found.add(slot)
                    self._stopped.append(row)
        return found

    def _drop(self, ended: list[int]) -> None:
        """Close the gaps that ended rows leave with the rows of the last slots."""
        if not ended:
            return
        left = len(self._slots) - len(ended)
        gaps = [slot for slot in ended if slot < left]
        movers = sorted(set(range(left, len(self._slots))) - set(ended))
        if gaps:
            self._cache.move(movers, gaps)
        for gap, mover in zip(gaps, movers, strict=True):
            self._slots[gap] = self._slots[mover]
        del self._slots[left:]
        self._row_R = None

    def _on_device(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, device=self._tokens_BT.device)

    def _check_finite(self, logp_BT: Tensor) -> None:
        bad = (~logp_BT.isfinite()).nonzero()
        if len(bad):
            row, position = bad[0].tolist()
            raise NumericsError(
                f"generation: the log-prob of token {position} of row {row} (group {self._prompts.group[row]}) is "
                f"{logp_BT[row, position].item()}, one of {len(bad)}; the weights that sampled are not finite"
            )


def _bucket(rows: int, buckets: Sequence[int]) -> int:
    return next(size for size in buckets if size >= rows)
