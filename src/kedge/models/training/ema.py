"""An exponential moving average of weights: what a run with `ema` saves, less noisy than its last step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kedge.models.forward.parts import local, part_of


class EMA:
    """ema <- decay ema + (1 - decay) weights after every step, in float32; it starts at the initial weights."""

    def __init__(self, weights: Mapping[str, Tensor], decay: float, *, device: torch.device | None = None) -> None:
        """`device` is where the average is computed, for weights that live in host memory; None: where they are."""
        self._decay, self._device = decay, device
        self._weights = {name: weight.detach().clone() for name, weight in weights.items()}

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            average, new = (local(tensor).to(device=self._device) for tensor in (self._weights[name], weight.detach()))
            local(self._weights[name]).copy_(average.lerp_(new, 1 - self._decay))

    def weights(self) -> Mapping[str, Tensor]:
        return self._weights

    def state(self) -> dict[str, Any]:
        return dict(self._weights)

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        for name, averaged in self._weights.items():
            local(averaged).copy_(part_of(state[name], averaged))
