"""A stage on a device that is too small: passes get smaller, the run goes on, and its numbers are the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kedge.core.batches import Batch
from kedge.models.loading.tiny import make_tiny
from kedge.models.training.train_step import Objective, Sums
from kedge.stages.sft import train as stage
from kedge.stages.sft.settings import SFTSettings

RunStage = Callable[..., Any]
SETTINGS: dict[str, Any] = {
    "kind": "sft",
    "data": "data",
    "epochs": 2,
    "batch": 6,
    "max_length": 110,
    "optimiser": {"lr": 3e-3},
    "checkpoints": {"every": 1},
    "samples": 0,
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, run_recorded: RunStage) -> RunStage:
    home = tmp_path_factory.mktemp("sft")
    for layers in (1, 3):
        make_tiny(home / f"tiny-{layers}", hidden=32, layers=layers)
    rows = [{"prompt": f"{number:02d}?", "completion": "!" * (5 + 3 * number)} for number in range(12)]
    (home / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(folder: Path, **settings: Any) -> Any:
        interrupt_at, layers = settings.pop("interrupt_at", 0), settings.pop("layers", 1)
        parsed = SFTSettings.model_validate({**SETTINGS, **settings})
        sources = {"from": str(home / f"tiny-{layers}"), "data": str(home / "train.jsonl")}
        return run_recorded(folder, stage.train, parsed, interrupt_at=interrupt_at, **sources)

    return run


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Passes of more than 150 tokens do not fit; gives the tokens of all that were tried."""
    tried: list[int] = []
    imitation = stage.imitation

    def on_a_small_device(model: Any) -> Objective[Batch]:
        objective = imitation(model)

        def sums(batch: Batch) -> Sums:
            tried.append(batch.num_tokens)
            if batch.num_tokens > 150:
                raise torch.OutOfMemoryError("planted")
            return objective.sums(batch)

        return Objective(weight=objective.weight, sums=sums)

    with monkeypatch.context() as patched:
        patched.setattr(stage, "imitation", on_a_small_device)
        yield tried


def weights(run: Any) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "model" / "model.safetensors")


def codes(run: Any) -> list[str]:
    return [event["code"] for event in run.lines("events") if event["code"].startswith("micro_batch.")]


@pytest.fixture(scope="module")
def roomy(start: RunStage, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return start(tmp_path_factory.mktemp("roomy") / "sft")


def test_out_of_memory_the_run_goes_on_in_smaller_passes_with_the_same_numbers(
    start: RunStage, roomy: Any, small_device: list[int], tmp_path: Path
) -> None:
    assert codes(roomy) == ["micro_batch.chosen"]
    tight = start(tmp_path / "sft")
    assert codes(tight)[0] == "micro_batch.chosen"
    assert set(codes(tight)[1:]) == {"micro_batch.halved"}
    assert any(tokens > 150 for tokens in small_device)
    assert list(tight.metric("train/loss")) == list(roomy.metric("train/loss")) == [1, 2, 3, 4]
    for name in ("train/loss", "train/grad_norm", "train/lr"):
        assert list(tight.metric(name).values()) == pytest.approx(list(roomy.metric(name).values()), rel=1e-5)
    for name, weight in weights(tight).items():
        torch.testing.assert_close(weight, weights(roomy)[name], rtol=0, atol=1e-6)


def test_a_resumed_run_keeps_the_smaller_passes(start: RunStage, small_device: list[int], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "sft", interrupt_at=2)
    straight = start(tmp_path / "straight")
    small_device.clear()
    resumed = start(tmp_path / "sft")
    assert max(small_device) <= 150  # nothing is tried again
    assert resumed.learners[-1].train_step.passes.size == straight.learners[-1].train_step.passes.size
    assert codes(resumed) == codes(straight)
    assert resumed.metric("train/loss") == straight.metric("train/loss")


def test_max_steps_ends_the_run_and_the_schedule(start: RunStage, roomy: Any, tmp_path: Path) -> None:
    short = start(tmp_path / "sft", max_steps=2, optimiser={"lr": 1e-3, "schedule": "linear", "warmup": 0})
    assert short.metric("train/lr") == pytest.approx({1: 1e-3, 2: 5e-4})


@pytest.mark.parametrize("memory", [{"recompute": True}, {"dtype": "float32", "compile": False}])
def test_what_saves_memory_changes_no_number(
    memory: dict[str, Any], start: RunStage, roomy: Any, tmp_path: Path
) -> None:
    saving = start(tmp_path / "sft", memory=memory)
    for name, weight in weights(saving).items():
        torch.testing.assert_close(weight, weights(roomy)[name], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")  # torch's own
def test_compiled_layers_train_the_same_model(start: RunStage, tmp_path: Path) -> None:
    """By torch's own compiler; of three layers two, for the last one is never compiled."""
    from torch._dynamo.utils import counters

    plain = start(tmp_path / "plain", layers=3, max_steps=2)
    torch._dynamo.reset()
    counters.clear()
    compiled = start(tmp_path / "compiled", layers=3, max_steps=2, memory={"compile": True})
    num_programs, backends = counters["stats"]["unique_graphs"], dict(counters["inductor"])
    torch._dynamo.reset()
    assert num_programs > 0
    assert backends
    assert compiled.metric("train/loss") == pytest.approx(plain.metric("train/loss"), rel=1e-4)
    expected = weights(plain)
    moved = [(weight - weights(compiled)[name]).abs().max().item() for name, weight in expected.items()]
    assert max(moved) < 1e-3  # two steps of 3e-3, and Adam divides small gradients by small numbers
    assert weights(compiled).keys() == expected.keys()


def test_recompute_is_switched_on(start: RunStage, tmp_path: Path) -> None:
    saving = start(tmp_path / "sft", memory={"recompute": True}, max_steps=1)
    assert saving.learners[-1].trained.module.is_gradient_checkpointing


def test_a_model_is_saved_in_the_type_that_is_asked_for(start: RunStage, roomy: Any, tmp_path: Path) -> None:
    halved = start(tmp_path / "sft", memory={"save_dtype": "bfloat16"})
    assert {weight.dtype for weight in weights(roomy).values()} == {torch.float32}
    assert {weight.dtype for weight in weights(halved).values()} == {torch.bfloat16}
