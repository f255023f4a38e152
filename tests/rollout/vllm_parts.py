"""What tests of the generator `vllm` share: a small model, its parts, an engine in this process."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fake_vllm import Engine
from transformers import PreTrainedModel

from kedge.core.records import Prompts, repeated
from kedge.models.loading.load import load_causal
from kedge.models.loading.tiny import make_tiny
from kedge.rollout.generators import GeneratorParts
from kedge.rollout.settings import SamplingSettings
from kedge.rollout.vllm.generator import VllmGenerator, make
from kedge.rollout.vllm.settings import VllmSettings

STOP = (258, *range(0, 256, 16))
NEW = 6


class Events(list[tuple[str, str]]):
    """The codes and messages of what was reported."""

    def __call__(self, level: str, code: str, message: str, **evidence: Any) -> None:
        self.append((code, message))

    @property
    def codes(self) -> list[str]:
        return [code for code, _ in self]


def base(folder: Path) -> Path:
    return make_tiny(folder / "tiny", seed=2, hidden=32, layers=2)


@contextmanager
def serving(folder: Path, **options: Any) -> Generator[Engine]:
    with Engine(base(folder), **options) as engine:
        thread = threading.Thread(target=engine.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield engine
        finally:
            engine.shutdown()
            thread.join()


def parts_of(folder: Path, model: PreTrainedModel, **values: Any) -> GeneratorParts:
    own: dict[str, Any] = {
        "model": model,
        "sampling": SamplingSettings(temperature=0.7, max_new_tokens=NEW),
        "stop_ids": STOP,
        "pad": 256,
        "max_rows": 8,
        "decode": str,
        "source": str(base(folder)),
        "folder": folder,
        "longest": 24,
    }
    return GeneratorParts(**own | values)


def open_vllm(folder: Path, settings: dict[str, Any], **parts: Any) -> VllmGenerator:
    model = parts.pop("model", None) or load_causal(str(base(folder)), dtype="float32")
    return make(VllmSettings.model_validate({"mismatch": 1e-4, **settings}), parts_of(folder, model, **parts))


def prompts(count: int = 4) -> Prompts:
    return repeated([[40 + row, 41, 42][: row % 3 + 1] for row in range(count)], ids=range(count), answers=2)
