"""Slots of keys and values, and attention over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from kedge.core.errors import ModelError
from kedge.rollout.cache import RowCache, for_decoding, grouped_attention


def _numbered(rows: int, columns: int, *, start: int) -> Tensor:
    """(rows, 1 head, columns, 1 wide) of different numbers."""
    return torch.arange(start, start + rows * columns, dtype=torch.float32).view(rows, 1, columns, 1)


def test_a_prompt_goes_to_every_slot_that_asked_for_it() -> None:
    cache = RowCache(4, 6)
    cache.at_prompts(torch.tensor([0, 1, 3]), torch.tensor([1, 0, 1]))
    keys, values = cache.update(_numbered(2, 3, start=10), _numbered(2, 3, start=50), 0)
    assert (keys[1, 0, :, 0].tolist(), values[0, 0, :, 0].tolist()) == ([13, 14, 15], [50, 51, 52])

    cache.at_tokens(torch.tensor([3, 1, 0, 2]), filled=5)
    keys, values = cache.update(_numbered(4, 1, start=90), _numbered(4, 1, start=70), 0)
    assert keys[:, 0, :, 0].tolist() == [[13, 14, 15, 90, 0], [10, 91, 12, 0, 0], [92, 0, 0, 0, 0], [13, 14, 93, 0, 0]]
    assert values[:, 0, :, 0].tolist() == [
        [53, 54, 55, 70, 0],
        [50, 71, 52, 0, 0],
        [72, 0, 0, 0, 0],
        [53, 54, 73, 0, 0],
    ]


def test_a_moved_row_takes_its_past_along_in_every_layer() -> None:
    cache = RowCache(3, 4)
    cache.at_prompts(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]))
    for layer in range(2):
        cache.update(_numbered(3, 2, start=10 * layer), _numbered(3, 2, start=10 * layer + 100), layer)
    cache.move([2], [0])
    cache.at_tokens(torch.tensor([2, 2]), filled=3)
    for layer in range(2):
        keys, values = cache.update(_numbered(2, 1, start=80), _numbered(2, 1, start=90), layer)
        shift = 10 * layer
        assert keys[:, 0, :, 0].tolist() == [[4 + shift, 5 + shift, 80], [2 + shift, 3 + shift, 81]]
        assert values[:, 0, :, 0].tolist() == [[104 + shift, 105 + shift, 90], [102 + shift, 103 + shift, 91]]


def _slow_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    """(rows, length, heads, width), head by head; `seen[row, t, s]`."""
    rows, heads, length, _ = query.shape
    out = torch.zeros(rows, length, heads, value.shape[-1], dtype=query.dtype)
    for row in range(rows):
        for head in range(heads):
            shared = head // (heads // key.shape[1])
            for t in range(length):
                score = key[row, shared] @ query[row, head, t] * scale
                weight = score.masked_fill(~visible[row, t], -torch.inf).softmax(0)
                out[row, t, head] = weight @ value[row, shared]
    return out


@pytest.mark.parametrize("length", [1, 5])
def test_grouped_attention_is_attention(length: int) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(3, heads, columns, 4, generator=generator, dtype=torch.float64)
        for heads, columns in ((6, length), (2, 5), (2, 5))
    )
    if length == 1:
        visible = torch.arange(5) <= torch.tensor([0, 3, 4])[:, None, None]
        mask = torch.zeros(3, 1, 1, 5, dtype=torch.float64).masked_fill(~visible[:, None], -torch.inf)
    else:
        visible, mask = torch.ones(5, 5, dtype=torch.bool).tril().expand(3, 5, 5), None
    attended, _ = grouped_attention(nn.Identity(), query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(attended, _slow_attention(query, key, value, visible, 0.3))


def test_attention_that_is_more_than_a_softmax_is_refused() -> None:
    ones = torch.ones(1, 1, 1, 2)
    with pytest.raises(ModelError, match="Identity uses soft-capped attention"):
        grouped_attention(nn.Identity(), ones, ones, ones, None, softcap=30.0)


def _attention_of(model: LlamaForCausalLM) -> str:
    config: Any = model.config
    return config._attn_implementation


def test_the_model_is_put_back_as_it_was_even_after_an_error(model: LlamaForCausalLM) -> None:
    before = _attention_of(model)
    inside: list[tuple[bool, bool]] = []

    def fail_within() -> None:
        with for_decoding(model):
            inside.append((model.training, _attention_of(model) == before))
            raise ZeroDivisionError

    model.train()
    with pytest.raises(ZeroDivisionError):
        fail_within()
    assert inside == [(False, False)]
    assert (model.training, _attention_of(model)) == (True, before)
    model.eval()


def test_a_model_with_a_fixed_attention_is_refused(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model), "_supports_attention_backend", False)
    with pytest.raises(ModelError, match="LlamaForCausalLM does not let its attention be chosen"), for_decoding(model):
        pass
