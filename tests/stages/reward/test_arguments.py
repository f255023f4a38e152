"""What the stage hands to its parts: every setting arrives where it belongs, and each member has a seed of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.core.seeds import seed_for
from kedge.data.batching import step_rows
from kedge.models.loading.tiny import make_tiny
from kedge.models.training.train_step import learning_rate
from kedge.runs.state import load_state
from kedge.stages.reward import train as reward_stage
from kedge.stages.reward.settings import RewardSettings

RunStage = Callable[..., Any]
SETTINGS = RewardSettings.model_validate(
    {
        "kind": "reward",
        "data": "data",
        "members": 2,
        "epochs": 2,
        "batch": 4,
        "micro_batch": 3,
        "max_length": 24,
        "lora": {"rank": 3, "dropout": 0.2},
        "optimiser": {"lr": 3e-3, "schedule": "linear", "warmup": 0.5},
        "eval": {"every": 2},
        "checkpoints": {"every": 3},
        "if_unfit": "go_on",
    }
)


def pair(name: str, number: int) -> dict[str, str]:
    return {"prompt": f"q {name} {number:02d}", "chosen": f"{name}{number:02d}yes", "rejected": f"{name}{number:02d}no"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("reward")
    make_tiny(home / "tiny", hidden=32, layers=1)
    for name, count in (("T", 14), ("H", 4)):
        rows = "".join(json.dumps(pair(name, number)) + "\n" for number in range(count))
        (home / f"{name}.jsonl").write_text(rows)
    return home


@pytest.fixture(scope="module")
def start(home: Path, run_recorded: RunStage) -> RunStage:
    def run(folder: Path, **options: Any) -> Any:
        paths = {"from": str(home / "tiny"), "data": str(home / "T.jsonl"), "heldout": str(home / "H.jsonl")}
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(reward_stage, "_report", lambda *_: None)  # it takes most of the time, and has its tests
            return run_recorded(folder, reward_stage.train, SETTINGS, **paths, **options)

    return run


@pytest.fixture(scope="module")
def whole(start: RunStage, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return start(tmp_path_factory.mktemp("whole") / "reward")


def numbers(recorded: Any, batches: list[Any], name: str = "T") -> list[int]:
    """Which comparisons are in these batches."""
    joined = b"".join(recorded.texts(batches))
    return [number for number in range(14) if f"{name}{number:02d}yes".encode() in joined]


def by_member(recorded: Any) -> list[list[list[Any]]]:
    """The steps of each member."""
    members = list(dict.fromkeys(map(id, recorded.learners)))
    steps = list(zip(map(id, recorded.learners), recorded.updates, strict=True))
    return [[batches for learner, batches in steps if learner == member] for member in members]


def test_each_member_learns_its_fold_in_an_order_of_its_own(whole: Any) -> None:
    folds = by_member(whole)
    assert len(folds) == 2
    learnt = [sorted({number for batches in steps for number in numbers(whole, batches)}) for steps in folds]
    assert sorted({*learnt[0], *learnt[1]}) == list(range(14))
    assert learnt[0] != learnt[1]
    for index, (steps, own) in enumerate(zip(folds, learnt, strict=True)):
        order = step_rows(len(own), epochs=2, batch=4, seed=seed_for(3, "member", index))
        assert [numbers(whole, batches) for batches in steps] == [sorted({own[row] for row in rows}) for rows in order]


def test_members_start_apart_and_drop_apart(whole: Any) -> None:
    assert list(dict.fromkeys(whole.seeds)) == [seed_for(3, "dropout", index) for index in (0, 1)]
    heads = [load_state(whole.folder / f"finished/member-{index}")["weights"] for index in (0, 1)]
    assert list(heads[0])
    for (first, mine), (_, other) in zip(heads[0].items(), heads[1].items(), strict=True):
        assert not torch.equal(mine, other), first


def test_the_steps_of_a_member_come_after_those_of_the_one_before(whole: Any) -> None:
    first, second = map(len, by_member(whole))
    assert list(whole.metric("train/loss")) == list(range(1, first + second + 1))
    assert load_state(whole.folder / "finished/member-0")["last_step"] == first
    assert load_state(whole.folder / "finished/member-1")["last_step"] == first + second
    assert list(whole.metric("heldout/loss")) == [
        *(step for step in range(1, first + 1) if step % 2 == 0 or step == first),
        *(first + step for step in range(1, second + 1) if step % 2 == 0 or step == second),
    ]
    assert {step for step in whole.checkpoints() if step > first} >= {first + 3, first + second}
    assert {step for step in whole.checkpoints() if step <= first} >= {3, first}


def test_held_out_comparisons_are_evaluated_and_never_learnt(whole: Any) -> None:
    learnt = b"".join(text for batches in whole.updates for text in whole.texts(batches))
    assert b"T03yes" in learnt
    assert b"H" not in learnt
    for batches in whole.evaluations:
        assert numbers(whole, batches, "H") == [0, 1, 2, 3]
        assert b"T" not in b"".join(whole.texts(batches))


def test_few_comparisons_are_in_memory_at_once_and_long_texts_lose_their_beginning(whole: Any) -> None:
    batches = [batch for part in (*whole.updates, *whole.evaluations) for batch in part]
    assert [len(batch.weight_C) for batch in whole.updates[0]] == [3, 1]
    assert [len(batch.weight_C) for batch in whole.evaluations[0]] == [4]  # without gradients more fit
    assert max(batch.tokens_BT.shape[1] for batch in batches) == 24
    assert not any(b"q " in text for part in whole.updates for text in whole.texts(part))


def test_adapters_learn_at_the_scheduled_rate(whole: Any) -> None:
    weights = whole.learners[0].state()["weights"]
    assert all((".lora_" in name and 3 in weight.shape) or "score" in name for name, weight in weights.items())
    assert sum(".lora_" in name for name in weights) > 0
    total = len(by_member(whole)[0])
    rates = [learning_rate(SETTINGS.optimiser, step, total) for step in range(1, total + 1)]
    assert list(whole.metric("train/lr").values())[:total] == rates


@pytest.mark.parametrize("step", [2, 6])
def test_interrupted_and_resumed_it_is_the_same_run(
    step: int, whole: Any, start: RunStage, records: Callable[[Path], list[dict[str, Any]]], tmp_path: Path
) -> None:
    """In the first member, and in the second."""
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "reward", interrupt_at=step)
    assert (tmp_path / "reward/finished").exists() == (step == 6)
    resumed = start(tmp_path / "reward")
    assert len(resumed.updates) == len(whole.updates) - step
    assert records(resumed.folder / "metrics.jsonl") == records(whole.folder / "metrics.jsonl")
    for file in sorted((whole.folder / "model").rglob("*.safetensors")):
        assert (resumed.folder / file.relative_to(whole.folder)).read_bytes() == file.read_bytes()
    assert (step, "run.interrupted") in [(event["step"], event["code"]) for event in resumed.lines("events")]


def test_interrupted_in_the_last_step_of_a_member_it_stops_before_the_next(
    whole: Any, start: RunStage, tmp_path: Path
) -> None:
    first, second = map(len, by_member(whole))
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "reward", interrupt_at=first)
    assert (tmp_path / "reward/finished/member-0").is_dir()
    assert len(start(tmp_path / "reward").updates) == second
