"""Few points that show what many would: no extreme and no bad value is lost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.report.charts.plot import decimated_rows


def test_short_columns_stay_whole() -> None:
    assert decimated_rows([[3.0, 1.0, 2.0]], most=3) == [0, 1, 2]
    assert decimated_rows([], most=3) == []


def test_ten_thousand_rows_keep_their_spikes_and_their_bad_value() -> None:
    values: list[float | None] = [math.sin(row / 50) for row in range(10_000)]
    values[1234], values[7777], values[5000] = 99.0, -99.0, math.nan
    kept = decimated_rows([values], most=500)
    assert len(kept) <= 500
    assert {0, 1234, 5000, 7777, 9999} <= set(kept)


def test_every_column_keeps_its_own_extremes() -> None:
    one: list[float | None] = [0.0] * 2000
    other: list[float | None] = [None] * 2000
    one[300], other[1700], other[40] = 5.0, -3.0, 8.0
    kept = decimated_rows([one, other], most=100)
    assert {300, 1700, 40} <= set(kept)
    assert len(kept) <= 100


@settings(max_examples=30)
@given(
    values=st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=60, max_size=300),
    most=st.integers(10, 50),
)
def test_extremes_and_ends_always_stay(values: list[float], most: int) -> None:
    kept = decimated_rows([values], most=most)
    assert kept == sorted(set(kept))
    assert len(kept) <= most
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    shown = [values[row] for row in kept]
    assert min(shown) == min(values)
    assert max(shown) == max(values)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_column_of_nothing_but_bad_values_shows_one_a_stretch(bad: float) -> None:
    kept = decimated_rows([[bad] * 100], most=20)
    assert len(kept) == 7  # the first and last row, and the first of each of six stretches (0 is both)
