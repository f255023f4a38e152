"""The local engine: answers are sampled in this process, with the trainer's own module; no weight is copied.

The log-probs that come back are those of the softmax of all logits over the temperature: not renormalised after
`top_k`, `top_p` or a forbidden stop token, and so the numbers that the trainer computes from the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kedge.core.errors import ConfigError, DataError, ModelError
from kedge.core.records import Rollouts
from kedge.models import heads
from kedge.rollout.cache import for_decoding
from kedge.rollout.decoding import Decoding
from kedge.rollout.prompts import Prompts
from kedge.rollout.settings import SamplingSettings


class LocalGenerator:
    """A generator over a model in this process. With adapters, give the base that carries them."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: SamplingSettings,
        *,
        stop_ids: Collection[int],
        pad: int,
        max_rows: int,
        decode: Callable[[list[int]], str] | None = None,
        buckets: Sequence[int] | None = None,
        version: int = 0,
    ) -> None:
        """`max_rows` are decoded at once; it changes speed and memory, never what is sampled. `decode` turns an
        answer into the text in which stop strings are looked for. `buckets` are the batch sizes that are run, the
        largest being `max_rows`: a few on a GPU, so that each can be kept as a graph, and any on the CPU."""
        on_gpu = model.device.type == "cuda"
        self._buckets = tuple(buckets or (bucket_sizes(max_rows) if on_gpu else range(1, max_rows + 1)))
        if max_rows < 1 or self._buckets != tuple(sorted({*self._buckets})) or self._buckets[-1] != max_rows:
            raise ConfigError(
                f"buckets: found {list(self._buckets)}, expected rising sizes that end with max_rows {max_rows}"
            )
        if settings.stop and decode is None:
            raise ConfigError(f"stop: {list(settings.stop)} are looked for in text, so `decode` must be given")
        vocabulary = len(heads.lm_head(model))
        for token in (*stop_ids, pad):
            if not 0 <= token < vocabulary:
                raise ModelError(f"token {token} (stop or padding) is not among the {vocabulary} of the model")
        self._model, self._settings, self._decode = model, settings, decode
        self._stop_ids, self._pad = tuple(stop_ids), pad
        self.version = version

    @torch.no_grad()
    def generate(self, prompts: Prompts, seed: int) -> Rollouts:
        """An answer for every row, in the order of the rows: the same for the same seed, group and answer index."""
        self._check_room(prompts)
        with for_decoding(self._model):
            decoding = Decoding(
                self._model,
                prompts,
                self._settings,
                seed=seed,
                stop_ids=self._stop_ids,
                pad=self._pad,
                decode=self._decode,
                buckets=self._buckets,
            )
            decoding.run()
        return decoding.rollouts(self.version)

    def submit(self, prompts: Prompts, seed: int) -> Future[Rollouts]:
        """The same as a future, which is done at once."""
        future = Future[Rollouts]()
        future.set_result(self.generate(prompts, seed))
        return future

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """The trainer's module samples, so its weights are here already; what changes is their version."""
        del weights
        self.version = version

    def _check_room(self, prompts: Prompts) -> None:
        window, new = _window(self._model), self._settings.max_new_tokens
        too_long = [row for row, tokens in enumerate(prompts.tokens) if len(tokens) + new > window]
        if too_long:
            named = ", ".join(
                f"row {row} (group {prompts.group[row]}): {len(prompts.tokens[row])}" for row in too_long[:3]
            )
            more = f" and {len(too_long) - 3} more" if len(too_long) > 3 else ""
            raise DataError(
                f"{len(too_long)} prompt(s) leave no room for an answer of {new} tokens in the window of {window}: "
                f"{named} tokens{more}; at most {window - new} fit. Leave them out, or set a lower max_new_tokens"
            )


def bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """Powers of two up to 8, then multiples of 8: at most 7 places are run for nothing.

    >>> bucket_sizes(30)
    (1, 2, 4, 8, 16, 24, 30)
    """
    return (*(size for size in (1, 2, 4, *range(8, max_rows, 8)) if size < max_rows), max_rows)


def _window(model: PreTrainedModel) -> int:
    """How many tokens a row may have: what the model's positions reach, and what all of its layers can see."""
    config = model.config
    slides = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    return min(cast(int, limit) for limit in (getattr(config, "max_position_embeddings", None), slides, 2**62) if limit)
