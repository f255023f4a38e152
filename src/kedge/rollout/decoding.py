"""Continuous batching: rows of a batch wait, take a slot, grow by a token a step, and leave it to the next one.

The host keeps the tokens of every row so far and reads the device after `window` steps: rows that ended leave, those
of the last slots close the gaps, and waiting rows come in. Nothing that is sampled depends on any of it.
Shape letters: B rows, T positions, R slots, U distinct prompts, D width, V vocabulary, K steps, F numbers a slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kedge.core.errors import NumericsError
from kedge.core.records import Prompts, Rollouts
from kedge.models.forward import heads
from kedge.rollout.steps import ALIVE, COLUMN, DRAWN, KEY, PLACE, TOKEN, Sampler, Steps, last_hidden, no_rows, row_keys

Numbers: TypeAlias = np.ndarray[Any, np.dtype[Any]]

Watch: TypeAlias = Callable[[int, list[int]], None]
"""Is told of a row and its next tokens as they are drawn; what it raises ends the decoding."""

_REFILL_SHARE = 8
"""Waiting rows are admitted when one slot in so many is free: a forward of few prompts costs nearly one of many."""


class Decoding:
    """One batch from prompts to rollouts. A row that ends gives its slot to the row of the last one: the slots in use
    are always the first, and only those are run, up to the next of the `buckets`; free slots go to waiting rows."""

    def __init__(
        self,
        model: PreTrainedModel,
        steps: Steps,
        sampler: Sampler,
        prompts: Prompts,
        *,
        seed: int,
        pad: int,
        decode: Callable[[list[int]], str] | None,
        buckets: Sequence[int],
        places: int,
        window: int,
        watch: Watch | None = None,
    ) -> None:
        self._watch = watch
        self._model, self._steps, self._sampler, self._prompts = model, steps, sampler, prompts
        self._decode, self._buckets, self._places, self._window = decode, buckets, places, window
        self._prompt_B = np.array([*map(len, prompts.tokens)])
        self._length_B = self._prompt_B.copy()
        width = int(self._prompt_B.max()) + sampler.settings.max_new_tokens
        self._tokens_BT = np.full((len(prompts.tokens), width), pad)
        for row, tokens in enumerate(prompts.tokens):
            self._tokens_BT[row, : len(tokens)] = tokens
        self._logp_BT = np.zeros(self._tokens_BT.shape, dtype=np.float32)
        self._is_finished_B = np.zeros(len(prompts.tokens), dtype=bool)
        self._key_B = row_keys(seed, torch.tensor(prompts.group), torch.tensor(prompts.answer)).numpy()
        self._is_stop_V = sampler.stop_V.cpu().numpy()

        self._state_FR = no_rows(len(steps.slots.token_R))
        self._slots: list[int] = []
        # Neighbours of like length share a forward with little padding, and answers to one prompt its computation.
        self._waiting = deque(sorted(range(len(prompts.tokens)), key=lambda row: -len(prompts.tokens[row])))

    def run(self) -> None:
        while self._waiting or self._slots:
            free = self._places - len(self._slots)
            if self._waiting and (not self._slots or free * _REFILL_SHARE >= self._places):
                ended = self._admit(free)
            else:
                ended = self._grow()
            self._drop(ended)

    def rollouts(self, version: int) -> Rollouts:
        longest, device = int(self._length_B.max()), self._model.device
        index_T = np.arange(longest)
        is_real_BT = index_T < self._length_B[:, None]
        logp_BT = self._logp_BT[:, :longest]
        self._check_finite(logp_BT)
        return Rollouts(
            tokens_BT=torch.tensor(self._tokens_BT[:, :longest], device=device),
            attention_mask_BT=torch.tensor(is_real_BT, device=device),
            response_mask_BT=torch.tensor(is_real_BT & (index_T >= self._prompt_B[:, None]), device=device),
            behaviour_logp_BT=torch.tensor(logp_BT, device=device),
            group_B=torch.tensor(self._prompts.group, device=device),
            finished_B=torch.tensor(self._is_finished_B, device=device),
            version=version,
        )

    def _admit(self, free: int) -> list[int]:
        """Waiting rows take the free slots: one forward reads their prompts, and their first tokens are drawn."""
        rows = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        slots = list(range(len(self._slots), len(self._slots) + len(rows)))
        first_row: dict[tuple[int, ...], int] = {}
        for row in rows:
            first_row.setdefault(self._prompts.tokens[row], row)
        order = {prompt: index for index, prompt in enumerate(first_row)}
        source_R = self._on_device([order[self._prompts.tokens[row]] for row in rows])
        row_U = list(first_row.values())
        tokens_UT = self._on_device(self._tokens_BT[row_U, : max(map(len, first_row))])
        index_T = torch.arange(tokens_UT.shape[1], device=tokens_UT.device)

        cache = self._steps.cache
        cache.at_prompts(self._on_device(self._state_FR[PLACE, slots]), source_R)
        hidden_UTD = last_hidden(self._model, cache, tokens_UT, index_T.expand_as(tokens_UT), None)
        hidden_UD = heads.at_last(hidden_UTD, index_T < self._on_device(self._prompt_B[row_U])[:, None])
        token_R, logp_R = self._sampler.draw(
            hidden_UD[source_R], self._on_device(self._key_B[rows]), torch.zeros_like(source_R)
        )
        self._slots += rows
        self._state_FR[KEY, slots] = self._key_B[rows]
        return self._note(np.array(slots), token_R[None], logp_R[None], np.ones(len(rows), dtype=np.int64))

    def _grow(self) -> list[int]:
        """Up to `window` more tokens for every row that has a slot; the host reads the device only after the last."""
        device, in_use = self._steps.slots, len(self._slots)
        rows = _bucket(in_use, self._buckets)
        longest = int(self._length_B[self._slots].max())
        left = self._sampler.settings.max_new_tokens - int(self._state_FR[DRAWN, :in_use].min())
        device.state_FR.copy_(torch.from_numpy(self._state_FR))
        for step in range(min(self._window, left)):
            self._steps.step(rows, longest + step)
        count_R = device.drawn_R[:in_use].cpu().numpy() - self._state_FR[DRAWN, :in_use]
        return self._note(np.arange(in_use), device.token_KR[:, :in_use], device.logp_KR[:, :in_use], count_R)

    def _note(self, slot_R: Numbers, token_KR: Tensor, logp_KR: Tensor, count_R: Numbers) -> list[int]:
        """Record the first `count_R` tokens that each of these slots drew; returns the slots whose rows ended."""
        tokens_KR, logps_KR = token_KR.cpu().numpy(), logp_KR.cpu().numpy()
        row_R = np.array(self._slots)[slot_R]
        count_R, is_stopped_R = self._until_stop_strings(row_R, tokens_KR, count_R)
        k, r = np.nonzero(np.arange(len(tokens_KR))[:, None] < count_R)
        place = row_R[r], self._length_B[row_R[r]] + k
        self._tokens_BT[place], self._logp_BT[place] = tokens_KR[k, r], logps_KR[k, r]
        if self._watch is not None:
            for index, row in enumerate(row_R.tolist()):
                self._watch(row, tokens_KR[: count_R[index], index].tolist())

        last_R = tokens_KR[count_R - 1, np.arange(len(row_R))]
        self._length_B[row_R] += count_R
        self._is_finished_B[row_R] = is_stopped_R | self._is_stop_V[last_R]
        self._state_FR[TOKEN, slot_R], self._state_FR[COLUMN, slot_R] = last_R, self._length_B[row_R] - 1
        self._state_FR[DRAWN, slot_R] += count_R
        self._state_FR[ALIVE, slot_R] = 1
        is_full_R = self._state_FR[DRAWN, slot_R] == self._sampler.settings.max_new_tokens
        return slot_R[self._is_finished_B[row_R] | is_full_R].tolist()

    def _until_stop_strings(self, row_R: Numbers, tokens_KR: Numbers, count_R: Numbers) -> tuple[Numbers, Numbers]:
        """How many of the tokens count, up to the one that completes a stop string, and which rows have one."""
        settings = self._sampler.settings
        count_R, is_stopped_R = count_R.copy(), np.zeros(len(row_R), dtype=bool)
        if settings.stop and self._decode is not None:
            for index, row in enumerate(row_R):
                answer: list[int] = self._tokens_BT[row, self._prompt_B[row] : self._length_B[row]].tolist()
                for count in range(1, int(count_R[index]) + 1):
                    answer.append(int(tokens_KR[count - 1, index]))
                    text = self._decode(answer) if len(answer) >= settings.min_new_tokens else ""
                    if any(stop in text for stop in settings.stop):
                        count_R[index], is_stopped_R[index] = count, True
                        break
        return count_R, is_stopped_R

    def _drop(self, ended: list[int]) -> None:
        """Close the gaps that ended rows leave with the rows of the last slots."""
        if not ended:
            return
        left = len(self._slots) - len(ended)
        gaps = [slot for slot in ended if slot < left]
        movers = sorted(set(range(left, len(self._slots))) - set(ended))
        if gaps:
            own_R = self._state_FR[PLACE].copy()
            self._state_FR[:, gaps] = self._state_FR[:, movers]
            self._state_FR[PLACE] = own_R
            self._steps.relocate(self._state_FR, movers, gaps)
        for gap, mover in zip(gaps, movers, strict=True):
            self._slots[gap] = self._slots[mover]
        # A slot without a row stands at the first column of its place, where it is cheap and does no harm.
        self._state_FR[[TOKEN, COLUMN, DRAWN, KEY, ALIVE], left : len(self._slots)] = 0
        del self._slots[left:]

    def _on_device(self, numbers: Sequence[int] | Numbers) -> Tensor:
        return torch.tensor(numbers, device=self._model.device)

    def _check_finite(self, logp_BT: Numbers) -> None:
        bad = np.argwhere(~np.isfinite(logp_BT))
        if len(bad):
            row, position = bad[0].tolist()
            raise NumericsError(
                f"generation: the log-prob of token {position} of row {row} (group {self._prompts.group[row]}) is "
                f"{logp_BT[row, position].item()}, one of {len(bad)}; the weights that sampled are not finite"
            )


def _bucket(rows: int, buckets: Sequence[int]) -> int:
    return next(size for size in buckets if size >= rows)
