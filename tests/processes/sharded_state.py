"""State that processes hold in parts: written, read back on other numbers of processes, and cut off; functions of a
world."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from kedge.core.errors import KedgeError
from kedge.core.world import World, once
from kedge.runs.checkpoints import Checkpoints, CheckpointSettings
from kedge.runs.state import load_entry, load_state, save_state, share_of
from kedge.stages.shared.loop import save_finished

SHAPES: dict[str, tuple[int, ...]] = {
    "even": (6, 4),
    "uneven": (7, 3),
    "fewer rows than processes": (1, 5),
    "one dimension": (5,),
    "no row": (0, 3),
}
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def whole_state() -> dict[str, Any]:
    """Weights, moments by number, and what is whole everywhere beside them."""
    tensors = {
        f"{name} {dtype}": (torch.arange(torch.Size(shape).numel()).view(shape) * 3 + number).to(dtype)
        for number, (name, shape) in enumerate(SHAPES.items())
        for dtype in DTYPES
    }
    moments = {
        index: {"exp_avg": tensor.float() / 7, "step": torch.tensor(3.0)}
        for index, tensor in enumerate(tensors.values())
    }
    return {
        "step": 12,
        "weights": tensors,
        "optimiser": {"state": moments, "param_groups": [{"lr": 1e-3, "params": list(moments)}]},
        "rng": (torch.arange(5), [1, 2.5, None]),
    }


def cut(state: Any, placements: Any, mesh: Any) -> Any:
    """Every tensor of one dimension or more in parts, but those of `rng`."""
    if isinstance(state, Tensor):
        return distribute_tensor(state, mesh, placements) if state.ndim else state
    if isinstance(state, dict):
        return {key: value if key == "rng" else cut(value, placements, mesh) for key, value in state.items()}
    return state


def gathered(state: Any) -> Any:
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: gathered(value) for key, value in state.items()}
    return state


def layout(world: World, name: str) -> tuple[Any, Any]:
    """A mesh and how tensors are placed on it."""
    if name == "copies":
        mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("copies", "parts"))
        return mesh, [Replicate(), Shard(0)]
    return init_device_mesh("cpu", (world.size,)), [Shard(0)]


def write(world: World, folder: Path, name: str = "parts") -> list[str]:
    """A checkpoint of step 12; the names of its files."""
    mesh, placements = layout(world, name)
    save(world, folder, cut(whole_state(), placements, mesh))
    return sorted(path.name for path in (folder / "step-000012").iterdir())


def save(world: World, folder: Path, state: Any) -> None:
    checkpoints, share = Checkpoints(folder, CheckpointSettings(), world), share_of(state, world.rank)
    if share is not None:
        checkpoints.begin(12, share)
    checkpoints.save(12, lambda place: save_state(place, state), is_begun=share is not None)


def read(world: World, folder: Path) -> Any:
    """The checkpoint as parts, gathered; and how many bytes of tensors this process held of it at most."""
    mesh, placements = layout(world, "parts")
    like = cut(whole_state(), placements, mesh)
    checkpoints = Checkpoints(folder, CheckpointSettings(), world)
    latest = checkpoints.latest()
    assert latest is not None
    state = load_state(latest.checkpoint.folder, like=like)
    assert_parts(state, like)
    return gathered(state)


def assert_parts(state: Any, like: Any) -> None:
    """Cut wherever `like` is, and equal to it in this process."""
    if isinstance(like, dict):
        for key in like:
            assert_parts(state[key], like[key])
    elif isinstance(like, DTensor):
        assert isinstance(state, DTensor)
        assert state.placements == like.placements
        assert torch.equal(state.to_local(), like.to_local())


def finish(world: World, folder: Path) -> Any:
    """The state of a part of a stage that is done, written together and read back in parts; an entry of it alone."""
    mesh, placements = layout(world, "parts")
    state = cut(whole_state(), placements, mesh)
    context: Any = SimpleNamespace(world=world, once=partial(once, world))
    save_finished(context, folder / "round-0", state)
    back = load_state(folder / "round-0", like=state)
    assert_parts(back, state)
    assert load_entry(folder / "round-0", "step") == 12
    return gathered(back), sorted(path.name for path in folder.iterdir())


def fail_to_write(world: World, folder: Path, rank: int) -> str:
    """One process cannot write its share: what all of them say, and what is left."""
    write(world, folder)
    checkpoints = Checkpoints(folder, CheckpointSettings(), world)

    def share(place: Path) -> list[str]:
        (place / f"{world.rank}").write_text("half")
        if world.rank == rank:
            raise OSError(28, "No space left on device")
        return [f"{world.rank}"]

    try:
        checkpoints.begin(13, share)
    except KedgeError as error:
        dist.barrier()
        left = sorted(path.name for path in folder.iterdir())
        return f"{type(error).__name__}: {str(error).split(':')[0]}; {left}"
    return "saved"
