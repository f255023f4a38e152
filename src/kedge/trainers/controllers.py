"""What changes from iteration to iteration besides the weights: the KL coefficient and the moments of the scores.

Shape letters: B sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kedge.algorithms import (
    AdaptiveKL,
    FixedKL,
    RunningMoments,
    clip_scores,
    missing_eos_penalty,
    missing_eos_score,
    overlong_penalty,
)
from kedge.core.errors import ContractStop
from kedge.trainers.evaluated import Judged
from kedge.trainers.settings import KLSettings, ScoreSettings


class KLExceeded(ContractStop):
    """The policy is further from the reference than the recipe allows."""

    def __init__(self, kl: float, limit: float) -> None:
        super().__init__(f"kl/mean is {kl:.3g} nats a sequence, over the limit of {limit:g}")
        self.kl = kl
        self.limit = limit

    def __reduce__(self) -> tuple[type[KLExceeded], tuple[float, float]]:
        return type(self), (self.kl, self.limit)


def hold_to_budget(judged: Judged, settings: KLSettings) -> None:
    """Refuse to learn more from a policy that has left its budget."""
    kl = judged.kl_B.mean().item()
    if settings.limit is not None and kl > settings.limit:
        raise KLExceeded(kl, settings.limit)


class Shaping(Protocol):
    """Settings that say how scores are shaped."""

    @property
    def scores(self) -> ScoreSettings: ...
    @property
    def max_new_tokens(self) -> int: ...


@dataclass(slots=True, kw_only=True)
class Steering:
    """Held in checkpoints: a resumed run steers as an uninterrupted one."""

    kl: FixedKL | AdaptiveKL
    moments: RunningMoments
    """Of the raw scores."""
    returns: RunningMoments
    """Of what whole answers earned: the baseline of REINFORCE."""

    def shaped(self, judged: Judged, cfg: Shaping) -> Tensor:
        """The scores as rewards are made from them; the moments take note of the raw ones first."""
        self.moments.update(judged.scores_B)
        length_B = judged.rollouts.response_mask_BT.sum(dim=1)
        return self.shape(judged.scores_B, judged.rollouts.finished_B, length_B, cfg)

    def shape(self, scores_B: Tensor, finished_B: Tensor, length_B: Tensor, cfg: Shaping) -> Tensor:
        """The same for any scores, by the moments as they are."""
        settings = cfg.scores
        if settings.normalise != "none":
            scores_B = self.moments.normalise(scores_B, centre=settings.normalise == "standard")
        if settings.clip is not None:
            scores_B = clip_scores(scores_B, limit=settings.clip)
        if settings.missing_eos_penalty is not None:
            scores_B = missing_eos_penalty(scores_B, finished_B, penalty=settings.missing_eos_penalty)
        if settings.missing_eos_score is not None:
            scores_B = missing_eos_score(scores_B, finished_B, score=settings.missing_eos_score)
        if settings.overlong_buffer is not None:
            soft_B = overlong_penalty(length_B, max_length=cfg.max_new_tokens, buffer=settings.overlong_buffer)
            scores_B = scores_B + settings.overlong_penalty * soft_B
        return scores_B

    def note(self, kl: float, rows: int) -> None:
        self.kl.update(kl, rows)

    def state(self) -> dict[str, Any]:
        return {"kl": self.kl.state(), "moments": self.moments.state(), "returns": self.returns.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.kl.load(state["kl"])
        self.moments.load(state["moments"])
        self.returns.load(state["returns"])


def steering_for(settings: KLSettings) -> Steering:
    kl = (
        FixedKL(settings.start)
        if settings.target is None
        else AdaptiveKL(settings.start, target=settings.target, horizon=settings.horizon)
    )
    return Steering(kl=kl, moments=RunningMoments(), returns=RunningMoments())
