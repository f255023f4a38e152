"""A tiny model, and the smallest settings with which the stages run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.models.loading.tiny import make_tiny

LEARN = {"lr": 1e-2, "schedule": "constant", "warmup": 0.0, "eps": 1e-5}


def plain(answer: kedge.Answer) -> float:
    """A reward: characters of ASCII."""
    return sum(letter < "\x80" for letter in answer.text) / 8


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("models") / "tiny", hidden=32, layers=2))


@pytest.fixture(scope="session")
def rollouts(tiny: str) -> dict[str, Any]:
    """Settings that PPO and the group methods share: two iterations of four short answers."""
    return {
        "model": tiny,
        "seed": 5,
        "device": "cpu",
        "reward": plain,
        "prompts": [f"Say {letter}" for letter in "abcdef"],
        "roles": "separate",
        "iterations": 2,
        "batch": 4,
        "micro_batch": 4,
        "max_prompt_tokens": 40,
        "sampling": {"max_new_tokens": 6},
        "actor": LEARN,
    }


@pytest.fixture(scope="session")
def ppo(rollouts: dict[str, Any]) -> Callable[..., kedge.PPO]:
    """A short PPO; keywords go over its settings."""

    def make(**settings: Any) -> kedge.PPO:
        return kedge.PPO(**{**rollouts, "epochs": 1, "minibatches": 2, "critic": LEARN, **settings})

    return make


@pytest.fixture(scope="session")
def done(ppo: Callable[..., kedge.PPO], tmp_path_factory: pytest.TempPathFactory) -> kedge.Run:
    """A run of it that is done, to be read and compared with."""
    return ppo(iterations=3).run(tmp_path_factory.mktemp("runs") / "done", say=None)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"
