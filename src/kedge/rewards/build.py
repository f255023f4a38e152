"""From settings to a source over rollouts: text sources come through their entry points, mixes are put together here.

Every source at the leaves has a failure counter of its own, named by its place (`reward`, `reward.style`).
Shape letters: K sources, B sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.algorithms import gated, weighted_sum_of, worst_case
from kedge.core import plugins
from kedge.core.answers import Answer, TextSource
from kedge.core.errors import ConfigError, DataError
from kedge.core.protocols import RewardSource
from kedge.core.records import Rollouts
from kedge.core.suggest import did_you_mean
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

    def __init__(
        self, parts: Mapping[str, RewardSource], settings: MixSource, read: Callable[[Rollouts], list[Answer]]
    ) -> None:
        """`read` gives the answers with the records of their prompts, which say where a gate is closed anyway."""
        self._parts = parts
        self._settings = settings
        self._read = read

    def score(self, rollouts: Rollouts) -> Tensor:
        scores = {name: part.score(rollouts) for name, part in self._parts.items()}
        if self._settings.risky is None:
            return mixed(scores, self._settings)
        risky = [is_risky(answer.extra, self._settings.risky) for answer in self._read(rollouts)]
        return mixed(scores, self._settings, torch.tensor(risky, device=rollouts.tokens_BT.device))


def build(settings: RewardSourceSettings, wiring: Wiring, *, name: str = "reward") -> Reward:
    """The source that `settings` describe; `name` is what its failures are reported under."""
    if isinstance(settings, MixSource):
        parts = {key: build(part, wiring, name=f"{name}.{key}") for key, part in settings.parts.items()}
        counters = tuple(counter for part in parts.values() for counter in part.failure_counters)
        _refuse_unknown_field(settings, wiring.context.fields)
        return Reward(source=Mix(parts, settings, wiring.read), failure_counters=counters)
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


def is_risky(record: Mapping[str, Any], field: str) -> bool:
    """Whether the record of a prompt says so in this field, true or false; one without it is not.

    >>> is_risky({"unsafe": True}, "unsafe"), is_risky({}, "unsafe")
    (True, False)
    """
    value = record.get(field)
    if value is not None and not isinstance(value, bool):
        raise DataError(f"risky: the field '{field}' of a prompt is {value!r}; expected true or false")
    return bool(value)


def _refuse_unknown_field(settings: MixSource, fields: frozenset[str] | None) -> None:
    if settings.risky is not None and fields is not None and settings.risky not in fields:
        known = ", ".join(sorted(fields)) or "none"
        raise ConfigError(
            f"risky: no prompt has the field '{settings.risky}'{did_you_mean(settings.risky, fields)}; their fields "
            f"are: {known}"
        )


def mixed(scores: Mapping[str, Tensor], settings: MixSource, is_risky_B: Tensor | None = None) -> Tensor:
    """One score a row from the scores of the parts: their weighted sum, their minimum, or one gated by the other, which
    rows that are risky do not pass.

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
            gate_B = scores[settings.gate or ""]
            return gated(scores[other], gate_B, threshold=settings.threshold, is_risky_B=is_risky_B)
