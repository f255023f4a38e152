"""State on disk: bit for bit, without pickle, and training goes on as if nothing had happened."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from kedge.core.errors import CheckpointError
from kedge.runs.state import capture_rng, load_state, restore_rng, save_state


def same_bits(left: Tensor, right: Tensor) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))
    )


def round_trip(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    save_state(folder, state)
    return load_state(folder)


def test_plain_values_come_back_with_their_types(tmp_path: Path) -> None:
    state = {
        "none": None,
        "flags": [True, False],
        "ints": (0, -7, 2**80),
        "floats": [0.1, 1.0, -0.0, 5e-324, math.inf, -math.inf],
        "texts": ["", "NaN", "é\n🙂", r"\Infinity"],
        "keys": {0: "int", "0": "text", -3: {}},
        "empty": {"list": [], "tuple": (), "dict": {}},
        "dict": [{"tensor": "looks like a mark"}],
    }
    again = round_trip(tmp_path, state)

    assert again == state
    assert repr(again) == repr(state)  # tells 1 from 1.0 from True, -0.0 from 0.0, and tuples from lists
    assert math.isnan(round_trip(tmp_path, {"x": math.nan})["x"])


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3, 2), (0,), (2, 0, 3)], ids=str)
def test_tensors_keep_type_shape_and_bits(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)

    assert same_bits(round_trip(tmp_path, {"x": tensor})["x"], tensor)


def test_non_finite_values_and_nan_payloads_keep_their_bits(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800000, 0x80000000, 1], dtype=torch.int64).to(torch.int32)
    tensor = bits.view(torch.float32)

    assert torch.equal(round_trip(tmp_path, {"x": tensor})["x"].view(torch.int32), bits)


def test_views_and_shared_memory(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tied = torch.tensor([5.0, 6.0])
    state = {
        "transposed": base.T,
        "column": base[:, 1],
        "first": base[0],
        "last": base[2],
        "whole": base,
        "flat": base.view(-1),
        "expanded": torch.tensor([1.0]).expand(3),
        "tied": [tied, tied],
        "parameter": nn.Parameter(tied),
    }
    again = round_trip(tmp_path, state)

    for name in ("transposed", "column", "first", "last", "whole", "flat", "expanded", "parameter"):
        assert again[name].tolist() == state[name].tolist(), name
    assert again["tied"][0] is again["tied"][1]
    assert not again["parameter"].requires_grad
    again["first"][0] = 99.0
    assert again["whole"][0, 0] == 0.0  # views come back on their own
    assert len(load_file(tmp_path / "state.safetensors")) == 8  # the tied tensor and the parameter over it are one


@pytest.mark.parametrize("optimiser", [torch.optim.AdamW, torch.optim.SGD], ids=lambda kind: kind.__name__)
def test_training_goes_on_bit_for_bit(tmp_path: Path, optimiser: Callable[..., torch.optim.Optimizer]) -> None:
    def fresh(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters()}]
        optim = optimiser(groups, lr=0.1, weight_decay=0.01)
        return model, optim, torch.optim.lr_scheduler.CosineAnnealingLR(optim, T_max=10)

    def train(model: nn.Module, optim: torch.optim.Optimizer, schedule: Any, steps: int) -> list[float]:
        losses = list[float]()
        for _ in range(steps):
            x = torch.randn(5, 4) + random.random() + np.random.rand()
            loss = model(x).square().mean()
            optim.zero_grad()
            loss.backward()
            optim.step()
            schedule.step()
            losses.append(loss.item())
        return losses

    first = fresh(1)
    train(*first, 3)
    model, optim, schedule = first
    save_state(
        tmp_path,
        {
            "model": model.state_dict(),
            "optimiser": optim.state_dict(),
            "schedule": schedule.state_dict(),
            "rng": capture_rng(),
        },
    )
    expected = train(*first, 4)

    second = fresh(2)  # other weights, other position of every generator
    random.seed(99)
    np.random.seed(99)
    state = load_state(tmp_path)
    for part, name in zip(second, ("model", "optimiser", "schedule"), strict=True):
        part.load_state_dict(state[name])
    assert restore_rng(state["rng"]) == []

    assert train(*second, 4) == expected
    for ours, theirs in zip(second[0].parameters(), first[0].parameters(), strict=True):
        assert same_bits(ours.detach(), theirs.detach())


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        return [
            random.random(),
            random.gauss(),
            np.random.rand(),
            np.random.randn(),
            np.random.randint(1 << 30),
            torch.rand(2).tolist(),
        ]

    random.gauss()  # leaves a second value waiting inside the generator, as randn does in numpy's
    np.random.randn()
    save_state(tmp_path, {"rng": capture_rng()})
    expected = draw()
    assert draw() != expected
    restore_rng(load_state(tmp_path)["rng"])

    assert draw() == expected


def test_a_generator_of_an_absent_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    state = capture_rng()
    assert restore_rng(state) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert restore_rng(state | {"cuda": [state["torch"]]}) == ["cuda"]


def test_the_random_state_is_that_of_the_gpu_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *device: torch.tensor([len(device)]))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, *device: taken.append((int(state), device)))
    state = capture_rng()
    assert restore_rng(state) == []
    assert taken == [(0, ())]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [{"b": object()}]}, r"state\.a\.0\.b is a object"),
        ({"a": np.float32(1.0)}, r"state\.a is a float32"),
        ({"a": {1.5: 2}}, r"state\.a has the key 1\.5 of type float"),
        ({"a": {True: 2}}, r"state\.a has the key True of type bool"),
        ({"a": torch.eye(2).to_sparse()}, r"state\.a is a torch\.sparse_coo tensor"),
        ({"a": torch.empty(2, device="meta")}, r"state\.a is a torch\.strided tensor on meta"),
    ],
)
def test_what_cannot_be_saved_exactly_is_refused_by_name(tmp_path: Path, state: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        save_state(tmp_path, state)
    assert not list(tmp_path.iterdir())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: cut(folder / "state.safetensors"), "cannot be read"),
        (lambda folder: cut(folder / "state.json"), "cannot be read"),
        (lambda folder: (folder / "state.json").write_text('{"pickle": 1}'), "unknown kind of entry 'pickle'"),
        (lambda folder: (folder / "state.json").write_text('{"tensor": "other"}'), "'other'"),
        (lambda folder: (folder / "state.json").unlink(), "no complete state"),
        (lambda folder: (folder / "state.safetensors").unlink(), "no complete state"),
    ],
)
def test_a_damaged_state_is_named(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    save_state(tmp_path, {"x": torch.arange(3)})
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_state(tmp_path)


def test_a_large_state_lies_in_several_files_and_is_whole_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kedge.runs.state._FILE_BYTES", 4_000)
    shared = torch.randn(500)
    state = {"weights": [torch.randn(700), torch.randn(900)], "moments": {"a": shared, "b": shared}, "step": 3}

    back = round_trip(tmp_path, state)

    assert sorted(file.name for file in tmp_path.glob("*.safetensors")) == ["state-1.safetensors", "state.safetensors"]
    assert all(map(same_bits, back["weights"], state["weights"]))
    assert back["moments"]["a"] is back["moments"]["b"]
    assert same_bits(back["moments"]["a"], shared)
    (tmp_path / "state-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_state(tmp_path)
