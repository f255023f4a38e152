"""A safetensors file that is written tensor by tensor, so that one of them is in memory at a time.

The library writes a file from all of its tensors at once. What is written here is the same to the last byte: the header
as JSON, then the tensors by type and name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch
from torch import Tensor

_NAMES: Final = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.uint32: "U32",
    torch.int32: "I32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16", torch.int16: "I16",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The types by their names in the file, in the order in which their tensors come."""


class TensorFile:
    """The file at `path` of tensors like these, which may be on `meta`: `names` says in which order they are added."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        order = list(_NAMES)
        self.names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        for name in self.names:
            tensor, start = tensors[name], end
            end += tensor.nbytes
            header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        self._header = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        self._like = dict(tensors)
        self._remaining = list(self.names)
        self._path = path

    def __enter__(self) -> Self:
        self._file = self._path.open("wb")
        padded = self._header.ljust(-(-len(self._header) // 8) * 8)
        self._file.write(len(padded).to_bytes(8, "little") + padded)
        return self

    def add(self, name: str, tensor: Tensor) -> None:
        """The next tensor of `names`."""
        like = self._like[name]
        if self._remaining[:1] != [name] or (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
            raise ValueError(f"{self._path}: '{name}' ({tensor.dtype}, {tuple(tensor.shape)}) does not come here")
        del self._remaining[0]
        self._file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        if error is None and self._remaining:
            raise ValueError(f"{self._path}: '{self._remaining[0]}' was not added")
