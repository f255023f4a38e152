"""What tests of the generator `vllm` share: a small model, its parts, an engine in this process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fake_vllm import Engine
from transformers import PreTrainedModel

from kedge.core.records import Prompts, Rollouts, repeated
from kedge.models.forward import heads
from kedge.models.loading.load import load_causal
from kedge.models.loading.tiny import make_tiny
from kedge.rollout.generators import GeneratorParts
from kedge.rollout.settings import SamplingSettings
from kedge.rollout.vllm.generator import VllmGenerator, make
from kedge.rollout.vllm.settings import VllmSettings
from kedge.rollout.vllm.weights import weights_of

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
        "source": values.get("source") or str(base(folder)),
        "folder": folder,
        "longest": 24,
    }
    return GeneratorParts(**own | values)


def open_vllm(folder: Path, settings: dict[str, Any], **parts: Any) -> Any:
    model = parts.pop("model", None) or load_causal(str(base(folder)), dtype="float32")
    return make(VllmSettings.model_validate({"mismatch": 1e-4, **settings}), parts_of(folder, model, **parts))


def prompts(count: int = 4) -> Prompts:
    return repeated([[40 + row, 41, 42][: row % 3 + 1] for row in range(count)], ids=range(count), answers=2)


def gaps(model: Any, rollouts: Rollouts, temperature: float = 0.7) -> torch.Tensor:
    """The difference of log-probs between a server's answers and the trainer, for each token."""
    own_BT = heads.language_model(model).logprobs(
        rollouts.tokens_BT, rollouts.attention_mask_BT, rollouts.response_mask_BT, temperature=temperature
    )
    return (own_BT - rollouts.behaviour_logp_BT)[rollouts.response_mask_BT].abs()


def mismatch(model: Any, rollouts: Rollouts, temperature: float = 0.7) -> float:
    """The largest of them."""
    return gaps(model, rollouts, temperature).max().item()


def train(model: Any, size: float = 0.05) -> dict[str, torch.Tensor]:
    """Change every weight a little, as an update does."""
    return _changed(dict(model.named_parameters()), size)


def learn(model: Any, size: float = 0.05) -> dict[str, torch.Tensor]:
    """Change the weights that learn, and give them: of a model with adapters, those of the active one."""
    return _changed({name: weight for name, weight in model.named_parameters() if weight.requires_grad}, size)


def _changed(weights: dict[str, torch.Tensor], size: float) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in weights.values():
            weight.add_(size * torch.randn(weight.shape, generator=random))
    return weights


def headless_weights_of(model: Any, trained: Any) -> dict[str, torch.Tensor]:
    """What is sent to a server, without the output head."""
    return {name: weight for name, weight in weights_of(model, trained).items() if name != "lm_head.weight"}


def kill_server(generator: VllmGenerator) -> None:
    """Kill the process that listens, and not the keeper before it."""
    (url,) = (server.url for server in generator._queue.engines._servers)
    for pid in group_of_port(url):
        os.kill(pid, signal.SIGKILL)
    while group_of_port(url):
        time.sleep(0.02)


def group_of_port(url: str) -> list[int]:
    """Processes with the port of this server in their command lines, without the keeper."""
    port, found = url.rpartition(":")[2], list[int]()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if port.encode() in words and not any(word.endswith(b"keeper.py") for word in words):
                found.append(int(folder.name))
    return found
