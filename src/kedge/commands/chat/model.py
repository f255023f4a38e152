"""A model to talk with: one answer at a time, told as it is written, which may be stopped on the way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Event

from kedge.core.errors import DataError
from kedge.core.records import Prompts
from kedge.data.examples import Messages
from kedge.data.template import encode_prompt, stop_ids
from kedge.data.tokenizer import padding_id
from kedge.models.loading.describe import window_of
from kedge.models.loading.load import DTypeName, load_causal
from kedge.rollout.local import LocalGenerator
from kedge.rollout.settings import SamplingSettings
from kedge.stages.rl.reward import decoded
from kedge.stages.shared.tokenizer import tokenizer_for

_HALF_A_CHARACTER = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer. `is_finished`: it ended by itself; `is_stopped`: somebody did not want to read on."""

    text: str
    tokens: int
    is_finished: bool
    is_stopped: bool = False


class _Stopped(Exception):
    """Ends decoding from inside."""


class ChatModel:
    """A language model with its tokenizer, and a generator that is kept while the settings stay the same."""

    def __init__(self, place: str, *, name: str, device: str, dtype: DTypeName, chat_template: str | None) -> None:
        self.name = name
        self._tokenizer = tokenizer_for(place, chat_template)
        self._model = load_causal(place, dtype=dtype, device=device)
        self._window = window_of(self._model.config) or sys.maxsize
        self._stop_ids, self._pad = stop_ids(self._tokenizer), padding_id(self._tokenizer)
        self._kept: tuple[SamplingSettings, LocalGenerator] | None = None

    def reply(
        self,
        messages: Messages,
        sampling: SamplingSettings,
        *,
        seed: int,
        show: Callable[[str], None],
        stop: Event,
    ) -> Reply:
        """The next answer; `show` is called with all of its text so far. The same seed gives the same answer."""
        prompt = encode_prompt(self._tokenizer, messages)
        room = self._window - len(prompt)
        if room < 1:
            raise DataError(
                f"{self.name}: the conversation has {len(prompt):,} tokens and fills the window of {self._window:,}; "
                "/reset begins a new one"
            )
        tokens: list[int] = []

        def watch(row: int, drawn: list[int]) -> None:
            del row
            tokens.extend(drawn)
            text = self._text(tokens)
            if not text.endswith(_HALF_A_CHARACTER):
                show(text)
            if stop.is_set():
                raise _Stopped

        generator = self._generator(sampling.model_copy(update={"max_new_tokens": min(sampling.max_new_tokens, room)}))
        try:
            rollouts = generator.generate(Prompts(tokens=(tuple(prompt),), group=(0,), answer=(0,)), seed, watch=watch)
        except _Stopped:
            return Reply(text=self._text(tokens), tokens=len(tokens), is_finished=False, is_stopped=True)
        return Reply(text=self._text(tokens), tokens=len(tokens), is_finished=bool(rollouts.finished_B[0]))

    def _text(self, tokens: list[int]) -> str:
        ended = tokens[-1:] and tokens[-1] in self._stop_ids
        return decoded(self._tokenizer, tuple(tokens[:-1] if ended else tokens))

    def _generator(self, sampling: SamplingSettings) -> LocalGenerator:
        if self._kept is None or self._kept[0] != sampling:
            self._kept = None  # its cache is free before the next is allocated
            generator = LocalGenerator(
                self._model,
                sampling,
                stop_ids=self._stop_ids,
                pad=self._pad,
                max_rows=1,
                decode=partial(decoded, self._tokenizer),
            )
            self._kept = sampling, generator
        return self._kept[1]
