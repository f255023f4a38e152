"""Recipes whose rounds are wrong, and what the error has to say. `attempt` tries one."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from small_rounds import STAGES, write_rounds

from kedge.core.errors import ConfigError
from kedge.recipe.rounds import rounds_of
from kedge.recipe.schema import load_recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """Changes of the small recipe, and parts of the message that has to come."""

    name: str
    expected: tuple[str, ...]
    rounds: Mapping[str, Any] = field(default_factory=dict[str, Any])
    stages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])


CASES = (
    Wrong(name="one round", rounds={"count": 1}, expected=("line 8: rounds.count: must be at least 2, found 1",)),
    Wrong(name="no first", rounds={"first": {}}, expected=("rounds.first",)),
    Wrong(
        name="previous of an unknown stage",
        stages={"ppo": {"from": "previous.pppo"}},
        expected=("ppo.from", "'previous.pppo'", "did you mean 'ppo'?"),
    ),
    Wrong(
        name="previous of an unknown output",
        stages={"reward": {"data": "previous.prepare.trian"}},
        rounds={"first": {"ppo": "sft", "reward": None, "prepare": "prompts.jsonl"}},
        expected=("reward.data", "previous.prepare makes train, heldout", "did you mean 'train'?"),
    ),
    Wrong(
        name="previous of another kind",
        stages={"ppo": {"reward": "previous.ppo"}},
        expected=("ppo.reward: needs reward_model, but previous.ppo.model is model",),
    ),
    Wrong(
        name="first says nothing of a stage",
        rounds={"first": {"reward": None}},
        expected=("rounds.first", "has no ppo", "previous.ppo", "a stage, a file, or null"),
    ),
    Wrong(
        name="first of an unknown stage",
        rounds={"first": {"ppo": "sft", "rewrad": None}},
        expected=("rounds.first.rewrad", "there is no stage of that name (did you mean 'reward'?)"),
    ),
    Wrong(
        name="first of the round before",
        rounds={"first": {"ppo": "previous.ppo"}},
        expected=("rounds.first.ppo", "in round 1 there is no round before"),
    ),
    Wrong(
        name="null where an input is required",
        stages={"ppo": {"reward": "previous.reward"}},
        expected=(
            "stages.ppo.reward",
            "(in round 1, where previous.ppo is sft and previous.reward is null: rounds.first)",
        ),
    ),
    Wrong(
        name="no models in round 1",
        stages={"eval": {"models": ["previous.reward"]}},
        expected=("eval.models: needs model, but previous.reward.model is reward_model",),
    ),
    Wrong(
        name="a stage that waits for itself",
        rounds={"first": {"ppo": "ppo"}},
        expected=("stages wait for each other: ask -> prepare -> reward -> ppo -> ask",),
    ),
    Wrong(
        name="nothing of the round before",
        stages={"ask": {"models": ["sft"]}, "ppo": {"from": "sft"}, "eval": {"models": ["sft", "ppo"]}},
        expected=("rounds", "no stage reads what the round before made (previous.ppo)"),
    ),
    Wrong(
        name="a stage with the name of a round",
        stages={"round-1": dict(STAGES["sft"])},
        expected=("stages.round-1", "uses 'round-1' itself"),
    ),
    Wrong(
        name="a stage called drift",
        stages={"drift": dict(STAGES["sft"])},
        expected=("stages.drift", "uses 'drift' itself"),
    ),
    Wrong(
        name="weights twice",
        stages={"reward": {"weights": "certainty"}},
        expected=("reward.weights", "rounds.keep.weight_halves_after"),
    ),
    Wrong(name="an unknown limit", rounds={"drift": {"limits": {"kl": 3}}}, expected=("rounds.drift.limits.kl",)),
)


def attempt(case: Wrong) -> str | None:
    """None where the error says what it has to; else what it said."""
    with tempfile.TemporaryDirectory() as place:
        file = write_rounds(Path(place), rounds=case.rounds, stages=case.stages)
        try:
            rounds_of(load_recipe(file))
        except ConfigError as error:
            missing = [part for part in case.expected if part not in str(error)]
            return f"{case.name}: {missing} is not in: {error}" if missing else None
    return f"{case.name}: was accepted"
