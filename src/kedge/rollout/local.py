"""The local engine: answers are sampled in this process, with the trainer's own module and weights.

The log-probs that come back are those of the softmax of all logits over the temperature: they are not renormalised
after `top_k`, `top_p` or a forbidden stop token, so the trainer computes the same numbers from the same tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from logging import getLogger
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kedge.core.errors import ConfigError, DataError, ModelError
from kedge.core.records import Prompts, Rollouts
from kedge.models.forward import heads
from kedge.models.loading.describe import window_of
from kedge.rollout.cache import for_decoding
from kedge.rollout.decoding import Decoding, Watch
from kedge.rollout.families import unsupported_reason
from kedge.rollout.generators import GeneratorParts, LocalSettings
from kedge.rollout.graphs import GraphSteps
from kedge.rollout.settings import SamplingSettings
from kedge.rollout.shared import SharedGenerator
from kedge.rollout.steps import EagerSteps, Sampler, Steps

_log = getLogger(__name__)

_LOOK_EVERY = 8
"""Steps between two looks at a GPU. A look costs about a fifth of a step; a row that ended is run 4 times for nothing
on average, which is little in an answer of a hundred tokens or more."""
_COLUMNS_ALLOCATED = 128
"""The cache of a GPU is allocated in multiples of so many columns: batches of like lengths share it and its graphs."""

Path: TypeAlias = Literal["eager", "graph", "fused"]


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
        path: Path | None = None,
        look_every: int | None = None,
    ) -> None:
        """`max_rows` are decoded at once; it changes speed and memory, never what is sampled. `decode` turns an
        answer into the text in which stop strings are looked for. `buckets` are the batch sizes that are run, the
        largest being `max_rows`: a few on a GPU, so that each can be kept as a graph, and any on the CPU.
        `path` is how a step is run, by default the fastest that the model and its device allow (see `graphs`), and
        `look_every` after how many steps the host looks which rows have ended: both change speed alone."""
        on_gpu = model.device.type == "cuda"
        self._buckets = tuple(buckets or (bucket_sizes(max_rows) if on_gpu else range(1, max_rows + 1)))
        if max_rows < 1 or self._buckets != tuple(sorted({*self._buckets})) or self._buckets[-1] != max_rows:
            raise ConfigError(
                f"buckets: found {list(self._buckets)}, expected rising sizes that end with max_rows {max_rows}"
            )
        if settings.stop and decode is None:
            raise ConfigError(f"stop: {list(settings.stop)} are looked for in text, so `decode` must be given")
        vocabulary = len(heads.output_head(model)())
        for token in (*stop_ids, pad):
            if not 0 <= token < vocabulary:
                raise ModelError(f"token {token} (stop or padding) is not among the {vocabulary} of the model")
        self._model, self._settings, self._decode = model, settings, decode
        self._stop_ids, self._pad = tuple(stop_ids), pad
        self._room = window_of(model.config) or sys.maxsize
        self._window = look_every or (_LOOK_EVERY if on_gpu else 1)
        self._graphs: GraphSteps | None = None
        self._requested_path: Path | None = path
        self.path: Path
        """How steps are run: `eager` (modules), `graph` (the same in CUDA graphs) or `fused` (our kernels in them)."""
        self.path, reason = self._choose()
        if reason:
            _log.info("%s decodes on the path '%s': %s", type(model).__name__, self.path, reason)
        self.version = version

    @torch.no_grad()
    def generate(self, prompts: Prompts, seed: int, *, watch: Watch | None = None) -> Rollouts:
        """An answer for every row, in the order of the rows: the same for the same seed, group and answer index.

        `watch` is told of tokens as they are drawn.
        """
        self._check_room(prompts)
        places = next(size for size in self._buckets if size >= min(self._buckets[-1], len(prompts.tokens)))
        sampler = self._sampler()
        self.path, _ = self._choose()  # adapters may have come since
        with self._on_its_device(), for_decoding(self._model):
            decoding = Decoding(
                self._model,
                self._steps(sampler, places, max(map(len, prompts.tokens)) + self._settings.max_new_tokens),
                sampler,
                prompts,
                seed=seed,
                pad=self._pad,
                decode=self._decode,
                buckets=self._buckets,
                places=places,
                window=self._window,
                watch=watch,
            )
            decoding.run()
        return decoding.rollouts(self.version)

    def release(self) -> None:
        """Give back the cache and the graphs that a GPU keeps between calls; the next call makes new ones."""
        self._graphs = None

    def _sampler(self) -> Sampler:
        head_VD = heads.lm_head(self._model)
        stop_V = torch.zeros(len(head_VD), dtype=torch.bool, device=head_VD.device)
        stop_V[sorted(self._stop_ids)] = True
        return Sampler(head_VD=head_VD, stop_V=stop_V, settings=self._settings)

    def _choose(self) -> tuple[Path, str]:
        """The path that was requested, or the fastest there is; and why no faster one can be taken."""
        if self._requested_path == "fused" and (reason := unsupported_reason(self._model)):
            name = type(self._model).__name__
            raise ModelError(f"{name} cannot be decoded on the path 'fused': {reason}. Ask for 'graph' or 'eager'")
        if self._requested_path is not None:
            return self._requested_path, ""
        if self._model.device.type != "cuda":
            return "eager", ""
        if find_spec("triton") is None:
            return "eager", "the package triton is not installed"
        reason = unsupported_reason(self._model)
        return ("graph", reason) if reason else ("fused", "")

    def _on_its_device(self) -> AbstractContextManager[object]:
        """Kernels and graphs are those of the current GPU, which need not be the model's."""
        device = self._model.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _steps(self, sampler: Sampler, places: int, columns: int) -> Steps:
        if self.path == "eager":
            return EagerSteps(self._model, sampler, places=places, columns=columns, window=self._window)
        graphs = self._graphs
        if graphs is None or not graphs.can_decode(places=places, columns=columns):
            columns = -(-columns // _COLUMNS_ALLOCATED) * _COLUMNS_ALLOCATED
            if graphs is not None:
                places, columns = max(places, graphs.cache.places), max(columns, graphs.cache.columns)
            self._graphs = graphs = None  # its memory is free before the next is allocated
            is_fused = self.path == "fused"
            self._graphs = graphs = GraphSteps(
                self._model,
                sampler,
                places=places,
                columns=columns,
                window=self._window,
                is_fused=is_fused,
                sizes=self._buckets,
            )
        graphs.refresh()
        return graphs

    def submit(self, prompts: Prompts, seed: int) -> Future[Rollouts]:
        """`generate` as a future, which is done when this returns."""
        future = Future[Rollouts]()
        future.set_result(self.generate(prompts, seed))
        return future

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take over the version alone: the trainer's own module samples, so its new weights are here already."""
        del weights
        self.version = version

    def _check_room(self, prompts: Prompts) -> None:
        window, new = self._room, self._settings.max_new_tokens
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


def make(settings: LocalSettings, parts: GeneratorParts) -> LocalGenerator | SharedGenerator:
    """The local generator as a plugin: it samples with the weights of the policy that is trained; each of several
    processes samples its share of the rows."""
    del settings
    generator = LocalGenerator(
        parts.model,
        parts.sampling,
        stop_ids=parts.stop_ids,
        pad=parts.pad,
        max_rows=parts.max_rows,
        decode=parts.decode,
    )
    if parts.world is None or parts.world.size == 1:
        return generator
    return SharedGenerator(generator, parts.world, pad=parts.pad, device=parts.model.device)


def bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """Powers of two up to 8, then steps of 8 or, further up, of a quarter of the last power of two: each size is a
    graph to capture and keep, and a step of more rows takes little longer.

    >>> bucket_sizes(30), bucket_sizes(300)[8:]
    ((1, 2, 4, 8, 16, 24, 30), (48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 300))
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_rows:
        sizes.append(sizes[-1] + max(8, 1 << (sizes[-1].bit_length() - 3)))
    return (*(size for size in sizes if size < max_rows), max_rows)
