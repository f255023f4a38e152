"""State that no process holds alone: every process writes the parts that it has into safetensors files of its own, with
a list of where each part belongs; any number of processes reads them back, each no more than it asks for.

`shard-00003-0.safetensors` (and -1, …) has the parts of process 3; `shard-00003.json` says for each tensor its name,
shape, and the box that the part is. What is whole in every process is not here but in `state.safetensors`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kedge.core.errors import CheckpointError
from kedge.core.files import write_json
from kedge.core.tensors.shards import Box, is_first_copy, is_sharded_tensor, own_box, with_part
from kedge.runs.journal import load_exact

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_FILE_BYTES = 256 << 20
"""Parts in one file, about: as many bytes are copied to the host at once."""


def sharded_in(state: Any, where: str = "state") -> Iterator[tuple[str, DTensor]]:
    """The tensors of a state that processes hold in parts, in its order, each with its place in the state."""
    if is_sharded_tensor(state):
        yield where, state
    elif isinstance(state, Mapping):
        for key, value in cast("Mapping[Any, Any]", state).items():
            yield from sharded_in(value, f"{where}.{key}")
    elif type(state) in (list, tuple):
        for index, value in enumerate(state):
            yield from sharded_in(value, f"{where}.{index}")


def shard_name(number: int, where: str) -> str:
    """The name of the tensor that is the `number`-th of `sharded_in`: the same in all processes."""
    return f"shard {number:05d}.{where}"


def save_shards(folder: Path, state: Mapping[str, Any], rank: int) -> list[str]:
    """Write the parts that this process has; the names of its files. The state has the same places in all processes."""
    entries: dict[str, dict[str, Any]] = {}
    parts: dict[str, Tensor] = {}
    num_files = num_bytes = 0
    for number, (where, tensor) in enumerate(sharded_in(state)):
        if not is_first_copy(tensor):
            continue
        if num_bytes >= _FILE_BYTES:
            _write_parts(folder, rank, num_files, parts)
            num_files, num_bytes, parts = num_files + 1, 0, {}
        box, name = _box(tensor, where), shard_name(number, where)
        parts[name] = tensor.to_local().detach()
        num_bytes += parts[name].nbytes
        entries[name] = {
            "shape": list(tensor.shape),
            "offset": list(box.offset),
            "size": list(box.size),
            "file": _file_name(rank, num_files),
        }
    _write_parts(folder, rank, num_files, parts)
    index = f"shard-{rank:05d}.json"
    write_json(folder / index, entries)
    return [index, *(_file_name(rank, number) for number in range(num_files + 1))]


def _box(tensor: DTensor, where: str) -> Box:
    try:
        return own_box(tensor)
    except ValueError as error:
        raise CheckpointError(f"{where} cannot be saved: {error}") from error


def _file_name(rank: int, number: int) -> str:
    return f"shard-{rank:05d}-{number}.safetensors"


def _write_parts(folder: Path, rank: int, number: int, parts: Mapping[str, Tensor]) -> None:
    """A part of a larger buffer, or one that occurs twice, is copied: safetensors refuses shared memory."""
    own: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, part in parts.items():
        values = part.cpu().contiguous()
        storage = values.untyped_storage()
        is_shared = storage.nbytes() != values.nbytes or storage.data_ptr() in storages
        own[name] = values.clone() if is_shared else values
        storages.add(own[name].untyped_storage().data_ptr())
    save_file(own, folder / _file_name(rank, number))


class _Files:
    """Files that stay open as long as somebody may read from them."""

    def __init__(self) -> None:
        self._opened: dict[Path, Any] = {}

    def __call__(self, path: Path) -> Any:
        if path not in self._opened:
            self._opened[path] = safe_open(path, framework="pt")
        return self._opened[path]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    file: Path
    key: str
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor on disk, in one part or several."""

    shape: tuple[int, ...]
    parts: Sequence[_Part]
    files: _Files

    def read(self, box: Box | None = None) -> Tensor:
        """This box of it, or all of it; on the CPU."""
        wanted = box or Box(offset=(0,) * len(self.shape), size=self.shape)
        overlaps = [(part, part.box.overlap(wanted)) for part in self.parts]
        needed = [(part, common) for part, common in overlaps if common.numel] or overlaps[:1]
        pieces = [(self._piece(part, common), common.within(wanted)) for part, common in needed]
        if len(pieces) == 1 and tuple(pieces[0][0].shape) == wanted.size:
            return pieces[0][0].clone()  # out of the file, which may be removed
        result = torch.empty(wanted.size, dtype=pieces[0][0].dtype)
        for piece, place in pieces:
            result[place.slices] = piece
        return result

    def _piece(self, part: _Part, box: Box) -> Tensor:
        values = self.files(part.file).get_slice(part.key)
        return values[box.within(part.box).slices] if self.shape else values[...]

    def read_like(self, like: DTensor) -> DTensor:
        """It, cut as `like` is; of what is on disk only this process's part is read."""
        if tuple(like.shape) != self.shape:
            raise ValueError(f"a tensor of shape {self.shape} is stored where {tuple(like.shape)} is needed")
        return with_part(self.read(own_box(like)).to(like.to_local().device), like)


def stored_shards(folder: Path) -> dict[str, StoredTensor]:
    """What all processes wrote into `folder`, by name."""
    shapes, files = dict[str, tuple[int, ...]](), _Files()
    parts: dict[str, list[_Part]] = {}
    for index in sorted(folder.glob("shard-*.json")):
        for name, entry in load_exact(index.read_bytes()).items():
            box = Box(offset=tuple(entry["offset"]), size=tuple(entry["size"]))
            shapes[name] = tuple(entry["shape"])
            parts.setdefault(name, []).append(_Part(file=folder / entry["file"], key=name, box=box))
    stored = {name: StoredTensor(shape=shape, parts=parts[name], files=files) for name, shape in shapes.items()}
    for name, tensor in stored.items():
        if sum(part.box.numel for part in tensor.parts) != Box(offset=tensor.shape, size=tensor.shape).numel:
            raise ValueError(f"parts of '{name}' are missing: the files of a process are gone")
    return stored


def stored_whole(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """The tensors of safetensors files, by name."""
    stored, opened = dict[str, StoredTensor](), _Files()
    for path in files:
        for name in opened(path).keys():  # noqa: SIM118 (not a mapping)
            shape = tuple(opened(path).get_slice(name).get_shape())
            part = _Part(file=path, key=name, box=Box(offset=(0,) * len(shape), size=shape))
            stored[name] = StoredTensor(shape=shape, parts=[part], files=opened)
    return stored
