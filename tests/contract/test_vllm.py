"""The generator `vllm`, with a stand-in for its server, against the contract of generators."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))

from vllm_parts import open_vllm, serving

from kedge.core.protocols import Generator
from kedge.models.loading.load import load_causal
from kedge.models.loading.tiny import make_tiny
from kedge.rollout.generators import close_generator
from kedge.rollout.settings import SamplingSettings
from kedge.testing.contracts import BatchInvariantGeneratorContract

NEW = 10


class TestVllmGenerator(BatchInvariantGeneratorContract):
    vocabulary, stop_ids, max_new_tokens = 256, frozenset({258, *range(0, 256, 12)}), NEW

    @pytest.fixture(autouse=True)
    def _serve(self, tmp_path: Path) -> Iterator[None]:
        self._folder = tmp_path
        make_tiny(tmp_path / "tiny", seed=2, hidden=32, layers=1)
        self._opened: list[Generator] = []
        with serving(tmp_path) as self._engine:
            yield
            for generator in self._opened:
                close_generator(generator)

    def make(self) -> Generator:
        self._model = load_causal(str(self._folder / "tiny"), dtype="float32")
        sampling = SamplingSettings(max_new_tokens=NEW)
        self._opened.append(
            open_vllm(
                self._folder,
                {"servers": [self._engine.url]},
                model=self._model,
                sampling=sampling,
                stop_ids=self.stop_ids,
            )
        )
        return self._opened[-1]

    def new_weights(self) -> Mapping[str, Tensor]:
        with torch.no_grad():
            self._model.get_parameter("model.layers.0.mlp.down_proj.weight").mul_(-20.0)
            self._model.get_parameter("model.embed_tokens.weight").mul_(8.0)
        return dict(self._model.named_parameters())
