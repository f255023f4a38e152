"""How rows of unequal length become one tensor, place by place."""

from __future__ import annotations

import pytest
import torch

from kedge.core.batches import pad_rows, pad_tokens


def test_rows_are_filled_up_on_the_side_that_is_named() -> None:
    rows = [[5], [6, 7, 8], [], (9, 5)]
    assert pad_rows(rows, 3).tolist() == [[5, 3, 3], [6, 7, 8], [3, 3, 3], [9, 5, 3]]
    assert pad_rows(rows, 3, side="left").tolist() == [[3, 3, 5], [6, 7, 8], [3, 3, 3], [3, 9, 5]]


@pytest.mark.parametrize("row", [[1, 2], (1, 2), range(1, 3), torch.tensor([1, 2])])
def test_any_sequence_of_numbers_is_a_row(row: list[int]) -> None:
    padded_BT = pad_rows([row, [4, 5, 6]], 0)
    assert padded_BT.dtype == torch.int64
    assert padded_BT.tolist() == [[1, 2, 0], [4, 5, 6]]


def test_rows_of_bool_make_a_mask() -> None:
    mask_BT = pad_rows([[True, False], [True]], False)
    assert mask_BT.dtype == torch.bool
    assert mask_BT.tolist() == [[True, False], [True, False]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_mask_goes_by_length_and_not_by_the_padding_token(side: str) -> None:
    tokens_BT, attention_mask_BT = pad_tokens([[9, 1, 9], [9]], pad=9, side=side)  # pyright: ignore[reportArgumentType]
    assert tokens_BT.tolist() == [[9, 1, 9], [9, 9, 9]]
    own = [True, False, False] if side == "right" else [False, False, True]
    assert attention_mask_BT.tolist() == [[True, True, True], own]


def test_no_rows_make_an_empty_tensor() -> None:
    tokens_BT, attention_mask_BT = pad_tokens([], pad=0)
    assert (tokens_BT.shape, tokens_BT.dtype) == ((0, 0), torch.int64)
    assert (attention_mask_BT.shape, attention_mask_BT.dtype) == ((0, 0), torch.bool)
