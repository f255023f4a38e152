"""Optimiser state in host memory: cut into buckets and brought back, and every number what it is without.

On the CPU the room on the "device" is memory of its own, so what is not copied in, or not copied back, shows. Streams,
pinned memory and the kernel need a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kedge.core.batches import Batch
from kedge.core.errors import ConfigError, NumericsError
from kedge.core.optimiser import OptimiserSettings
from kedge.data.batching import TokenSequence, padded_batches
from kedge.models.forward.heads import language_model
from kedge.models.forward.lora import with_lora
from kedge.models.loading.tiny import tiny_model
from kedge.models.settings import LoraSettings
from kedge.models.training import offload
from kedge.models.training.ema import EMA
from kedge.models.training.learner import Learner
from kedge.models.training.objectives import imitation
from kedge.models.training.offload import buckets
from kedge.models.training.passes import Cut
from kedge.models.training.train_step import TrainStep, trained_weights
from kedge.runs.state import load_state, save_state

BUCKET = 512
"""Entries: a matrix of the tiny model has several buckets, and norms share one."""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BUCKET", BUCKET)


def batches(seed: int) -> Cut[Batch]:
    """Three passes."""
    rng = Random(seed)
    rows = [[rng.randrange(256) for _ in range(rng.randrange(3, 12))] for _ in range(5)]
    sequences = [TokenSequence(tokens=tokens, counted=[True] * len(tokens)) for tokens in rows]
    return lambda _: padded_batches(sequences, rows=2, pad=256)


def learner(
    *, on_host: bool, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", lora: bool = False
) -> Learner[Batch]:
    model = tiny_model(hidden=32, layers=2).to(device)
    model = with_lora(model, LoraSettings(rank=4), name="policy", seed=1) if lora else model
    trained = trained_weights(model, dtype=dtype, on_host=on_host)
    policy = language_model(model)
    settings = OptimiserSettings(lr=1e-2, weight_decay=0.1, clip=0.5)
    return Learner(trained, policy.backbone, imitation(policy), settings, total_steps=20)


def assert_equal(actual: Any, expected: Any) -> None:
    """To the last bit, in the same order; tensors wherever they are."""
    if isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual.cpu(), expected.cpu())
    elif isinstance(expected, Mapping):
        assert list(actual) == list(cast("Mapping[Any, Any]", expected))
        for key, value in cast("Mapping[Any, Any]", expected).items():
            assert_equal(actual[key], value)
    elif isinstance(expected, list):
        for ours, theirs in zip(actual, cast("list[Any]", expected), strict=True):
            assert_equal(ours, theirs)
    else:
        assert actual == expected


def parameters(learner: Learner[Batch]) -> dict[str, Tensor]:
    return dict(learner.trained.module.named_parameters())


def moments(learner: Learner[Batch]) -> list[Tensor]:
    return [of[name] for of in learner.state()["optimiser"]["state"].values() for name in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_metrics_weights_and_state_are_the_same_to_the_last_bit(dtype: torch.dtype, device: str, lora: bool) -> None:
    plain, moved = (learner(on_host=on_host, dtype=dtype, device=device, lora=lora) for on_host in (False, True))
    for number in range(4):
        assert moved.update(batches(number)) == plain.update(batches(number))
        assert_equal(parameters(moved), parameters(plain))
    assert_equal(moved.state(), plain.state())
    assert all(moment.any() for moment in moments(moved))
    assert {moment.device.type for moment in moments(moved)} == {"cpu"}
    assert moved.measure(batches(9)) == plain.measure(batches(9))


def test_the_device_holds_two_buckets_and_no_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the update is given is room of its own, of the size of a bucket at most."""
    seen: list[tuple[set[int], int]] = []
    by_torch = offload.apply_by_torch

    def watched(*tensors: Any, **settings: Any) -> None:
        staged = [tensor for kind in (tensors[1], tensors[3], tensors[4]) for tensor in kind]
        places = {tensor.untyped_storage().data_ptr() for tensor in staged}
        seen.append((places, sum(tensor.numel() for tensor in staged)))
        by_torch(*tensors, **settings)

    monkeypatch.setattr("kedge.models.training.adamw.apply_by_torch", watched)
    moved = learner(on_host=True)
    moved.update(batches(0))
    on_host = {tensor.untyped_storage().data_ptr() for tensor in (*moments(moved), *moved.weights().values())}
    rooms = set[int]().union(*(places for places, _ in seen))
    assert len(rooms) == 2
    assert not rooms & on_host
    assert max(entries for _, entries in seen) <= 3 * BUCKET
    assert sum(entries for _, entries in seen) == 3 * sum(weight.numel() for weight in moved.weights().values())


