"""A module that learns one objective: the optimiser step of `stepper`, with the module around it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic

from torch import Tensor, nn

from kedge.core.optimiser import OptimiserSettings
from kedge.models.training.train_step import BatchT, Objective, Precision, Sums, Term, TrainStep

__all__ = ["Learner", "Objective", "Sums"]


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
        named = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
        self.stepper = TrainStep(named, settings, total_steps=total_steps, precision=precision)

    @property
    def step(self) -> int:
        return self.stepper.step

    @property
    def total_steps(self) -> int:
        return self.stepper.total_steps

    def update(self, batches: Sequence[BatchT]) -> dict[str, float]:
        """One optimiser step; returns means over the step. A step that is refused counts, and changes no weight."""
        self.module.train()
        return self.stepper.learn(Term(objective=self.objective, batches=batches))

    def measure(self, batches: Iterable[BatchT]) -> dict[str, float]:
        """The same means without learning, on held-out batches."""
        self.module.eval()
        return self.stepper.measure(self.objective, list(batches))

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs: trained weights, optimiser, step."""
        return self.stepper.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self.stepper.load(state)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self.stepper.load_weights(weights)
