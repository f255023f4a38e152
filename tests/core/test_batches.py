"""How rows of unequal length become one tensor, place by place."""

from __future__ import annotations

import pytest
import torch

from kedge.core.batches import cut, pad_rows, pad_tokens


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


def test_every_item_is_in_exactly_one_pass_and_passes_keep_to_their_bounds() -> None:
    lengths = [5, 1, 7, 7, 2, 12, 3]
    by_tokens = cut(range(7), length=lengths.__getitem__, tokens=14)
    assert by_tokens == [[5], [2, 3], [0, 6, 4, 1]]
    assert cut(range(7), length=lengths.__getitem__, rows=3) == [[5, 2, 3], [0, 6, 4], [1]]
    assert cut(range(7), length=lengths.__getitem__, rows=2, tokens=14) == [[5], [2, 3], [0, 6], [4, 1]]
    assert cut(range(7), length=lengths.__getitem__) == [[5, 2, 3, 0, 6, 4, 1]]


def test_an_item_that_is_longer_than_a_pass_has_one_of_its_own() -> None:
    assert cut(["aaaa", "bbb", "c"], length=len, tokens=2) == [["aaaa"], ["bbb"], ["c"]]
    assert cut([], length=len, tokens=2) == []
