"""A module trained on one objective: `train_step` over its trainable parameters, with the module's mode around it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic

from torch import Tensor, nn

from kedge.core.optimiser import OptimiserSettings
from kedge.models.training.train_step import BatchT, Objective, Precision, Sums, Term, TrainStep

__all__ = ["Learner", "Objective", "Sums"]


class Learner(Generic[BatchT]):
    """`module` with AdamW over its trainable parameters, and the number of steps taken."""

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
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self.train_step = TrainStep(named, settings, total_steps=total_steps, precision=precision)

    @property
    def step(self) -> int:
        return self.train_step.step

    @property
    def total_steps(self) -> int:
        return self.train_step.total_steps

    def update(self, batches: Sequence[BatchT]) -> dict[str, float]:
        """One optimiser step; returns means over the step. A step that is refused counts, and changes no weight."""
        self.module.train()
        return self.train_step.learn(Term(objective=self.objective, batches=batches))

    def measure(self, batches: Iterable[BatchT]) -> dict[str, float]:
        """The same means without a step, in evaluation mode: for held-out batches."""
        self.module.eval()
        return self.train_step.measure(self.objective, list(batches))

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs: trained weights, optimiser, step."""
        return self.train_step.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self.train_step.load(state)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self.train_step.load_weights(weights)
