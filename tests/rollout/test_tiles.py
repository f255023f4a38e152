"""Tiles divide what they cut, whatever the model's widths."""

from __future__ import annotations

import pytest

from kedge.rollout.tiles import head_tile, reading_for, tiles_for


@pytest.mark.parametrize(("width", "inner"), [(896, 4864), (576, 1536), (1536, 8960), (4096, 14336), (64, 96)])
@pytest.mark.parametrize("rows", [1, 16, 17, 60, 128, 512])
def test_tiles_divide_the_matrices_and_hold_the_least_a_product_needs(width: int, inner: int, rows: int) -> None:
    tiles = tiles_for(rows, width=width, inner=inner, attended=width)
    cut = [
        (tiles.attention_inputs, width, width),
        (tiles.o, width, width),
        (tiles.gated, inner, width),
        (tiles.down, width, inner),
    ]
    for tile, columns, depth in cut:
        assert (columns % tile.columns, depth % tile.depth) == (0, 0)
        assert tile.columns >= 16
        assert tile.depth >= 16
        assert depth // tile.depth >= tile.splits
    assert width % head_tile(rows, width).depth == 0


def test_no_tile_has_twice_as_many_rows_as_there_are() -> None:
    for rows in (16, 32, 64, 128):
        tiles = tiles_for(rows, width=896, inner=4864, attended=896)
        assert max(tiles.attention_inputs.rows, tiles.o.rows, tiles.gated.rows, tiles.down.rows) <= rows


def test_few_rows_are_split_and_many_are_not() -> None:
    assert [reading_for(1, 2, columns).splits for columns in (100, 256, 512, 2048, 32768)] == [1, 1, 2, 8, 32]
    assert [reading_for(rows, 2, 4096).splits for rows in (8, 16, 64, 128, 512)] == [16, 8, 2, 1, 1]
