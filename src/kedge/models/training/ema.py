"""An exponential moving average of weights: what a run keeps where `ema` is set, smoother than its last step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class EMA:
    """average <- decay average + (1 - decay) weights after every step, in float32; it starts at the first weights."""

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        self._decay = decay
        self._weights = {name: one.detach().clone() for name, one in weights.items()}

    @torch.no_grad()
    def follow(self, weights: Mapping[str, Tensor]) -> None:
        for name, one in weights.items():
            self._weights[name].lerp_(one.detach(), 1 - self._decay)

    def weights(self) -> Mapping[str, Tensor]:
        return self._weights

    def state(self) -> dict[str, Any]:
        return dict(self._weights)

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        for name, one in self._weights.items():
            one.copy_(state[name])
