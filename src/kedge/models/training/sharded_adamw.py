"""AdamW on weights that several processes hold in parts: each updates its own part of weights and moments.

FSDP2 adds up the gradients of a sharded weight while the backward pass goes, so there is nothing left to add but those
of weights that every process holds whole. What a part is updated with is one of the backends of `adamw`; its state has
the parts of the moments, which `as_parts` and `own_parts` translate from and to tensors that know their whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kedge.core.world import World
from kedge.models.forward.parts import as_part, is_part, local, num_copies, num_parts, part_of
from kedge.models.forward.sharding import forget_sums, sharded_models, until_last_pass
from kedge.models.training.adamw import AdamWBackend, present


def own_parts_of(weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """What this process has of each weight, as parameters of their own over the same memory."""
    return [nn.Parameter(local(weight.detach())) for weight in weights]


class ShardedAdamW:
    """Gradients in `grad` of the weights; the update is that of `backend`, which is over this process's parts."""

    def __init__(self, weights: Sequence[nn.Parameter], backend: AdamWBackend, world: World) -> None:
        self._weights, self._backend, self._world = list(weights), backend, world
        self._models = sharded_models(weights)

    def allocate(self) -> None:
        self._backend.allocate()

    def clear(self) -> None:
        for weight in self._weights:
            weight.grad = None
        for model in self._models:
            forget_sums(model)
        self._backend.clear()

    def add(self, loss: Tensor, *, is_last: bool = True) -> None:
        for model in self._models:
            until_last_pass(model, is_last=is_last)
        loss.backward()

    def take(self, gradients: Sequence[Tensor | None]) -> None:
        raise NotImplementedError("gradients come from the backward pass")

    def gradients(self) -> list[Tensor | None]:
        return [None if weight.grad is None else local(weight.grad) for weight in self._weights]

    def widen(self) -> None:
        """They are float32."""

    def add_up(self, world: World, reached: Sequence[bool]) -> None:
        whole = [
            weight
            for weight, is_reached in zip(self._weights, reached, strict=True)
            if is_reached and not is_part(weight)
        ]
        for weight in whole:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        world.add(*present([weight.grad for weight in whole]))

    def norm(self) -> Tensor:
        mesh = self._world.mesh
        if num_parts(mesh) * num_copies(mesh) == 1:
            return nn.utils.get_total_norm(present(self.gradients()))
        of_parts, of_wholes = (
            nn.utils.get_total_norm(
                [local(weight.grad) for weight in self._weights if weight.grad is not None and is_part(weight) == kind]
            )
            for kind in (True, False)
        )
        square = of_parts.double().square()
        self._world.add(square)
        return (square / num_copies(mesh) + of_wholes.to(square.device).double().square()).sqrt().float()

    def step(self, *, rate: float, scale: Tensor) -> None:
        self._backend.take(self.gradients())
        self._backend.step(rate=rate, scale=scale)

    def settle(self, *, is_taken: bool) -> None:
        self._backend.settle(is_taken=is_taken)
        if is_taken:
            self.clear()


def as_parts(state: Mapping[str, Any], weights: Sequence[Tensor]) -> dict[str, Any]:
    """The state of an optimiser over parts, its moments as tensors that know their whole.

    `weights` are in the order of the optimiser's groups.
    """
    return _translated(state, weights, as_part)


def own_parts(state: Mapping[str, Any], weights: Sequence[Tensor]) -> dict[str, Any]:
    """The inverse of `as_parts`; of whole moments only the part is kept in memory."""
    return _translated(state, weights, lambda moment, weight: part_of(moment, weight).clone())


def _translated(
    state: Mapping[str, Any], weights: Sequence[Tensor], translate: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Any]:
    moments = {
        key: {
            name: translate(value, weights[key]) if isinstance(value, Tensor) and value.ndim else value
            for name, value in of.items()
        }
        for key, of in state["state"].items()
    }
    return {**state, "state": moments}
