"""Layouts worked out by hand, and packed attention against attention written out in float64.

Shape letters: B rows, T token positions, M queries, N keys, H heads, K heads of keys, E width of a head.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kedge.core.errors import ModelError
from kedge.models.forward.packing import NAME, Spans, attending, attention_of_transformers, lay_out, packed_attention

LENGTHS, TAILS = [5, 5, 2, 7, 7], [3, 3, 1, 7, 2]


def test_a_row_ends_where_it_is_last_read_and_its_tail_begins_where_it_is_first_read() -> None:
    read_BT = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 1, 0, 0]]).bool()
    layout = lay_out(read_BT)
    assert layout.shape == (4, 5)
    assert layout.lengths == (4, 1, 1, 3)  # nothing is read of the second row, and its first token stays
    assert layout.place_N.tolist() == [0, 1, 2, 3, 5, 10, 15, 16, 17]
    assert layout.position_N.tolist() == [0, 1, 2, 3, 0, 0, 0, 1, 2]
    assert (layout.rows.ends_S1.tolist(), layout.rows.longest) == ([0, 4, 5, 6, 9], 4)
    assert layout.tail_M.tolist() == [1, 2, 3, 4, 5, 8]
    assert (layout.tails.ends_S1.tolist(), layout.tails.longest) == ([0, 3, 4, 5, 6], 3)
    assert layout.read_of_rows is not None
    assert layout.read_of_rows.tolist() == [1, 3, 5, 8]
    assert layout.read_of_tails is not None
    assert layout.read_of_tails.tolist() == [0, 2, 4, 5]
    assert layout.rows.ends_S1.dtype == torch.int32
    assert not layout.rows.is_even
    assert lay_out(read_BT[[0, 0]]).rows.is_even


def test_what_is_read_whole_needs_no_choice() -> None:
    layout = lay_out(torch.tensor([[1, 1, 0], [1, 1, 1]]).bool())
    assert layout.read_of_rows is None
    assert layout.read_of_tails is None
    assert layout.tail_M.tolist() == [0, 1, 2, 3, 4]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spans(lengths: list[int], device: str = "cpu") -> Spans:
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return Spans(ends_S1=ends.to(device), longest=max(lengths), is_even=len(set(lengths)) == 1)


def written_out(query_MHE: Tensor, key_NKE: Tensor, value_NKE: Tensor, tails: Spans, rows: Spans) -> Tensor:
    """Query by query: the i-th last of a sequence sees all of its keys but the last i."""
    group = query_MHE.shape[1] // key_NKE.shape[1]
    outputs: list[Tensor] = []
    for (start, end), (first, last) in zip(
        pairwise(tails.ends_S1.tolist()), pairwise(rows.ends_S1.tolist()), strict=True
    ):
        for at in range(start, end):
            visible = slice(first, last - (end - 1 - at))
            key_HLE, value_HLE = (
                x[visible].repeat_interleave(group, dim=1).transpose(0, 1) for x in (key_NKE, value_NKE)
            )
            score_HL = (key_HLE @ query_MHE[at][:, :, None])[:, :, 0] / query_MHE.shape[-1] ** 0.5
            outputs.append((score_HL.softmax(-1)[:, None] @ value_HLE)[:, 0])
    return torch.stack(outputs)


@pytest.mark.parametrize(("lengths", "tails"), [(LENGTHS, TAILS), (LENGTHS, LENGTHS), ([4, 4, 4], [4, 4, 4])])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_packed_attention_stays_within_sequences(lengths: list[int], tails: list[int], key_heads: int) -> None:
    shapes = (sum(tails), 4, 8), (sum(lengths), key_heads, 8), (sum(lengths), key_heads, 8)
    inputs = [random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    expected_inputs = [x.detach().clone().requires_grad_() for x in inputs]
    weight_MHE = random(*shapes[0], seed=9)
    output = packed_attention(*inputs, spans(tails), spans(lengths))
    expected = written_out(*expected_inputs, spans(tails), spans(lengths))
    assert_close(output, expected)
    for result in (output, expected):
        (result * weight_MHE).sum().backward()
    for x, y in zip(inputs, expected_inputs, strict=True):
        assert_close(x.grad, y.grad)


@pytest.mark.parametrize("tails", [TAILS, LENGTHS])
def test_a_share_of_the_attention_is_dropped_where_that_is_asked_for(tails: list[int]) -> None:
    query_MHE, key_NKE = random(sum(tails), 4, 8, seed=1), random(sum(LENGTHS), 4, 8, seed=2)
    ones_NKE = torch.ones_like(key_NKE)  # without dropout, every output is 1
    torch.manual_seed(0)
    dropped_MHE = packed_attention(query_MHE, key_NKE, ones_NKE, spans(tails), spans(LENGTHS), dropout=0.5)
    assert_close(
        packed_attention(query_MHE, key_NKE, ones_NKE, spans(tails), spans(LENGTHS)), torch.ones_like(query_MHE)
    )
    assert (dropped_MHE - 1).abs().mean() > 0.2


@pytest.mark.gpu
@pytest.mark.parametrize("tails", [TAILS, LENGTHS])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_kernel_of_the_gpu_stays_within_sequences(tails: list[int], is_compiled: bool) -> None:
    shapes = (sum(tails), 4, 64), (sum(LENGTHS), 2, 64), (sum(LENGTHS), 2, 64)
    # Rounded first, so that both compute from the same numbers.
    inputs = [random(*shape, seed=seed).bfloat16().cuda().requires_grad_() for seed, shape in enumerate(shapes)]
    expected_inputs = [x.detach().cpu().double().requires_grad_() for x in inputs]
    weight_MHE = random(*shapes[0], seed=9).bfloat16().double()
    attend: Any = torch.compile(packed_attention) if is_compiled else packed_attention
    output = attend(*inputs, spans(tails, "cuda"), spans(LENGTHS, "cuda"))
    expected = written_out(*expected_inputs, spans(tails), spans(LENGTHS))
    assert output.dtype == torch.bfloat16
    (output * weight_MHE.cuda()).sum().backward()
    (expected * weight_MHE).sum().backward()
    # bfloat16 has 8 bits: results of size 1 are off by some 2^-8.
    assert_close(output.double().cpu(), expected, rtol=0, atol=0.02)
    for x, y in zip(inputs, expected_inputs, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert (x.grad.double().cpu() - y.grad).abs().mean() < 0.01 * y.grad.abs().mean()


def test_without_a_layout_it_is_the_attention_of_transformers() -> None:
    query, key, value = (random(2, 4, 6, 8, seed=seed) for seed in range(3))
    output, _ = attention_of_transformers(nn.Module(), query, key, value, None, scaling=0.2)
    score = (query @ key.mT * 0.2).masked_fill(~torch.ones(6, 6).tril().bool(), -torch.inf)
    assert_close(output, (score.softmax(-1) @ value).transpose(1, 2))


@pytest.mark.parametrize(
    ("unsupported", "reason"), [({"sliding_window": 3}, "sliding_window"), ({"scaling": 0.2}, "scale of 0.2")]
)
def test_what_packed_attention_does_not_know_is_refused(unsupported: dict[str, Any], reason: str) -> None:
    x = random(1, 4, 3, 8, seed=1)
    given: dict[str, Any] = {"scaling": 8**-0.5, "layout": lay_out(torch.ones(1, 3).bool())}
    with pytest.raises(ModelError, match=f"packed attention knows no {reason}"):
        attention_of_transformers(nn.Module(), x, x, x, None, **given | unsupported)


def test_settings_are_as_before_afterwards_whatever_happened() -> None:
    configs = [SimpleNamespace(_attn_implementation=name) for name in ("sdpa", "eager")]
    within: list[str] = []

    def fail() -> None:
        with attending(configs):
            within.extend(config._attn_implementation for config in configs)
            raise ValueError("on the way")

    with pytest.raises(ValueError, match="on the way"):
        fail()
    assert within == [NAME, NAME]
    assert [config._attn_implementation for config in configs] == ["sdpa", "eager"]
