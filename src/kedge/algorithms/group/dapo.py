"""DAPO (Yu et al. 2025): GRPO with clip-higher, a mean over tokens, dynamic sampling and overlong shaping.

Dynamic sampling (`max_rounds`) and overlong shaping (`scores.overlong_buffer`) are settings of the stage, which this
method turns on. Left out: overlong filtering, which gives the tokens of truncated answers no loss.
Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kedge.algorithms.group.grpo import clipped_loss, group_relative_advantages
from kedge.algorithms.group.method import NO_KL, GroupMethod, GroupTraits
from kedge.core.settings import Section


class DAPOSettings(Section):
    """DAPO (Yu et al. 2025): GRPO with clip-higher, a mean over tokens, dynamic sampling and overlong shaping."""

    kind: Literal["dapo"] = "dapo"
    clip: float = Field(default=0.2, gt=0, lt=1)
    """The ratio of new to old probability of a token counts from 1 - clip."""
    clip_high: float = Field(default=0.28, gt=0)
    """And up to 1 + clip_high."""


DAPO = GroupMethod(
    settings=DAPOSettings,
    advantages=group_relative_advantages,
    loss=clipped_loss,
    per="token",
    traits=GroupTraits(kl=NO_KL, minibatches=4, max_rounds=10, overlong_share=0.2),
)
