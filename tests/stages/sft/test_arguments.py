"""What the stage hands to its parts: every setting arrives where it belongs, and Ctrl-C leaves a run to go on with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.data.batching import step_rows
from kedge.models.loading.tiny import make_tiny
from kedge.models.training.train_step import learning_rate
from kedge.stages.sft.settings import SFTSettings
from kedge.stages.sft.train import train

RunStage = Callable[..., Any]
SETTINGS = SFTSettings.model_validate(
    {
        "kind": "sft",
        "data": "data",
        "epochs": 1.5,
        "batch": 4,
        "micro_batch": 1,
        "max_length": 110,
        "lora": {"rank": 3, "dropout": 0.2},
        "optimiser": {"lr": 3e-3, "schedule": "linear", "warmup": 0.5},
        "eval": {"every": 2},
        "checkpoints": {"every": 3},
        "samples": 1,
        "sample_tokens": 3,
    }
)
NUM_STEPS = 5  # 1.5 passes over 12 conversations, 4 a step


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("sft")
    make_tiny(home / "tiny", hidden=32, layers=1)
    for name, count in (("train", 12), ("held", 5)):
        rows = [{"prompt": f"{name} {number:02d}?", "completion": f"{number:02d}!"} for number in range(count)]
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


@pytest.fixture(scope="module")
def start(home: Path, run_recorded: RunStage) -> RunStage:
    def run(folder: Path, settings: SFTSettings = SETTINGS, **options: Any) -> Any:
        paths = {"from": str(home / "tiny"), "data": str(home / "train.jsonl"), "heldout": str(home / "held.jsonl")}
        return run_recorded(folder, train, settings, **paths, **options)

    return run


@pytest.fixture(scope="module")
def whole(start: RunStage, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return start(tmp_path_factory.mktemp("whole") / "sft")


def test_epochs_and_batch_make_the_steps(whole: Any) -> None:
    assert list(whole.metric("train/loss")) == [1, 2, 3, 4, 5]
    assert set(whole.seeds) == {3}
    order = step_rows(12, epochs=1.5, batch=4, seed=3)
    for rows, batches in zip(order, whole.updates, strict=True):
        joined = b"".join(whole.texts(batches))
        assert sorted(number for number in range(12) if f"train {number:02d}?".encode() in joined) == sorted(rows)


def test_few_conversations_are_in_memory_at_once(whole: Any) -> None:
    assert [len(batch.tokens_BT) for batch in whole.updates[0]] == [1, 1, 1, 1]


def test_held_out_conversations_are_evaluated_and_never_learnt(whole: Any) -> None:
    assert list(whole.metric("heldout/loss")) == [2, 4, 5]
    learnt = b"".join(text for batches in whole.updates for text in whole.texts(batches))
    assert b"train 03?" in learnt
    assert b"held" not in learnt
    for batches in whole.evaluations:
        assert [len(batch.tokens_BT) for batch in batches] == [5]  # without gradients more fit
        joined = b"".join(whole.texts(batches))
        assert all(f"held {number:02d}?".encode() in joined for number in range(5))
        assert b"train" not in joined


def test_it_is_saved_as_often_as_asked_and_at_its_best(whole: Any) -> None:
    losses = whole.metric("heldout/loss")
    best = [step for step in losses if losses[step] == min(losses[at] for at in losses if at <= step)]
    assert whole.checkpoints() == sorted({3, 5, *best})


def test_adapters_learn_at_the_scheduled_rate(whole: Any) -> None:
    learner = whole.learners[0]
    shapes = {name: tuple(weight.shape) for name, weight in learner.state()["weights"].items()}
    assert shapes
    assert all(".lora_" in name and 3 in shape for name, shape in shapes.items())
    rates = [learning_rate(SETTINGS.optimiser, step, NUM_STEPS) for step in range(1, NUM_STEPS + 1)]
    assert list(whole.metric("train/lr").values()) == rates
    assert len(set(rates)) > 3


def test_samples_are_of_held_out_prompts_and_as_long_as_asked(whole: Any) -> None:
    samples = whole.lines("samples")
    assert [(sample["step"], sample["number"]) for sample in samples] == [(0, 0), (NUM_STEPS, 0)]
    assert all("held 00?" in sample["prompt"] and len(sample["answer"]) <= 3 for sample in samples)


def test_patience_ends_it(start: RunStage, tmp_path: Path) -> None:
    worse = {"lr": 3.0, "schedule": "constant", "warmup": 0.0}
    settings = SFTSettings.model_validate(
        {**SETTINGS.model_dump(), "optimiser": worse, "eval": {"every": 1, "patience": 1}, "lora": None}
    )
    losses = start(tmp_path / "sft", settings).metric("heldout/loss")
    assert len(losses) < NUM_STEPS
    assert list(losses.values())[-1] >= min(losses.values())


def test_interrupted_and_resumed_it_is_the_same_run(
    whole: Any, start: RunStage, records: Callable[[Path], list[dict[str, Any]]], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "sft", interrupt_at=4)
    resumed = start(tmp_path / "sft")
    assert len(resumed.updates) == 1
    for journal in ("metrics.jsonl", "samples.jsonl"):
        assert records(resumed.folder / journal) == records(whole.folder / journal)
    model = "model/model.safetensors"
    assert (resumed.folder / model).read_bytes() == (whole.folder / model).read_bytes()
    codes = [(event["step"], event["code"]) for event in resumed.lines("events")]
    assert (4, "run.interrupted") in codes
