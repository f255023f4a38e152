"""The loop of `sft` and `reward`: passes over fixed data, looked at on held-out data, stopped early if asked.

Left out here: where batches come from, what the loss is, how a checkpoint is written. They are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic import Field

from kedge.core.errors import NumericsError
from kedge.core.protocols import Metrics, Tracker
from kedge.core.settings import Section

BatchT = TypeVar("BatchT", contravariant=True)

MAX_BAD_STEPS = 5
"""Steps in a row whose loss or gradient is not finite before the run gives up: one is an accident, five are a fault."""


class LearnerRole(Protocol[BatchT]):
    """A module that learns. `update` is one optimiser step, and counts it in `step` even when it refuses it."""

    @property
    def step(self) -> int: ...
    def update(self, batches: Sequence[BatchT]) -> Metrics: ...


class LookSettings(Section):
    """When to look at held-out data, and when to stop because of what is seen."""

    every: int = Field(default=50, ge=1)
    """Steps between two looks; there is always one at the end."""
    patience: int | None = Field(default=None, ge=1)
    """Stop after so many looks without a better held-out loss; the best weights are kept. None never stops."""


@dataclass(slots=True)
class Patience:
    """Early stopping, with a state that a checkpoint holds."""

    limit: int | None
    best: float = math.inf
    best_step: int = 0
    waited: int = 0

    def notes_a_best(self, loss: float, step: int) -> bool:
        """Take note of one look; True when it is the best so far."""
        if loss < self.best:
            self.best, self.best_step, self.waited = loss, step, 0
            return True
        self.waited += 1
        return False

    @property
    def is_over(self) -> bool:
        return self.limit is not None and self.waited >= self.limit

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load(self, state: Mapping[str, Any]) -> None:
        self.best, self.best_step, self.waited = state["best"], state["best_step"], state["waited"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What the loop does between steps. `look` gives held-out metrics with `heldout/loss` among them, or nothing.

    `save` writes a checkpoint; it is told whether this one is the best so far. `keep` puts the batches of a step that
    was refused aside for study, and says where.
    """

    tracker: Tracker
    look: Callable[[], Metrics]
    look_every: int
    save: Callable[[bool], None]
    save_every: int
    patience: Patience
    keep: Callable[[Sequence[Any]], str]


def train(learner: LearnerRole[BatchT], steps: Iterable[Sequence[BatchT]], watch: Watch, *, total: int) -> None:
    """Update on each step's micro-batches in turn, until they end or patience does."""
    if watch.patience.is_over:  # a resumed run that was killed just after it had stopped
        return
    num_bad = 0
    for batches in steps:
        try:
            metrics = {f"train/{name}": value for name, value in learner.update(batches).items()}
        except NumericsError as error:
            num_bad += 1
            message = f"dropped: {error}; its batch is kept in {watch.keep(batches)}"
            watch.tracker.event(
                {"level": "warning", "code": "step.not_finite", "message": message, "step": learner.step}
            )
            if num_bad == MAX_BAD_STEPS:
                raise
            if learner.step < total:
                continue
            metrics = {}  # the last step is looked at and saved all the same
        else:
            num_bad = 0
        step, is_best = learner.step, False
        if step == total or step % watch.look_every == 0:
            seen = watch.look()
            metrics |= seen
            is_best = "heldout/loss" in seen and watch.patience.notes_a_best(seen["heldout/loss"], step)
        watch.tracker.log(metrics, step=step)
        if is_best or watch.patience.is_over or step == total or step % watch.save_every == 0:
            watch.save(is_best)
        if watch.patience.is_over:
            break
