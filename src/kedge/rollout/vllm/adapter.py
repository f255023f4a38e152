"""The adapter of a policy as vLLM takes it, and trial adapters that prove that it computes every layer of it.

A new adapter changes nothing, and one that has learnt little changes less than two engines may differ by: whether vLLM
computes it could not be seen from its own effect. So each server first gets trials: random numbers on one kind of layer
after the other, as large as can be seen.
Shape letters: K inputs and N outputs of a layer, R the rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kedge.core.errors import ConfigError
from kedge.core.files import run_errors
from kedge.models.forward import heads
from kedge.models.forward.lora import Adapters, LoraLinear, adapters_of, required_adapters
from kedge.models.loading.adapters import save_adapter
from kedge.models.loading.resolve import resolve
from kedge.models.loading.start import unmerged_base
from kedge.rollout.vllm.settings import RANKS, room_for
from kedge.rollout.vllm.weights import gap_of, scores_by

_SIZES: Final = tuple(0.01 * 4**power for power in range(6))
"""Of a trial beside the layer's own matrix, until it changes the scores enough."""
_ENOUGH: Final = 10.0
"""Times the mismatch that is allowed."""


def policy_adapter(model: PreTrainedModel) -> str:
    """The name of the adapter that samples; an error where there is none, or one that vLLM does not take."""
    adapters = adapters_of(model)
    if adapters is None or not adapters.active:
        raise ConfigError(
            "generator.sync is adapter, and this policy has none: all of its weights learn; set roles: lora, or leave "
            "sync out (merged)"
        )
    name = adapters.active[-1]
    layers = [(path, layer) for path, layer in adapters.layers.items() if name in layer.lora_A]
    if other := next((path for path, layer in layers if not layer.is_plain or layer.is_transposed), None):
        raise ConfigError(
            f"generator.sync is adapter, and vLLM takes adapters of plain linear layers alone, which {other} is not "
            f"({type(adapters.layers[other].base_layer).__name__}); leave sync out (merged)"
        )
    if room_for(rank_of(adapters, name)) is None:
        raise ConfigError(
            f"generator.sync is adapter, the policy's has a rank of {rank_of(adapters, name)} with what it starts "
            f"from, and vLLM takes up to {RANKS[-1]}; leave sync out (merged), or set a lower memory.lora.rank"
        )
    return name


def rank_of(adapters: Adapters, name: str) -> int:
    """Of the adapter that is sent: with those beneath it, which belong to the policy's start."""
    return sum(adapters.known[part].rank for part in (*adapters.beneath, name))


def lora_options(model: PreTrainedModel) -> dict[str, str | int | float | bool]:
    """With what a server is started that takes the policy's adapter."""
    room = room_for(rank_of(required_adapters(model), policy_adapter(model)))
    assert room is not None
    return {"enable-lora": True, "max-lora-rank": room, "max-loras": 1}


def base_of(model: PreTrainedModel, source: str) -> str:
    """The model that the adapter is on, as a server loads it: where the policy starts from an adapter that is merged in
    `source`, and which it holds apart, the base of that one."""
    place = resolve(source)
    if not required_adapters(model).beneath:
        return str(place)
    base = unmerged_base(Path(place))
    assert base is not None
    return str(base)


def write_adapter(folder: Path, model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """The policy's adapter in peft's format. `weights` are the float32 masters of what learns."""
    with run_errors("write", folder):
        save_adapter(model, folder, name=policy_adapter(model), weights=weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """An adapter of random numbers on all layers of one kind."""

    kind: str
    """The last part of their names: `q_proj`."""
    folder: Path
    scores: Sequence[float]
    """What the trainer gives the probe with it."""
    effect: float
    """Nats a token that it changes them by."""

    def limit(self, mismatch: float) -> float:
        """How far the scores of server and trainer may be apart: a server without these layers is `effect` away."""
        return max(mismatch, self.effect / 2)

    def can_be_seen(self, mismatch: float) -> bool:
        return self.effect > 2 * mismatch


def write_trials(folder: Path, model: PreTrainedModel, probe: Sequence[int], *, mismatch: float) -> list[Trial]:
    """A trial for each kind of layer that learns, in folders of their own. The policy is as it was."""
    layers, language_model = _layers(model), heads.language_model(model)
    with _filled(layers, "", 0.0):
        base = scores_by(language_model, probe)
    trials: list[Trial] = []
    for kind in sorted({_kind(path) for path, _, _ in layers}):
        for size in _SIZES:
            with _filled(layers, kind, size):
                scores = scores_by(language_model, probe)
                effect = gap_of(base, scores)
                if effect >= _ENOUGH * mismatch or size == _SIZES[-1]:
                    write_adapter(folder / kind, model, {})
                    trials.append(Trial(kind=kind, folder=folder / kind, scores=scores, effect=effect))
                    break
    return trials


Layers = Sequence[tuple[str, LoraLinear, str]]
"""Of the policy's adapter: the layer's name, the layer, the adapter's name."""


def _layers(model: PreTrainedModel) -> Layers:
    name = policy_adapter(model)
    return [(path, layer, name) for path, layer in required_adapters(model).layers.items() if name in layer.lora_A]


def _kind(path: str) -> str:
    return path.rpartition(".")[2]


@contextmanager
def _filled(layers: Layers, kind: str, size: float) -> Generator[None]:
    """Inside of the block the adapter is random on layers of a kind, `size` beside the layer's matrix, and nothing on
    the others."""
    factors = [cast(Tensor, layer.lora_B[name]) for _, layer, name in layers]
    own = [b_NR.detach().clone() for b_NR in factors]
    random = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for (path, layer, name), b_NR in zip(layers, factors, strict=True):
                b_NR.copy_(size * _noise(layer, name, random) if _kind(path) == kind else torch.zeros_like(b_NR))
        yield
    finally:
        with torch.no_grad():
            for b_NR, before_NR in zip(factors, own, strict=True):
                b_NR.copy_(before_NR)


def _noise(layer: LoraLinear, name: str, random: torch.Generator) -> Tensor:
    """A factor B whose product with A is about as large as the layer's matrix."""
    a_RK, b_NR = cast(Tensor, layer.lora_A[name]), cast(Tensor, layer.lora_B[name])
    length = layer.weight.float().norm() / (layer.scaling[name] * a_RK.float().norm()).clamp(min=1e-12)
    return torch.randn(b_NR.shape, generator=random).to(b_NR.device) * (length / layer.out_features**0.5)
