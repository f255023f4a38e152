"""A module that learns: one exact optimiser step from any number of micro-batches.

Every micro-batch is divided by the weight of the whole step, so that cutting the step differently changes nothing. A
step whose loss or gradient is not finite is refused before it reaches the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from kedge.core.errors import CheckpointError, NumericsError
from kedge.core.optimiser import OptimiserSettings, learning_rate

BatchT = TypeVar("BatchT")
Precision = Literal["auto", "float32", "mixed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What a micro-batch adds to a step: the loss and each fact as sums over its items, not means."""

    loss: Tensor
    facts: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(Generic[BatchT]):
    """What is learnt. `weight` is how many items a batch has, from data alone; `sums` runs the model on it."""

    weight: Callable[[BatchT], float]
    sums: Callable[[BatchT], Sums]


class Learner(Generic[BatchT]):
    """`module` with AdamW over its trainable parameters, and the step it is at."""

    def __init__(
        self,
        module: nn.Module,
        objective: Objective[BatchT],
        settings: OptimiserSettings,
        *,
        total_steps: int,
        precision: Precision = "auto",
    ) -> None:
        self.module = module
        self.objective = objective
        self.settings = settings
        self.total_steps = total_steps
        self.step = 0
        self.device = next(module.parameters()).device
        self.is_mixed = self.device.type == "cuda" if precision == "auto" else precision == "mixed"
        self._named = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
        self._optimiser = _adamw([one for _, one in self._named], settings, self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        """Where forward passes run: bfloat16 products over float32 weights when mixed, as they are otherwise."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.is_mixed else nullcontext()

    def update(self, batches: Sequence[BatchT]) -> dict[str, float]:
        """One optimiser step; returns means over the step. A step that is refused counts, and changes no weight."""
        weight = sum(self.objective.weight(batch) for batch in batches)
        self.step += 1
        if weight <= 0:
            raise NumericsError(
                f"step {self.step}: nothing in it counts (weight {weight:g}); the weights are unchanged"
            )
        self.module.train()
        self._optimiser.zero_grad(set_to_none=True)
        totals = self._accumulate(batches, weight)
        parameters = [one for _, one in self._named]
        norm = nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])
        if not torch.isfinite(totals["loss"] + norm):
            raise NumericsError(f"step {self.step}: {self._culprit(totals['loss'])}; the weights are unchanged")
        nn.utils.clip_grads_with_norm_(parameters, self.settings.clip, norm)
        rate = learning_rate(self.settings, self.step, self.total_steps)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()
        return {**_means(totals, weight), "grad_norm": norm.item(), "lr": rate}

    @torch.no_grad()
    def measure(self, batches: Iterable[BatchT]) -> dict[str, float]:
        """The same means without learning, on held-out batches."""
        self.module.eval()
        totals: dict[str, Tensor] = {}
        weight = 0.0
        for batch in batches:
            weight += self.objective.weight(batch)
            with self.autocast():
                _add(totals, self.objective.sums(batch))
        return _means(totals, weight)

    def _accumulate(self, batches: Sequence[BatchT], weight: float) -> dict[str, Tensor]:
        totals: dict[str, Tensor] = {}
        for batch in batches:
            with self.autocast():
                sums = self.objective.sums(batch)
            (sums.loss / weight).backward()
            _add(totals, sums)
        return totals

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs: trained weights, optimiser, step."""
        return {
            "step": self.step,
            "weights": {name: one.detach() for name, one in self._named},
            "optimiser": self._optimiser.state_dict(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.load_weights(state["weights"])
        self._optimiser.load_state_dict(dict(state["optimiser"]))
        self.step = int(state["step"])

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        if list(weights) != [name for name, _ in self._named]:
            raise CheckpointError(
                "this checkpoint is of other trainable weights than the model has; was the recipe changed?"
            )
        for name, one in self._named:
            one.copy_(weights[name])

    def _culprit(self, loss: Tensor) -> str:
        """The first thing that is not finite, by name."""
        if not torch.isfinite(loss):
            return f"the loss is {loss.item()}"
        bad = [name for name, one in self._named if one.grad is not None and not torch.isfinite(one.grad).all()]
        return f"the gradient of {bad[0]} is not finite" if bad else "the norm of the gradient is not finite"


def _add(totals: dict[str, Tensor], sums: Sums) -> None:
    for name, value in (("loss", sums.loss), *sums.facts.items()):
        found = value.detach().float()
        totals[name] = totals[name] + found if name in totals else found


def _means(totals: Mapping[str, Tensor], weight: float) -> dict[str, float]:
    return {name: (value / weight).item() for name, value in totals.items()}


def _adamw(parameters: Sequence[nn.Parameter], settings: OptimiserSettings, device: torch.device) -> torch.optim.AdamW:
    """Weight decay pulls on matrices; on biases and norms it only does harm."""
    groups = [
        {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=device.type == "cuda",
    )
