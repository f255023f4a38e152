"""The settings of the critic-free methods, one section each; defaults are the published ones (docs/group.md).

Free of torch, so that a recipe is checked without it. How a method uses them is in `group_methods`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, cast

from pydantic import BeforeValidator, Field

from kedge.core.settings import Section
from kedge.core.suggest import did_you_mean
from kedge.trainers.settings import KLSettings, ScoreSettings


class GRPO(Section):
    """Group-relative policy optimisation (Shao et al. 2024): answers to a prompt are compared with each other."""

    kind: Literal["grpo"] = "grpo"
    clip: float = Field(default=0.2, gt=0, lt=1)
    """The ratio of new to old probability of a token counts between 1 - clip and 1 + clip."""
    clip_high: float | None = Field(default=None, gt=0)
    """Another bound above; null is the same as below."""


class DrGRPO(Section):
    """GRPO done right (Liu et al. 2025): no division by the std of a group nor by the length of an answer."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    clip: float = Field(default=0.2, gt=0, lt=1)
    """The ratio of new to old probability of a token counts between 1 - clip and 1 + clip."""


class RLOO(Section):
    """REINFORCE leave-one-out (Ahmadian et al. 2024): the mean of the other answers is the baseline."""

    kind: Literal["rloo"] = "rloo"


class Reinforce(Section):
    """REINFORCE (Williams 1992) with the mean return of all answers so far as the baseline."""

    kind: Literal["reinforce"] = "reinforce"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of later rewards."""


class ReinforcePlusPlus(Section):
    """REINFORCE++ (Hu 2025): returns by token, whitened over the whole batch, under PPO's clip."""

    kind: Literal["reinforce++"] = "reinforce++"
    clip: float = Field(default=0.2, gt=0, lt=1)
    """The ratio of new to old probability of a token counts between 1 - clip and 1 + clip."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of later rewards."""


class ReMax(Section):
    """ReMax (Li et al. 2023): the score of the likeliest answer to the same prompt is the baseline."""

    kind: Literal["remax"] = "remax"


class GSPO(Section):
    """Group sequence policy optimisation (Zheng et al. 2025): one ratio an answer, clipped tightly."""

    kind: Literal["gspo"] = "gspo"
    clip: float = Field(default=3e-4, gt=0, lt=1)
    """The ratio of an answer, by the mean of its tokens, counts from 1 - clip."""
    clip_high: float = Field(default=4e-4, gt=0)
    """And up to 1 + clip_high."""


class CISPO(Section):
    """CISPO (MiniMax-M1 2025): the weight of a token is clipped, its gradient never is."""

    kind: Literal["cispo"] = "cispo"
    clip: float = Field(default=1.0, gt=0, le=1)
    """The weight of a token is at least 1 - clip; 1 is no bound, as in the paper."""
    clip_high: float = Field(default=5.0, gt=0)
    """And at most 1 + clip_high."""


class DAPO(Section):
    """DAPO (Yu et al. 2025): GRPO with clip-higher, a mean over tokens, dynamic sampling and overlong shaping."""

    kind: Literal["dapo"] = "dapo"
    clip: float = Field(default=0.2, gt=0, lt=1)
    """The ratio of new to old probability of a token counts from 1 - clip."""
    clip_high: float = Field(default=0.28, gt=0)
    """And up to 1 + clip_high."""


AnyMethod = GRPO | DrGRPO | RLOO | Reinforce | ReinforcePlusPlus | ReMax | GSPO | CISPO | DAPO


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a method needs, and what a recipe need not say."""

    kl: Mapping[str, Any]
    """The anchor, over the defaults of `KLSettings`."""
    answers: int = 8
    minibatches: int = 1
    max_rounds: int | None = None
    overlong_share: float | None = None
    """The last so much of the longest answer costs."""
    needs_groups: bool = True
    """An answer is judged by others to the same prompt."""
    needs_greedy: bool = False
    """Or by the likeliest one."""
    is_on_policy: bool = False
    """Its loss has no ratio: it is right for the first step on a batch alone."""


_IN_LOSS: Final = {"where": "loss", "kind": "k3"}
_NONE: Final = {**_IN_LOSS, "start": 0.0}
_IN_REWARD: Final = {"where": "reward", "kind": "k1"}
TRAITS: Final[Mapping[str, Traits]] = {
    "grpo": Traits(kl={**_IN_LOSS, "start": 0.04}),
    "dr_grpo": Traits(kl=_NONE),
    "rloo": Traits(kl=_IN_REWARD, answers=4, is_on_policy=True),
    "reinforce": Traits(kl=_IN_REWARD, answers=1, needs_groups=False, is_on_policy=True),
    "reinforce++": Traits(kl=_IN_REWARD, answers=1, needs_groups=False),
    "remax": Traits(kl=_IN_REWARD, answers=1, needs_groups=False, needs_greedy=True, is_on_policy=True),
    "gspo": Traits(kl=_NONE, minibatches=4),
    "cispo": Traits(kl=_NONE, minibatches=4),
    "dapo": Traits(kl=_NONE, minibatches=4, max_rounds=10, overlong_share=0.2),
}
NAMES: Final = tuple(TRAITS)


def method_name(value: Any) -> Any:
    """What a recipe calls its method, rightly or wrongly; None where it has no name."""
    return cast("dict[str, Any]", value).get("kind") if isinstance(value, dict) else getattr(value, "kind", value)


def _from_name(value: Any) -> Any:
    """`method: grpo` is `method: {kind: grpo}`."""
    name = method_name(value)
    if name is None:
        raise ValueError("a method with settings says which one it is, such as {kind: grpo, clip: 0.1}; found no kind")
    if name not in NAMES:
        raise ValueError(f"there is no method '{name}'{did_you_mean(str(name), NAMES)}; methods: {', '.join(NAMES)}")
    return {"kind": value} if isinstance(value, str) else value


Method = Annotated[AnyMethod, Field(discriminator="kind"), BeforeValidator(_from_name)]
"""A method by its name, or with settings: `grpo`, `{kind: grpo, clip: 0.1}`."""


class GroupConfig(Section):
    """All of it: what `kedge.trainers.group.iteration` reads."""

    method: Method = GRPO()
    kl: KLSettings = KLSettings()
    scores: ScoreSettings = ScoreSettings()
    entropy: float = Field(default=0.0, ge=0)
    """Bonus for the entropy of the policy."""
    stop_at_kl: float | None = Field(default=None, gt=0)
    """End the passes over a batch when a step's `approx_kl` passes this."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the responses of one iteration."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps in one pass."""
    max_new_tokens: int = Field(default=256, ge=1)
    """The longest answer: what the overlong penalty is about, and the constant that Dr. GRPO divides by."""
