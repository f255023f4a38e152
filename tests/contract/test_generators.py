"""Our engine against the contract of generators, directly and behind a queue with weights of its own."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kedge.core.protocols import Generator
from kedge.core.records import Prompts, Rollouts
from kedge.models.loading.tiny import tiny_model
from kedge.rollout.generators import GeneratorParts, LocalSettings, open_generator
from kedge.rollout.local import LocalGenerator, Path
from kedge.rollout.settings import SamplingSettings
from kedge.testing.contracts import BatchInvariantGeneratorContract

STOP = frozenset({258, *range(0, 256, 16)})
"""One token in sixteen ends an answer, so that some answers end and some are cut off."""
NEW = 14


def small_model() -> PreTrainedModel:
    """Weights larger than usual, so that a token's probability depends on all tokens before it."""
    model = tiny_model(seed=3, hidden=32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0 if weight.ndim == 2 else 1.0)
    return model


def turn_over(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """Change the trainer's module, which the local engine samples with: no weights are left to be loaded."""
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.down_proj.weight").mul_(-1.0)
    return {}


def local(model: PreTrainedModel, *, path: Path = "eager", max_rows: int = 5) -> LocalGenerator:
    settings = SamplingSettings(max_new_tokens=NEW)
    return LocalGenerator(model, settings, stop_ids=STOP, pad=256, max_rows=max_rows, path=path, version=2)


class TestLocalGenerator(BatchInvariantGeneratorContract):
    vocabulary, stop_ids, max_new_tokens = 256, STOP, NEW

    @pytest.fixture(autouse=True, params=["eager", "graph"])
    def _on_path(self, request: pytest.FixtureRequest) -> None:
        self._path = request.param

    def make(self) -> Generator:
        self._model = small_model()
        return local(self._model, path=self._path)

    def new_weights(self) -> Mapping[str, Tensor]:
        return turn_over(self._model)


class TestGeneratorOfTheEntryPoint(BatchInvariantGeneratorContract):
    vocabulary, stop_ids, max_new_tokens = 256, STOP, NEW

    def make(self) -> Generator:
        self._model = small_model()
        parts = GeneratorParts(
            model=self._model,
            sampling=SamplingSettings(max_new_tokens=NEW),
            stop_ids=STOP,
            pad=256,
            max_rows=8,
            decode=lambda tokens: " ".join(map(str, tokens)),
        )
        return open_generator(LocalSettings(), parts)

    def new_weights(self) -> Mapping[str, Tensor]:
        return turn_over(self._model)


class Queued:
    """An engine as one on another machine behaves: a copy of the weights, and a queue of calls."""

    def __init__(self) -> None:
        self._model = small_model()
        self._engine = local(self._model, max_rows=32)
        self._queue = ThreadPoolExecutor(max_workers=1)

    def submit(self, prompts: Prompts, seed: int) -> Future[Rollouts]:
        return self._queue.submit(self._engine.generate, prompts, seed)

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        def load() -> None:
            self._model.load_state_dict(dict(weights), strict=False)
            self._engine.load_weights({}, version)

        self._queue.submit(load)


class TestQueuedGenerator(BatchInvariantGeneratorContract):
    vocabulary, stop_ids, max_new_tokens = 256, STOP, NEW

    def make(self) -> Generator:
        return Queued()

    def new_weights(self) -> Mapping[str, Tensor]:
        return {name: weight * 0.5 for name, weight in small_model().state_dict().items() if "mlp" in name}
