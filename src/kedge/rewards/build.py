"""From settings to a source over rollouts: text sources come through their entry points, mixes are put together here.

Every source at the leaves has a failure counter of its own, named by its place (`reward`, `reward.style`).
Shape letters: K sources, B sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kedge.algorithms import gated, weighted_sum_of, worst_case
from kedge.core import plugins
from kedge.core.answers import Answer, TextSource
from kedge.core.protocols import RewardSource
from kedge.core.records import Rollouts
from kedge.core.world import ALONE, World
from kedge.rewards.context import RewardContext
from kedge.rewards.failures import Announce, CountedSource, FailureCounter, Reward
from kedge.rewards.rollouts import FromText
from kedge.rewards.settings import FailureSettings, MixSource, ModelSource, RewardSourceSettings, TextSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """What sources need and only a running stage has."""

    context: RewardContext
    read: Callable[[Rollouts], list[Answer]]
    """Rollouts as answers (`kedge.rewards.rollouts.answers_of`)."""
    open_model: Callable[[ModelSource, FailureCounter], RewardSource]
    """A reward model on tokens, or on text through `FromText` (`kedge.rewards.model`)."""
    failures: FailureSettings
    announce: Announce = lambda _: None
    """Says at once that a source had no score for an answer, the first time."""
    world: World = ALONE
    """The processes that have answers scored together: each asks about its share."""


class Mix:
    """Several sources combined into one score. A row without a score (NaN) in a part that counts has none here."""

    def __init__(self, parts: Mapping[str, RewardSource], settings: MixSource) -> None:
        self._parts = parts
        self._settings = settings

    def score(self, rollouts: Rollouts) -> Tensor:
        return mixed({name: part.score(rollouts) for name, part in self._parts.items()}, self._settings)


def build(settings: RewardSourceSettings, wiring: Wiring, *, name: str = "reward") -> Reward:
    """The source that `settings` describe; `name` is what its failures are reported under."""
    if isinstance(settings, MixSource):
        parts = {key: build(part, wiring, name=f"{name}.{key}") for key, part in settings.parts.items()}
        counters = tuple(counter for part in parts.values() for counter in part.failure_counters)
        return Reward(source=Mix(parts, settings), failure_counters=counters)
    counter = FailureCounter(name, wiring.failures, wiring.announce)
    if isinstance(settings, ModelSource):
        return Reward(source=wiring.open_model(settings, counter), failure_counters=(counter,))
    counted = CountedSource(text_source(settings, wiring.context), counter, world=wiring.world)
    return Reward(source=FromText(counted, wiring.read), failure_counters=(counter,))


def try_sources(settings: RewardSourceSettings, context: RewardContext) -> None:
    """Build every source that reads text, so that what is wrong with one is an error before anything is sampled."""
    if isinstance(settings, MixSource):
        for part in settings.parts.values():
            try_sources(part, context)
    elif not isinstance(settings, ModelSource):
        text_source(settings, context)


def text_source(settings: TextSettings, context: RewardContext) -> TextSource:
    return plugins.find("rewards", settings.kind)(settings, context)


def mixed(scores: Mapping[str, Tensor], settings: MixSource) -> Tensor:
    """One score a row from the scores of the parts: their weighted sum, their minimum, or one gated by the other.

    >>> settings = MixSource.model_validate({"kind": "mix", "weights": {"b": 0.5},
    ...     "parts": {"a": {"kind": "regex", "pattern": "x"}, "b": {"kind": "regex", "pattern": "y"}}})
    >>> mixed({"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([1.0, 1.0])}, settings).tolist()
    [1.5, 0.5]
    """
    scores_KB = torch.stack(list(scores.values()))
    match settings.how:
        case "weighted":
            weights = [settings.weights.get(name, 1.0) for name in scores]
            return weighted_sum_of(scores_KB, torch.tensor(weights, device=scores_KB.device))
        case "worst":
            return worst_case(scores_KB)
        case "gated":
            (other,) = (name for name in scores if name != settings.gate)
            return gated(scores[other], scores[settings.gate or ""], threshold=settings.threshold)
