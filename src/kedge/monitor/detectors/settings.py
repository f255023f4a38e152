"""Settings of the detectors: one threshold each, and null switches it off. Rules and sources: docs/detectors.md."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from kedge.core.settings import Section

MISMATCHES = {"float32": 0.005, "float16": 0.02, "bfloat16": 0.05}
"""Nats a token by which generator and trainer may differ, by the type that they compute in."""


class KLDetectors(Section):
    """KL to the reference."""

    over_target: float | None = Field(default=1.5, gt=1)
    """Multiple of `kl.target` that the KL of ten steps may average."""
    near_limit: float | None = Field(default=0.8, gt=0, lt=1)
    """Share of `kl.limit` above which the budget is nearly spent."""
    near_zero: float | None = Field(default=0.01, gt=0)
    """Nats below which a policy that has had twenty steps does not move."""
    reference_follows: float | None = Field(default=0.1, gt=0, lt=1)
    """Share of the KL without which the reward cannot have moved as it has."""
    not_zero_at_start: float | None = Field(default=0.1, gt=0)
    """Nats in the first step, where policy and reference are the same."""
    no_room: float | None = Field(default=0.01, gt=0)
    """Nats that the best policy under the penalty is away from the reference."""
    running_away: float | None = Field(default=2.0, gt=1)
    """Growth of the KL within about four steps, once it is beyond its target (or 10 nats)."""
    negative: float | None = Field(default=0.1, gt=0)
    """Nats below zero that are more than the noise of sampling."""


class RewardDetectors(Section):
    """The scores, and gold scores beside them."""

    gold_falls: float | None = Field(default=8.0, gt=0)
    """Standard errors by which gold is below its best while the reward is up."""
    against_gold: float | None = Field(default=5.0, gt=0)
    """Standard errors by which gold is below its start, never having been above it, and the reward above its own."""
    falls: float | None = Field(default=6.0, gt=0)
    """Standard errors by which the reward is below its start."""
    constant: float | None = Field(default=1e-6, gt=0)
    """Spread of the scores below which they are all the same."""
    saturated: float | None = Field(default=0.6, gt=0, lt=1)
    """Share of answers at the highest or the lowest score, from the start."""
    unrelated: float | None = Field(default=0.2, gt=0, lt=1)
    """Correlation of reward and gold in the first steps below which they have nothing to do with each other."""
    length_correlation: float | None = Field(default=0.6, gt=0, lt=1)
    """Correlation of reward and length within an iteration."""
    scale: float | None = Field(default=10.0, gt=0)
    """Largest standard deviation of the scores."""
    scale_drift: float | None = Field(default=3.0, gt=1)
    """Growth of the scores' standard deviation since the start."""
    out_of_range: float | None = Field(default=0.25, gt=0, lt=1)
    """Share of scores outside of what reward training saw."""
    disagreement: float | None = Field(default=2.0, gt=1)
    """Growth of the members' disagreement since the start."""
    unscored: float | None = Field(default=0.1, gt=0, lt=1)
    """Share of answers without a score."""


class AnswerDetectors(Section):
    """Length, ending, repetition and variety of the answers."""

    longer: float | None = Field(default=2.0, gt=1)
    """Growth of the mean length since the start."""
    truncated: float | None = Field(default=0.5, gt=0, lt=1)
    """Share of answers that are cut off."""
    never_end: float | None = Field(default=0.95, gt=0, le=1)
    """Share of answers that are cut off in each of the first steps."""
    repetition: float | None = Field(default=0.2, gt=0, lt=1)
    """Share of 4-grams that repeat an earlier one of the same answer."""
    less_distinct: float | None = Field(default=0.5, gt=0, lt=1)
    """What is left of the distinct 2-grams of the start."""
    alike: float | None = Field(default=0.5, gt=0, lt=1)
    """Mean Jaccard similarity of two answers."""


class PromptDetectors(Section):
    """The prompts that are asked."""

    repeated: float | None = Field(default=0.9, gt=0, lt=1)
    """Share of the prompts that the iteration before asked too."""


class PolicyDetectors(Section):
    """The updates of the policy."""

    entropy_collapse: float | None = Field(default=0.2, gt=0, lt=1)
    """What is left of the entropy of the start."""
    clips_often: float | None = Field(default=0.3, gt=0, lt=1)
    """Share of tokens whose ratio is clipped."""
    large_steps: float | None = Field(default=0.1, gt=0)
    """Nats a token that the updates of one batch may move the policy by."""
    never_clips: int | None = Field(default=20, ge=1, le=40)
    """Steps in a row without a clipped token."""
    mismatch: PositiveFloat | Literal["auto"] | None = "auto"
    """Mean absolute difference of the generator's and the trainer's log-probs, nats a token; auto knows the precision
    in use: 0.005 in float32, 0.02 in float16, 0.05 in bfloat16."""
    gradient_spike: float | None = Field(default=10.0, gt=1)
    """Gradient norm over the median of the twenty before it."""


class ValueDetectors(Section):
    """The critic."""

    loss_explodes: float | None = Field(default=10.0, gt=1)
    """Value loss over the median of the twenty before it."""
    worse_than_nothing: float | None = Field(default=1.8, gt=1)
    """Value loss of the first steps over that of a critic that says 0."""
    explains_nothing: float | None = Field(default=0.01, gt=-1, lt=1)
    """Explained variance, averaged over ten steps, below which the critic is of no use."""
    gradient_spike: float | None = Field(default=10.0, gt=1)
    """Gradient norm over the median of the twenty before it."""


class ExamDetectors(Section):
    """Exams that the policy takes while it trains."""

    tax: float | None = Field(default=0.025, gt=0, lt=1)
    """P-value of an exam being no worse than at the start, adjusted for the number of exams, at two looks in a row."""


class JudgeDetectors(Section):
    """A judge that compares the policy with its start."""

    falls: float | None = Field(default=0.025, gt=0, lt=1)
    """P-value of the win rate not having fallen from its best look, at two looks in a row."""


class DetectorSettings(Section):
    """Which detectors watch a run, and their thresholds; null switches one off."""

    kl: KLDetectors = KLDetectors()
    """KL to the reference."""
    reward: RewardDetectors = RewardDetectors()
    """The scores, and gold scores beside them."""
    answers: AnswerDetectors = AnswerDetectors()
    """Length, ending, repetition and variety of the answers."""
    prompts: PromptDetectors = PromptDetectors()
    """The prompts that are asked."""
    policy: PolicyDetectors = PolicyDetectors()
    """The updates of the policy."""
    value: ValueDetectors = ValueDetectors()
    """The critic."""
    exam: ExamDetectors = ExamDetectors()
    """Exams that the policy takes while it trains."""
    judge: JudgeDetectors = JudgeDetectors()
    """A judge that compares the policy with its start."""
    not_finite: bool = True
    """A metric that is not a finite number."""

    def threshold(self, code: str, *, precision: str = "bfloat16") -> float | None:
        """The threshold of the detector `code` (`kl.over_target`); None when it is switched off. `precision` is the
        type that log-probs are computed in.

        >>> DetectorSettings().threshold("kl.near_limit")
        0.8
        >>> DetectorSettings().threshold("policy.mismatch", precision="float32")
        0.005
        """
        value: object = self
        for name in code.split("."):
            value = getattr(value, name)
        if isinstance(value, bool):
            return 0.0 if value else None
        if value == "auto":
            return MISMATCHES.get(precision, MISMATCHES["bfloat16"])
        assert value is None or isinstance(value, int | float)
        return value
