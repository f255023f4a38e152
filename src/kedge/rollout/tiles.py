"""How the work of a decoding step is cut into programs of a GPU, by the number of rows. Free of torch.

The numbers were found by trying steps and single kernels on an H200 with the shape of Qwen2.5-0.5B. Others compute the
same, as long as a tile divides its matrix: the kernels have masks for rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_SPLIT_COLUMNS = 256
"""Fewer columns than this are not worth a program of their own."""
_SHARED_BYTES = 160_000
"""Of the memory that loads under way take: some less than a processor has, from compute capability 8.0 on."""
_PROCESSORS = 132
"""Of an H200. More programs than twice as many have nothing to gain from a split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How much of a product one program computes, and with how many warps and loads under way; `splits` programs
    share the depth of a product that is too deep for one. Of a product with more tiles than fit on the GPU, so many
    `programs` on each processor take one tile after the other."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 4
    splits: int = 1
    programs: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How attention reads the cache: so many columns at once, and the columns of a row in so many parts. `is_early`:
    it asks for them while the kernel before is at work, which pays where that one leaves the memory idle."""

    columns: int
    warps: int
    stages: int
    splits: int
    is_early: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Those of a layer's products, in order."""

    attention_inputs: Tile
    o: Tile
    gated: Tile
    down: Tile


def tiles_for(rows: int, *, width: int, inner: int, attended: int) -> Tiles:
    """`width` of the residual stream, `inner` of the gated product, `attended` of all heads together."""
    tiles = next(tiles for most, tiles, _ in _BY_ROWS if rows <= most)
    return Tiles(
        attention_inputs=_fitted(tiles.attention_inputs, columns=width, depth=width),
        o=_fitted(tiles.o, columns=width, depth=attended),
        gated=_fitted(tiles.gated, columns=inner, depth=width),
        down=_fitted(tiles.down, columns=width, depth=inner),
    )


def head_tile(rows: int, width: int) -> Tile:
    """Of the product with the output matrix, whose rows need not be divided."""
    tile = next(head for most, _, head in _BY_ROWS if rows <= most)
    return _fitted(tile, columns=tile.columns, depth=width)


def reading_for(rows: int, heads: int, columns: int) -> Reading:
    """
    >>> reading_for(8, 2, 1024)
    Reading(columns=64, warps=2, stages=3, splits=4, is_early=True)
    >>> reading_for(128, 2, 1024).splits
    1
    """
    if rows > 64:
        return Reading(columns=32, warps=1, stages=4, splits=1, is_early=False)
    splits = min(2 * _PROCESSORS // (rows * heads), columns // _SPLIT_COLUMNS, 32)
    return Reading(columns=64, warps=2, stages=3, splits=max(splits, 1), is_early=True)


def beside(tile: Tile, *, columns: int, ranks: int) -> Tile:
    """The tile of a product that takes rows of adapters along. Where its loads would not fit they are cut in two, and
    as many as fit are under way.

    >>> tile = Tile(rows=64, columns=32, depth=256, stages=3)
    >>> beside(tile, columns=32, ranks=16)
    Tile(rows=64, columns=32, depth=128, warps=4, stages=5, splits=1, programs=1)
    >>> beside(replace(tile, rows=16), columns=32, ranks=16) == replace(tile, rows=16)
    True
    """
    if tile.rows >= 128:  # four warps have too few registers for one more sum
        tile = replace(tile, warps=8)
    row_bytes = 2 * (tile.rows + columns + ranks)
    if tile.stages * tile.depth * row_bytes <= _SHARED_BYTES:
        return tile
    depth = max(tile.depth // 2, 16)
    return replace(tile, depth=depth, stages=max(min(2 * tile.stages, _SHARED_BYTES // (depth * row_bytes)), 2))


def _fitted(tile: Tile, *, columns: int, depth: int) -> Tile:
    """
    >>> _fitted(Tile(rows=64, columns=64, depth=128, splits=4), columns=4896, depth=192)
    Tile(rows=64, columns=32, depth=64, warps=4, stages=4, splits=3, programs=1)
    """
    step = _divisor(tile.depth, depth)
    return replace(tile, columns=_divisor(tile.columns, columns), depth=step, splits=min(tile.splits, depth // step))


def _divisor(block: int, size: int) -> int:
    """The block size, halved until it divides `size`."""
    while size % block:
        block //= 2
    return block


# The columns of `attention_inputs` are those of a head, whatever is said here.
_BY_ROWS = (
    (
        16,
        Tiles(
            attention_inputs=Tile(rows=16, columns=16, depth=128, stages=5),
            o=Tile(rows=16, columns=32, depth=128),
            gated=Tile(rows=16, columns=32, depth=128),
            down=Tile(rows=16, columns=32, depth=256, stages=3, splits=4),
        ),
        Tile(rows=16, columns=128, depth=64, programs=3),
    ),
    (
        32,
        Tiles(
            attention_inputs=Tile(rows=16, columns=16, depth=128, stages=5),
            o=Tile(rows=16, columns=32, depth=128),
            gated=Tile(rows=32, columns=32, depth=128),
            down=Tile(rows=32, columns=32, depth=256, stages=3, splits=4),
        ),
        Tile(rows=32, columns=128, depth=64, stages=3, programs=3),
    ),
    (
        64,
        Tiles(
            attention_inputs=Tile(rows=64, columns=16, depth=64, stages=5),
            o=Tile(rows=64, columns=16, depth=128),
            gated=Tile(rows=64, columns=32, depth=64),
            down=Tile(rows=64, columns=32, depth=256, stages=3, splits=4),
        ),
        Tile(rows=64, columns=64, depth=64, programs=3),
    ),
    (
        128,
        Tiles(
            attention_inputs=Tile(rows=64, columns=16, depth=64, stages=5),
            o=Tile(rows=64, columns=64, depth=128),
            gated=Tile(rows=64, columns=32, depth=64),
            down=Tile(rows=64, columns=64, depth=128, splits=3),
        ),
        Tile(rows=64, columns=128, depth=64, programs=2),
    ),
    (
        1 << 30,
        Tiles(
            attention_inputs=Tile(rows=128, columns=16, depth=64, stages=5),
            o=Tile(rows=64, columns=64, depth=128),
            gated=Tile(rows=128, columns=64, depth=64, warps=8, stages=3),
            down=Tile(rows=128, columns=64, depth=128, splits=2),
        ),
        Tile(rows=128, columns=128, depth=64, warps=8, stages=5),
    ),
)
