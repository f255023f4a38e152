"""Safetensors files that are written tensor by tensor are to the byte those of the library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kedge.models.loading.tensor_file import TensorFile

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.float16, torch.bfloat16, torch.int32,
    torch.uint32, torch.float32, torch.float64, torch.int64, torch.uint64,
]  # fmt: skip


@pytest.mark.parametrize("metadata", [{"format": "pt"}, {}])
@pytest.mark.parametrize("lengths", [(2, 10), (2, 9, 100)])
def test_the_bytes_are_those_of_the_library(tmp_path: Path, lengths: tuple[int, ...], metadata: dict[str, str]) -> None:
    tensors = {
        f"layers.{length}.ü.{dtype}": torch.arange(length).view(length, 1).to(dtype)
        for length in lengths
        for dtype in DTYPES
    } | {"scalar": torch.tensor(3.5), "nothing": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "library", metadata=metadata or None)
    blank = {name: tensor.to("meta") for name, tensor in tensors.items()}
    with TensorFile(tmp_path / "own", blank, metadata) as file:
        for name in file.names:
            file.add(name, tensors[name])
    assert (tmp_path / "own").read_bytes() == (tmp_path / "library").read_bytes()


def test_a_tensor_out_of_order_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    like = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"'b' .* does not come here"), TensorFile(tmp_path / "1", like, {}) as file:
        file.add("b", like["b"])
    with pytest.raises(ValueError, match=r"'a' .* does not come here"), TensorFile(tmp_path / "2", like, {}) as file:
        file.add("a", torch.zeros(3))
    with pytest.raises(ValueError, match="'b' was not added"), TensorFile(tmp_path / "3", like, {}) as file:
        file.add("a", like["a"])
