"""One exact optimiser step over some weights, from any number of terms and micro-batches.

Every micro-batch is divided by the weight of the whole step, so that cutting the step differently changes nothing. A
step whose loss or gradient is not finite is refused before it reaches the weights. Weights in bfloat16 learn through
float32 copies of them, which are what is saved: in bfloat16 itself small updates would be rounded away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from kedge.core.errors import CheckpointError, NumericsError
from kedge.core.optimiser import OptimiserSettings, learning_rate
from kedge.models.training.adamw import adamw_backend

BatchT = TypeVar("BatchT")
Precision = Literal["auto", "float32", "mixed"]
Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What a micro-batch adds to a step: the loss and each fact as sums over its items, not means.

    `items` is how many items the facts are sums over, where that is not the weight of the loss. `peaks` are facts of
    which the largest counts.
    """

    loss: Tensor
    facts: Mapping[str, Tensor]
    items: Tensor | None = None
    peaks: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(Generic[BatchT]):
    """What is learnt. `weight` is how many items a batch has, from data alone; `sums` runs the model on it."""

    weight: Callable[[BatchT], float]
    sums: Callable[[BatchT], Sums]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term(Generic[BatchT]):
    """One part of a step's loss: the mean of an objective over its own batches, times `coef`."""

    objective: Objective[BatchT]
    batches: Sequence[BatchT]
    coef: float = 1.0
    name: str = ""
    """Stands before the names of its facts."""


class TrainStep:
    """AdamW over `named` parameters, and the step it is at."""

    def __init__(
        self,
        named: Named,
        settings: OptimiserSettings,
        *,
        total_steps: int,
        precision: Precision = "auto",
        owner: str = "",
    ) -> None:
        """`owner` stands before the names of weights in errors, where several roles have weights of the same name."""
        self.settings = settings
        self._owner = f"{owner}'s " if owner else ""
        self.total_steps = total_steps
        self.step = 0
        self.named = list(named)
        device = self.named[0][1].device
        is_wide = all(one.dtype == torch.float32 for _, one in self.named)
        is_mixed = device.type == "cuda" and is_wide if precision == "auto" else precision == "mixed"
        self.autocast: Callable[[], AbstractContextManager[Any]] = (
            (lambda: torch.autocast(device.type, torch.bfloat16)) if is_mixed else nullcontext
        )
        self._masters = [_master(one) for _, one in self.named]
        self._optimiser = _adamw(self._masters, settings, device)
        self._backend = adamw_backend([one for _, one in self.named], self._masters, self._optimiser)

    def learn(self, *terms: Term[Any]) -> dict[str, float]:
        """One optimiser step; returns means over the step. A step that is refused counts, and changes no weight."""
        self.step += 1
        self._backend.clear()
        totals = [(term, self._accumulate(term)) for term in terms]
        norm = self._backend.norm()
        loss = torch.stack([term.coef * total.loss for term, total in totals]).sum()
        told = {f"{term.name}{name}": value for term, total in totals for name, value in total.means().items()}
        scale = (self.settings.clip / (norm + 1e-6)).clamp(max=1)
        *seen, whole, clipped = _read([*told.values(), norm, loss + norm, scale])
        if not math.isfinite(whole):
            raise NumericsError(f"step {self.step}: {self._culprit(loss)}; the weights are unchanged")
        rate = learning_rate(self.settings, self.step, self.total_steps)
        self._backend.step(rate=rate, scale=clipped)
        return {**dict(zip([*told, "grad_norm"], seen, strict=True)), "lr": rate}

    def _accumulate(self, term: Term[Any]) -> _Totals:
        weight = sum(term.objective.weight(batch) for batch in term.batches)
        if weight <= 0:
            raise NumericsError(
                f"step {self.step}: nothing in it counts (weight {weight:g}); the weights are unchanged"
            )
        totals = _Totals(weight=weight)
        for batch in term.batches:
            with self.autocast():
                sums = term.objective.sums(batch)
            self._backend.add(sums.loss * (term.coef / weight))
            totals.add(sums)
        return totals

    def measure(self, objective: Objective[BatchT], batches: Sequence[BatchT]) -> dict[str, float]:
        """The same means without learning."""
        totals = _Totals(weight=sum(objective.weight(batch) for batch in batches))
        with torch.no_grad(), self.autocast():
            for batch in batches:
                totals.add(objective.sums(batch))
        means = totals.means()
        return dict(zip(means, _read(list(means.values())), strict=True))

    def weights(self) -> dict[str, Tensor]:
        """What has been learnt, in full precision."""
        return {name: master.detach() for (name, _), master in zip(self.named, self._masters, strict=True)}

    def copy_bytes(self) -> int:
        """Memory of the float32 copies."""
        both = zip(self.named, self._masters, strict=True)
        return sum(master.numel() * master.element_size() for (_, one), master in both if one is not master)

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs: trained weights, optimiser, step."""
        return {"step": self.step, "weights": self.weights(), "optimiser": self._optimiser.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.load_weights(state["weights"])
        self._optimiser.load_state_dict(dict(state["optimiser"]))
        self.step = int(state["step"])

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        if list(weights) != [name for name, _ in self.named]:
            raise CheckpointError(
                "this checkpoint is of other trainable weights than the model has; was the recipe changed?"
            )
        for master, found in zip(self._masters, weights.values(), strict=True):
            master.copy_(found)
        self._backend.publish()

    def _culprit(self, loss: Tensor) -> str:
        """The first thing that is not finite, by name."""
        if not torch.isfinite(loss):
            return f"the {self._owner}loss is {loss.item()}"
        gradients = zip(self.named, self._backend.gradients(), strict=True)
        bad = [name for (name, _), grad in gradients if grad is not None and not torch.isfinite(grad).all()]
        if not bad:
            return f"the norm of the {self._owner}gradient is not finite"
        return f"the gradient of {self._owner}{bad[0]} is not finite"


@dataclass(slots=True, kw_only=True)
class _Totals:
    """Sums over the micro-batches of one term, kept on the device until the step is over."""

    weight: float
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    facts: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    items: Tensor | None = None
    peaks: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def add(self, sums: Sums) -> None:
        self.loss = sums.loss.detach().float() + self.loss.to(sums.loss.device)
        for name, value in sums.facts.items():
            found = value.detach().float()
            self.facts[name] = self.facts[name] + found if name in self.facts else found
        for name, value in sums.peaks.items():
            found = value.detach().float()
            self.peaks[name] = torch.maximum(self.peaks[name], found) if name in self.peaks else found
        if sums.items is not None:
            self.items = sums.items if self.items is None else self.items + sums.items

    def means(self) -> dict[str, Tensor]:
        items = self.weight if self.items is None else self.items
        facts = {name: value / items for name, value in self.facts.items()}
        return {"loss": self.loss / self.weight, **facts, **self.peaks}


def _read(numbers: Sequence[Tensor]) -> list[float]:
    """For one wait for the device."""
    return torch.stack(list(numbers)).tolist()


def _master(parameter: nn.Parameter) -> nn.Parameter:
    is_wide = parameter.dtype in (torch.float32, torch.float64)
    return parameter if is_wide else nn.Parameter(parameter.detach().float())


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
        fused=device.type in ("cpu", "cuda"),
    )
