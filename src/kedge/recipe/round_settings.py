"""`rounds:` of a recipe: the whole of it again and again, each round from what the one before has made."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kedge.core.settings import PathText, Section
from kedge.core.stage import MayChange


class KeepSettings(Section):
    """What becomes of the labels of earlier rounds in the stages `reward`."""

    pairs: Literal["all", "none"] = "all"
    """`all`: a reward model learns from the labels of every round so far; `none`: from its own round's alone."""
    weight_halves_after: float | None = Field(default=None, gt=0)
    """Rounds after which a label counts half as much, after as many again a quarter; null: all count the same."""


class GainSettings(Section):
    """When another round is not worth it: the rounds end, done."""

    over: Literal["previous", "first"] = "previous"
    """What the policy is compared with: that of the round before, or the one that the first round began with."""
    less_than: float = 0.0
    """The gain in the mean of `gold`, or in the judge's win rate beyond one half."""
    twice: bool = True
    """Two rounds in a row must have gained less; one may be bad luck."""


class StopSettings(Section):
    """What ends the rounds before `count`."""

    gate: Literal["fail"] | None = "fail"
    """A gate that fails ends the rounds with exit code 3; null: they go on, and that round is not the best."""
    drift: Literal["fail"] | None = "fail"
    """A drift check that fails ends the rounds with exit code 3; null: they go on, and that round is not the best."""
    gain: GainSettings | None = None
    """Too small a gain ends them, done."""


class DriftLimits(Section):
    """From where on a change between rounds is drift; null measures without a limit."""

    kl_previous: float | None = Field(default=15.0, gt=0)
    """KL of the policy to that of the round before, in nats a sequence."""
    kl_first: float | None = Field(default=30.0, gt=0)
    """KL of the policy to the one that the first round began with (SFT)."""
    spearman: float | None = Field(default=0.5, ge=-1, le=1)
    """Least rank correlation of the new reward model's scores with the old one's, on the anchor set."""
    flips: float | None = Field(default=0.3, ge=0, le=1)
    """Largest share of the anchor's pairs that the two order differently."""
    forgetting: float | None = Field(default=0.05, ge=0, le=1)
    """Largest loss of accuracy on an earlier round's held-out labels, beside the reward model of that round."""
    ece: float | None = Field(default=0.15, ge=0, le=1)
    """Largest expected calibration error of the reward model on held-out labels."""
    shift: float | None = Field(default=2.0, ge=0)
    """Largest shift of the old policy's scores under the new reward model, in standard deviations of the old scores."""
    alpha_drop: float | None = Field(default=0.15, ge=0)
    """Largest loss of people's α since round 1."""
    kappa_drop: float | None = Field(default=0.15, ge=0)
    """Largest loss of a judge's κ since round 1."""
    length_ratio: float | None = Field(default=1.5, gt=1)
    """Answers may become so many times longer, or shorter, in a round."""
    refusal_rise: float | None = Field(default=0.1, ge=0, le=1)
    """Largest rise of the share of refusals in a round."""
    distinct_ratio: float | None = Field(default=0.5, ge=0, le=1)
    """Least distinct-2 of the answers beside that of the round before."""
    win_rate: float | None = Field(default=0.4, ge=0, le=1)
    """Least win rate over the round before, by `gold` or by the judge."""


class DriftSettings(Section):
    """How rounds are compared with each other."""

    anchor: PathText | None = None
    """Pairs on which reward models are compared; the held-out labels of round 1 when absent."""
    prompts: PathText | None = None
    """Prompts on which policies are compared; those of the stage `evaluate`, else of the policy, when absent."""
    number: int = Field(default=200, ge=1, alias="count")
    """So many of the prompts, from the first on."""
    limits: Annotated[DriftLimits, MayChange()] = DriftLimits()
    """From where on a change is drift."""


class RoundsSettings(Section):
    """The whole recipe several times over."""

    count: Annotated[int, MayChange()] = Field(ge=2, le=100)
    """How many rounds."""
    first: dict[str, PathText | None] = Field(min_length=1)
    """What `previous.STAGE` is in round 1: another stage, a file or a model, or null where there is nothing yet."""
    keep: KeepSettings = KeepSettings()
    """The labels of earlier rounds."""
    drift: DriftSettings = DriftSettings()
    """How rounds are compared."""
    stop: Annotated[StopSettings, MayChange()] = StopSettings()
    """What ends the rounds early."""
