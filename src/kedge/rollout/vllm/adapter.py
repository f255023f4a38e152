"""The adapter of a policy as vLLM takes it, and a trial adapter that proves that it computes every layer of it.

A new adapter changes nothing, and one that has learnt little changes less than two engines differ by: whether vLLM
computes it could not be seen from its own effect. So each server first gets a trial: random numbers on every layer that
learns, as large as can be seen.
Shape letters: K inputs and N outputs of a layer, R the rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kedge.core.errors import ConfigError
from kedge.core.files import run_errors
from kedge.models.forward.lora import Adapters, adapters_of, required_adapters
from kedge.models.loading.adapters import save_adapter
from kedge.models.loading.resolve import resolve
from kedge.models.loading.start import unmerged_base
from kedge.rollout.vllm.settings import RANKS, room_for
from kedge.rollout.vllm.weights import gap_of, score

_SIZES: Final = tuple(0.01 * 2**power for power in range(8))
"""Of a trial beside the layer's own matrix, until it can be seen."""
_SEEN: Final = 10.0
"""Times the mismatch that is allowed, by which a trial must change the scores."""


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


def write_trial(folder: Path, model: PreTrainedModel, probe: Sequence[int], *, limit: float) -> list[float]:
    """A trial adapter in `folder`; the scores that the trainer gives the probe with it. The policy is as it was."""
    before = score(model, probe)
    for size in _SIZES:
        with _filled(model, size):
            scores = score(model, probe)
            if gap_of(before, scores) >= _SEEN * limit or size == _SIZES[-1]:
                write_adapter(folder, model, {})
                return scores
    raise AssertionError("the last size is taken in any case")


@contextmanager
def _filled(model: PreTrainedModel, size: float) -> Generator[None]:
    """Inside of the block every layer's own adapter is random, and `size` beside the layer's matrix."""
    name, random = policy_adapter(model), torch.Generator().manual_seed(0)
    layers = [layer for layer in required_adapters(model).layers.values() if name in layer.lora_A]
    factors = [cast(Tensor, layer.lora_B[name]) for layer in layers]
    own = [b_NR.detach().clone() for b_NR in factors]

    def overwrite(values: Callable[[int], Tensor]) -> None:
        with torch.no_grad():
            for at, b_NR in enumerate(factors):
                b_NR.copy_(values(at))

    def noise(at: int) -> Tensor:
        layer, a_RK = layers[at], cast(Tensor, layers[at].lora_A[name])
        length = layer.weight.float().norm() / (layer.scaling[name] * a_RK.float().norm()).clamp(min=1e-12)
        unit_NR = torch.randn(own[at].shape, generator=random).to(own[at].device)
        return unit_NR * (size * length / layer.out_features**0.5)

    try:
        overwrite(noise)
        yield
    finally:
        overwrite(own.__getitem__)
