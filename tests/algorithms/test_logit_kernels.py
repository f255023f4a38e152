"""The kernels of a tile of logits against plain torch. They need a GPU, or Triton's interpreter:

TRITON_INTERPRET=1 pytest -m gpu tests/algorithms/test_logit_kernels.py        # with triton >= 3.8 installed
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from kedge.algorithms.logit_tiles import PLAIN, fused

pytestmark = pytest.mark.gpu
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def logits(rows: int, columns: int, *, shift: float = 0.0) -> Tensor:
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))
    return (8 * drawn + shift).to(DEVICE)


@pytest.mark.parametrize("shift", [0.0, -300.0])
@pytest.mark.parametrize("with_dot", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(3, 9001), (2, 5), (1, 4096)])
def test_the_sums(rows: int, columns: int, with_dot: bool, shift: float) -> None:
    tile = logits(rows, columns, shift=shift)
    actual = fused().sums(tile, 0.7, with_dot, True)
    expected = PLAIN.sums(tile.clone(), 0.7, with_dot, True)
    for x, y in zip(actual, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tile, logits(rows, columns, shift=shift), rtol=0, atol=0)


@pytest.mark.parametrize("has_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradients(has_entropy: bool, dtype: torch.dtype) -> None:
    tile = logits(4, 5003)
    norm, constant, h = tile.logsumexp(1), *torch.randn(2, 4, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    chosen = h if has_entropy else None
    actual = fused().gradients(tile, norm, constant, chosen, 0.7, dtype)
    expected = PLAIN.gradients(tile.clone(), norm, constant, chosen, 0.7, dtype)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected)
