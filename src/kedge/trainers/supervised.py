"""What loops over fixed data share: when held-out data is evaluated, early stopping, when refused steps end a run.

Left out: the loops, which are written out in the stages, and what surrounds them (`kedge.stages.shared.loop`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from kedge.core.settings import Section

MAX_BAD_STEPS = 5
"""Steps in a row whose loss or gradient is not finite before the run gives up: one is an accident, five are a fault."""


class EvalSettings(Section):
    """When held-out data is evaluated, and when to stop because of the result."""

    every: int = Field(default=50, ge=1)
    """Steps between two evaluations; there is always one at the end."""
    patience: int | None = Field(default=None, ge=1)
    """Stop after so many evaluations without a better held-out loss, and keep the best weights. None never stops."""


@dataclass(slots=True)
class EarlyStopping:
    """The best held-out loss so far, and how many evaluations came after it. Its state is a part of checkpoints."""

    patience: int | None
    best: float = math.inf
    best_step: int = 0
    waited: int = 0

    def observe(self, loss: float, step: int) -> bool:
        """Take note of one evaluation; True when it is the best so far.

        >>> stopping = EarlyStopping(patience=2)
        >>> [stopping.observe(loss, step) for step, loss in enumerate([3.0, 2.0, 2.5, 2.0])]
        [True, True, False, False]
        >>> stopping.best_step, stopping.is_over
        (1, True)
        """
        if loss < self.best:
            self.best, self.best_step, self.waited = loss, step, 0
            return True
        self.waited += 1
        return False

    @property
    def is_over(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load(self, state: Mapping[str, Any]) -> None:
        self.best, self.best_step, self.waited = state["best"], state["best_step"], state["waited"]