@pytest.mark.parametrize("before", [False, True])
def test_a_run_is_resumed_with_and_without(before: bool, tmp_path: Path) -> None:
    whole = learner(on_host=False)
    for number in range(4):
        whole.update(batches(number))
    first = learner(on_host=before)
    for number in range(2):
        first.update(batches(number))
    save_state(tmp_path, first.state())
    resumed = learner(on_host=not before)
    resumed.load(load_state(tmp_path))
    assert_equal(resumed.state(), load_state(tmp_path))
    for number in range(2, 4):
        resumed.update(batches(number))
    assert_equal(resumed.state(), whole.state())


def test_a_refused_step_changes_nothing_and_the_next_one_is_the_same() -> None:
    plain, moved = (learner(on_host=on_host) for on_host in (False, True))
    for each in (plain, moved):
        each.update(batches(0))
    before = copy.deepcopy(moved.state())
    for each in (plain, moved):
        weight = next(iter(parameters(each).values()))
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.fill_(torch.nan)
        with pytest.raises(NumericsError, match="loss is nan"):
            each.update(batches(1))
        with torch.no_grad():
            weight.copy_(kept)
    assert_equal(moved.state() | {"step": 1}, before)
    assert moved.update(batches(2)) == plain.update(batches(2))
    assert_equal(moved.state(), plain.state())


def test_masters_are_the_weights_before_they_are_rounded() -> None:
    model = tiny_model(hidden=32, layers=1)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    trained = trained_weights(model, dtype=torch.bfloat16, on_host=True)
    assert_equal(trained.weights(), before)
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in before.values())
    memory = {master.untyped_storage().data_ptr() for master in trained.masters}
    assert len(memory) == 1  # all of them in one block


def test_a_moving_average_of_weights_elsewhere_is_the_same() -> None:
    start, new = torch.linspace(0, 1, 50), torch.linspace(3, -1, 50)
    plain, moved = EMA({"w": start}, 0.9), EMA({"w": start}, 0.9, device=torch.device("cpu"))
    for average in (plain, moved):
        average.update({"w": new})
    assert torch.equal(plain.weights()["w"], start.lerp(new, 1 - 0.9))
    assert_equal(moved.state(), plain.state())


def test_moments_in_8_bits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.core.optimiser.eight_bit_package", lambda: "bitsandbytes")
    settings = OptimiserSettings(name="adamw_8bit")
    named = list(tiny_model(hidden=32, layers=1).named_parameters())
    with pytest.raises(ConfigError, match=r"memory.offload: \[optimiser\], set the optimiser's name to adamw"):
        TrainStep(named, settings, total_steps=1, on_host=True)


def test_buckets_have_every_entry_once_and_none_is_too_large() -> None:
    sizes = [1, 1000, 64, 63, 129, 7]
    cut = list(buckets(sizes, 128))
    covered = [[0] * size for size in sizes]
    for bucket in cut:
        ends = [piece.in_bucket.stop for piece in bucket]
        assert max(ends) <= 128
        assert all(piece.place >= end for piece, end in zip(bucket[1:], ends, strict=False))
        for piece in bucket:
            assert piece.place % 64 == 0
            for entry in range(piece.start, piece.stop):
                covered[piece.index][entry] += 1
    assert {count for entries in covered for count in entries} == {1}


@pytest.mark.gpu
def test_on_a_gpu_moments_are_pinned_and_the_peak_is_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BUCKET", 1 << 20)
    peaks: dict[bool, int] = {}
    for on_host in (False, True):
        torch.cuda.empty_cache()
        model = tiny_model(hidden=1024, layers=6).to("cuda")
        trained = trained_weights(model, dtype=torch.bfloat16, on_host=on_host)
        policy = language_model(model)
        moved = Learner(trained, policy.backbone, imitation(policy), OptimiserSettings(), total_steps=20)
        moved.update(batches(0))
        torch.cuda.reset_peak_memory_stats()
        moved.update(batches(1))
        peaks[on_host] = torch.cuda.max_memory_allocated()
        if on_host:
            assert all(moment.is_pinned() for moment in moments(moved))
        weights = sum(weight.numel() for weight in moved.weights().values())
        del model, trained, policy, moved
    # 12 bytes a weight have gone, and two buckets of 12 bytes an entry have come.
    assert peaks[False] - peaks[True] > 0.9 * 12 * (weights - 2 * offload.BUCKET)


def test_the_next_round_goes_on_with_the_same_masters() -> None:
    """Each round has an optimiser of its own."""
    ends = list[dict[str, Tensor]]()
    for on_host in (False, True):
        first = learner(on_host=on_host)
        first.update(batches(0))
        after = {name: weight.clone() for name, weight in first.weights().items()}
        settings = OptimiserSettings(lr=1e-2)
        second = Learner(first.trained, first.backbone, first.objective, settings, total_steps=3)
        second.update(batches(1))
        assert all(not torch.equal(second.weights()[name], weight) for name, weight in after.items())
        ends.append(second.weights())
    assert_equal(ends[1], ends[0])
