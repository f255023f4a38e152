"""Weights trained on one objective: the optimiser's steps, and held-out measurements between them.

Dropout acts inside of `update` alone: everywhere else the model is in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic

from torch import Tensor

from kedge.core.optimiser import OptimiserSettings
from kedge.models.forward.backbones import Backbone
from kedge.models.forward.reader import evaluating
from kedge.models.training.passes import Cut, Passes
from kedge.models.training.train_step import BatchT, Objective, Sums, Term, TrainedWeights, TrainStep

__all__ = ["Learner", "Objective", "Sums"]


class Learner(Generic[BatchT]):
    """AdamW over `trained`, from step 0. `backbone` is what the objective computes with."""

    def __init__(
        self,
        trained: TrainedWeights,
        backbone: Backbone,
        objective: Objective[BatchT],
        settings: OptimiserSettings,
        *,
        total_steps: int,
        passes: Passes | None = None,
    ) -> None:
        """`passes` says how much of a step is computed at once."""
        self.trained, self.backbone, self.objective = trained, backbone, objective
        self.train_step = TrainStep(
            trained.named,
            settings,
            total_steps=total_steps,
            masters=trained.masters,
            passes=passes,
            on_host=trained.on_host,
        )

    @property
    def step(self) -> int:
        return self.train_step.step

    @property
    def total_steps(self) -> int:
        return self.train_step.total_steps

    def update(self, batches: Cut[BatchT]) -> dict[str, float]:
        """One optimiser step; returns means over the step. A step that is refused counts, and changes no weight."""
        module = self.trained.module
        module.train()
        try:
            with self.backbone.active():
                return self.train_step.learn(Term(objective=self.objective, batches=batches))
        finally:
            module.eval()

    def measure(self, batches: Cut[BatchT]) -> dict[str, float]:
        """The same means without a step: for held-out batches."""
        with evaluating(self.trained.module), self.backbone.active():
            return self.train_step.measure(self.objective, batches)

    def weights(self) -> dict[str, Tensor]:
        """The trained weights by the names of their parameters, in full precision."""
        return self.trained.weights()

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs: trained weights, optimiser, step."""
        return self.train_step.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self.train_step.load(state)
