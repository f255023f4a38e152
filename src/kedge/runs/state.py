"""Training state on disk without pickle: tensors in `state.safetensors` (large ones in several files), everything else
in `state.json`.

Dicts (text and int keys), lists, tuples, tensors, numbers, texts, bools and None come back as they were, to the last
bit. Tensors come back on the CPU and without gradients; one that occurs twice is stored once and comes back as one
tensor, other views of shared memory come back as tensors of their own. Tensors that processes hold in parts are in
files of theirs (`runs/shards`). Left out: every other type is an error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter

from kedge.core.errors import CheckpointError
from kedge.core.files import write_text
from kedge.core.tensors.shards import is_sharded_tensor
from kedge.runs.journal import dump_exact, load_exact
from kedge.runs.shards import StoredTensor, save_shards, shard_name, sharded_in, stored_shards, stored_whole

_TENSORS, _TREE = "state.safetensors", "state.json"
_FILE_BYTES = 256 << 20
"""Tensors in one file, about: the files of a state are hashed at the same time."""


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write all files into `folder`, which exists; meant for the inside of a checkpoint, so not atomic together.

    Where processes hold tensors in parts, each of them writes its own with `share_of`.
    """
    packer = _Packer()
    tree = packer.pack(state, "state")
    for number, tensors in enumerate(_in_files(packer.tensors)):
        save_file(tensors, folder / (_TENSORS if number == 0 else f"state-{number}.safetensors"))
    write_text(folder / _TREE, dump_exact(tree))


def share_of(state: Mapping[str, Any], rank: int) -> Callable[[Path], list[str]] | None:
    """What process `rank` has to write beside what `save_state` does, which gives the names of its files; None where
    nobody holds a part of a tensor."""
    if next(sharded_in(state), None) is None:
        return None
    return lambda folder: save_shards(folder, state, rank)


def load_state(folder: Path, *, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The state in `folder`, whoever wrote it: one process, or several in parts.

    `like` is a state as it is now: where it has a tensor that processes hold in parts, the one from the folder is cut
    in the same way, and no process reads more than its part.
    """
    try:
        tree = load_exact((folder / _TREE).read_bytes())
        return _unpack(tree, _tensors_in(folder, reads_parts=next(sharded_in(like), None) is not None), like)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} holds no complete state: {_TENSORS} and {_TREE} are both needed.") from error
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"The state in {folder} cannot be read: {error}. Use an earlier checkpoint.") from error


def load_entry(folder: Path, name: str) -> Any:
    """One entry of the state in `folder`; the tensors of others are not read."""
    try:
        [(_, entries)] = load_exact((folder / _TREE).read_bytes()).items()
        return _unpack(dict(entries)[name], _tensors_in(folder, reads_parts=True))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"The state in {folder} has no '{name}' that can be read: {error}.") from error


def _tensors_in(folder: Path, *, reads_parts: bool) -> dict[str, Tensor | StoredTensor]:
    """By name; those that may be read in part are not read here."""
    files = [folder / _TENSORS, *folder.glob("state-*.safetensors")]
    tensors: dict[str, Tensor | StoredTensor] = {}
    if reads_parts:
        tensors |= stored_whole(files)
    else:
        for file in files:
            tensors |= load_file(file)
    return tensors | stored_shards(folder)


def _in_files(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Cut into parts that reach the size of a file; one part, if an empty one, where all is small."""
    parts = [dict[str, Tensor]()]
    num_bytes = 0
    for name, tensor in tensors.items():
        if num_bytes >= _FILE_BYTES:
            parts.append({})
            num_bytes = 0
        parts[-1][name] = tensor
        num_bytes += tensor.nbytes
    return parts


class _Packer:
    """Turns a state into JSON and collects its tensors on the way."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._storages: set[int] = set()
        self._num_sharded = 0

    def pack(self, value: Any, where: str) -> Any:
        """Containers become objects with one key that names their type; so nothing else may be an object or a list."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Mapping):
            entries = cast(Mapping[Any, Any], value).items()
            return {"dict": [[_key(key, where), self.pack(item, f"{where}.{key}")] for key, item in entries]}
        if type(value) in (list, tuple):
            items = [self.pack(item, f"{where}.{index}") for index, item in enumerate(value)]
            return {type(value).__name__: items}
        if type(value) in (Tensor, Parameter):
            return {"tensor": self._add_tensor(value.detach(), where)}
        if is_sharded_tensor(value):
            self._num_sharded += 1
            return {"tensor": shard_name(self._num_sharded - 1, where)}
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: dicts, lists, tuples, plain "
            "tensors, numbers, texts, bools and None can. Turn it into one of these (a number of numpy: .item())."
        )

    def _add_tensor(self, tensor: Tensor, where: str) -> str:
        """The name under which the tensor is stored; the same tensor again has the same name."""
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            description = f"a {tensor.layout} tensor on {tensor.device}"
            raise CheckpointError(f"{where} is {description}; only dense tensors with values can be saved.")
        identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and identity in self._names:
            return self._names[identity]
        name = f"{len(self.tensors):05d}.{where}"
        self.tensors[name] = self._with_own_memory(tensor.resolve_conj().resolve_neg().cpu().contiguous())
        self._names[identity] = name
        return name

    def _with_own_memory(self, tensor: Tensor) -> Tensor:
        """A copy where memory is shared: safetensors refuses tensors that share memory, and parts of a larger one."""
        storage = tensor.untyped_storage()
        is_shared = storage.data_ptr() in self._storages or storage.nbytes() != tensor.numel() * tensor.element_size()
        own = tensor.clone() if is_shared else tensor
        self._storages.add(own.untyped_storage().data_ptr())
        return own


