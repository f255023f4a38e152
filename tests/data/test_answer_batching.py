"""Where every token of every answer goes."""

from __future__ import annotations

import pytest

from kedge.core.errors import ShapeError
from kedge.data.answer_batching import Answers, answer_batches
from kedge.data.batching import TokenSequence


def seq(*tokens: int, prompt: int) -> TokenSequence:
    return TokenSequence(tokens=tokens, counted=[at >= prompt for at in range(len(tokens))])


ITEMS = [
    Answers(
        sequences=(seq(1, 2, 3, prompt=1), seq(1, 4, prompt=1)),
        is_good=(True, False),
        ref_logp=(-1.0, -2.0),
    ),
    Answers(
        sequences=(seq(5, 6, prompt=1), seq(5, 6, 7, 8, 9, prompt=1)),
        is_good=(True, False),
        ref_logp=(-3.0, -4.0),
    ),
    Answers(sequences=(seq(10, 11, prompt=0), seq(12, prompt=0)), is_good=(True, False), ref_logp=(-5.0, -6.0)),
]


def test_one_answer_a_row_longest_pair_first() -> None:
    first, second = answer_batches(ITEMS, rows=2, pad=99, width=None)
    assert first.tokens_BT.tolist() == [[5, 6, 99, 99, 99], [5, 6, 7, 8, 9], [1, 2, 3, 99, 99], [1, 4, 99, 99, 99]]
    assert first.segment_BT.tolist() == [[1, 1, 0, 0, 0], [2, 2, 2, 2, 2], [3, 3, 3, 0, 0], [4, 4, 0, 0, 0]]
    assert first.counted_BT.int().tolist() == [[0, 1, 0, 0, 0], [0, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 1, 0, 0, 0]]
    assert first.ref_logp_S.tolist() == [-3.0, -4.0, -1.0, -2.0]
    assert first.is_good_S.tolist() == [True, False, True, False]
    assert not first.is_packed
    # Nothing predicts the first token of a sequence, whatever the mask says.
    assert second.counted_BT.int().tolist() == [[0, 1], [0, 0]]
    assert second.tokens_BT.tolist() == [[10, 11], [12, 99]]


def test_answers_share_rows_and_keep_their_numbers() -> None:
    first, second = answer_batches(ITEMS, rows=2, pad=99, width=7)
    assert first.tokens_BT.tolist() == [[5, 6, 7, 8, 9, 5, 6], [1, 2, 3, 1, 4, 99, 99]]
    assert first.segment_BT.tolist() == [[2, 2, 2, 2, 2, 1, 1], [3, 3, 3, 4, 4, 0, 0]]
    assert first.counted_BT.int().tolist() == [[0, 1, 1, 1, 1, 0, 1], [0, 1, 1, 0, 1, 0, 0]]
    assert first.ref_logp_S.tolist() == [-3.0, -4.0, -1.0, -2.0]
    assert second.tokens_BT.tolist() == [[10, 11, 12]]
    assert first.is_packed


def test_the_share_of_good_answers_is_that_of_the_step() -> None:
    liked = [
        Answers(sequences=(seq(1, 2, prompt=1),), is_good=(good,), ref_logp=(0.0,)) for good in (True, False, True)
    ]
    found = answer_batches(liked, rows=1, pad=0, width=None)
    assert [batch.good_share for batch in found] == [2 / 3] * 3
    assert [batch.num_answers for batch in found] == [1, 1, 1]


def test_shapes_are_checked() -> None:
    (batch,) = answer_batches(ITEMS[:1], rows=1, pad=0, width=None)
    fields = {name: getattr(batch, name) for name in type(batch).__slots__}
    with pytest.raises(ShapeError, match=r"one shape, found \[\(2, 3\), \(2, 3\), \(2, 2\)\]"):
        type(batch)(**{**fields, "counted_BT": batch.counted_BT[:, :2]})
    with pytest.raises(ShapeError, match="one reference log-prob and one label an answer"):
        type(batch)(**{**fields, "ref_logp_S": batch.ref_logp_S[:1]})