def _key(key: Any, where: str) -> str | int:
    if type(key) in (str, int):
        return key
    raise CheckpointError(f"{where} has the key {key!r} of type {type(key).__name__}; keys are texts or ints.")


def _unpack(tree: Any, tensors: Mapping[str, Tensor | StoredTensor], like: Any = None) -> Any:
    if not isinstance(tree, dict):
        return tree
    [(kind, content)] = cast(dict[str, Any], tree).items()
    match kind:
        case "dict":
            of_key: Mapping[Any, Any] = cast(Any, like) if isinstance(like, Mapping) else {}
            return {key: _unpack(item, tensors, of_key.get(key)) for key, item in content}
        case "list" | "tuple":
            of_index = cast("list[Any]", like) if isinstance(like, list | tuple) and len(like) == len(content) else None
            items = [_unpack(item, tensors, of_index and of_index[index]) for index, item in enumerate(content)]
            return items if kind == "list" else tuple(items)
        case "tensor":
            return _tensor(tensors[content], like)
        case _:
            raise ValueError(f"unknown kind of entry '{kind}'")


def _tensor(tensor: Tensor | StoredTensor, like: Any) -> Tensor:
    if isinstance(tensor, Tensor):
        return tensor
    return tensor.read_like(like) if is_sharded_tensor(like) else tensor.read()


def capture_rng() -> dict[str, Any]:
    """The state of the global random generators: Python, numpy, torch on the CPU, and, where CUDA is in use, on the
    current CUDA device. It is the only one that a process computes on, and any process may go on with its state."""
    numpy = np.random.get_state(legacy=False)
    key = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    return {
        "python": random.getstate(),
        "numpy": {**numpy, "state": {"key": key, "pos": int(numpy["state"]["pos"])}},
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [],
    }


def restore_rng(state: Mapping[str, Any]) -> list[str]:
    """Set the generators again; returns those that this machine lacks ("cuda"), for the caller to report."""
    key = state["numpy"]["state"]["key"].numpy().astype(np.uint32)
    random.setstate(state["python"])
    np.random.set_state({**state["numpy"], "state": {**state["numpy"]["state"], "key": key}})
    torch.set_rng_state(state["torch"])
    if not state["cuda"]:
        return []
    if not torch.cuda.is_available():
        return ["cuda"]
    torch.cuda.set_rng_state(state["cuda"][0])
    return []
