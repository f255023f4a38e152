"""Layouts index by index, and an order that a seed and a step number fix."""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.core.batches import Batch, Comparisons
from kedge.core.errors import ShapeError
from kedge.data.batching import (
    LabelledAnswers,
    RankedAnswers,
    TokenSequence,
    answer_batches,
    comparison_batches,
    num_steps,
    padded_batches,
    step_rows,
)

PAD = 9

# Three sequences of 3, 1 and 2 tokens; the first token of each asks to count, and never may.
LONG = TokenSequence(tokens=[11, 12, 13], counted=[True, False, True])
ONE = TokenSequence(tokens=[21], counted=[True])
TWO = TokenSequence(tokens=[31, 32], counted=[True, True])


def rows_of(batch: Batch) -> list[tuple[list[int], list[bool], list[bool]]]:
    return list(zip(batch.tokens_BT.tolist(), batch.attention_mask_BT.tolist(), batch.counted_BT.tolist(), strict=True))


def test_padded_puts_one_sequence_in_a_row_longest_first() -> None:
    first, second = padded_batches([ONE, LONG, TWO], rows=2, pad=PAD)
    assert rows_of(first) == [
        ([11, 12, 13], [True, True, True], [False, False, True]),
        ([31, 32, PAD], [True, True, False], [False, True, False]),
    ]
    assert rows_of(second) == [([21], [True], [False])]


def test_passes_may_be_cut_by_tokens() -> None:
    first, second = padded_batches([ONE, LONG, TWO], tokens=3, pad=PAD)
    assert first.tokens_BT.tolist() == [[11, 12, 13]]
    assert second.tokens_BT.tolist() == [[31, 32], [21, PAD]]


SEQUENCES = st.lists(
    st.lists(st.tuples(st.integers(10, 99), st.booleans()), min_size=1, max_size=12), min_size=1, max_size=25
)


@given(SEQUENCES, st.integers(1, 4) | st.none(), st.integers(1, 40) | st.none())
def test_no_sequence_is_lost_or_doubled(
    drawn: list[list[tuple[int, bool]]], rows: int | None, tokens: int | None
) -> None:
    sequences = [
        TokenSequence(tokens=[token for token, _ in pairs], counted=[flag for _, flag in pairs]) for pairs in drawn
    ]
    laid_out: Counter[tuple[tuple[int, bool], ...]] = Counter()
    for batch in padded_batches(sequences, rows=rows, tokens=tokens, pad=PAD):
        assert rows is None or len(batch.tokens_BT) <= rows
        assert tokens is None or batch.num_tokens <= tokens or len(batch.tokens_BT) == 1
        for own, attended, counted in rows_of(batch):
            length = sum(attended)
            assert attended == [True] * length + [False] * (len(own) - length)
            assert all(token == PAD for token in own[length:])
            assert not any(counted[length:])
            laid_out[tuple(zip(own[:length], counted[:length], strict=True))] += 1
    # What went in, with the first token of each taken out of the loss.
    assert laid_out == Counter((((pairs[0][0], False), *pairs[1:])) for pairs in drawn)


def test_comparisons_say_in_which_rows_their_answers_stand() -> None:
    pair = RankedAnswers(answers=[[1, 2], [3]], rank=(1, 2), margin=0.5, weight=2.0, objective=1)
    ranking = RankedAnswers(answers=[[4], [5, 6, 7], [8, 8]], rank=(2, 1, 2), margin=0.0, weight=0.25)
    (batch,) = comparison_batches([pair, ranking], rows=2, pad=PAD)
    assert batch.tokens_BT.tolist() == [[4, 9, 9], [5, 6, 7], [8, 8, 9], [1, 2, 9], [3, 9, 9]]
    assert batch.attention_mask_BT.tolist() == [
        [True, False, False],
        [True, True, True],
        [True, True, False],
        [True, True, False],
        [True, False, False],
    ]
    assert batch.row_CK.tolist() == [[0, 1, 2], [3, 4, 0]]
    assert batch.rank_CK.tolist() == [[2, 1, 2], [1, 2, 0]]
    assert (batch.margin_C.tolist(), batch.weight_C.tolist()) == ([0.0, 0.5], [0.25, 2.0])
    assert batch.objective_C.tolist() == [0, 1]


def test_comparisons_are_cut_into_batches_longest_first() -> None:
    items = [RankedAnswers(answers=[[7] * size, [8]], rank=(1, 2)) for size in (1, 4, 2)]
    batches = comparison_batches(items, rows=2, pad=PAD)
    assert [batch.tokens_BT.tolist() for batch in batches] == [
        [[7, 7, 7, 7], [8, 9, 9, 9], [7, 7, 9, 9], [8, 9, 9, 9]],
        [[7], [8]],
    ]
    assert [batch.row_CK.tolist() for batch in batches] == [[[0, 1], [2, 3]], [[0, 1]]]


@pytest.mark.parametrize(
    ("items", "epochs", "batch", "steps"),
    [
        (10, 1.0, 5, 2),
        (10, 1.0, 4, 3),  # 4, 4 and 2
        (10, 2.5, 4, 7),  # 25 items: six full steps and one of 1
        (10, 0.3, 4, 1),  # 3 items
        (10, 0.001, 4, 1),  # a share that rounds to nothing is still one item, never a silent nothing
        (0, 1.0, 4, 0),
    ],
)
def test_the_number_of_steps(items: int, epochs: float, batch: int, steps: int) -> None:
    assert num_steps(items, epochs=epochs, batch=batch) == steps
    assert len(list(step_rows(items, epochs=epochs, batch=batch, seed=3))) == steps


def test_every_epoch_is_a_permutation_of_its_own_and_the_last_step_may_be_short() -> None:
    steps = list(step_rows(10, epochs=2.5, batch=4, seed=3))
    assert [len(rows) for rows in steps] == [4, 4, 4, 4, 4, 4, 1]
    flat = list(chain.from_iterable(steps))
    first, second, third = flat[:10], flat[10:20], flat[20:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert len(set(third)) == 5
    assert first != second
    assert third != first[:5]
    assert third != second[:5]


def test_the_order_depends_on_the_seed_and_nothing_else() -> None:
    order = list(step_rows(50, epochs=2, batch=7, seed=3))
    torch.manual_seed(5)
    assert list(step_rows(50, epochs=2, batch=7, seed=3)) == order
    assert list(step_rows(50, epochs=2, batch=7, seed=4)) != order


@given(st.integers(1, 30), st.floats(0.1, 3.5), st.integers(1, 9), st.integers(0, 40))
def test_starting_later_skips_exactly_the_steps_before(items: int, epochs: float, batch: int, start: int) -> None:
    whole = list(step_rows(items, epochs=epochs, batch=batch, seed=3))
    assert list(step_rows(items, epochs=epochs, batch=batch, seed=3, start=start)) == whole[start:]


def test_a_late_start_does_not_walk_through_the_steps_before() -> None:
    (rows,) = islice(step_rows(1_000, epochs=1e6, batch=8, seed=3, start=100_000_000), 1)
    assert len(rows) == 8


def test_records_refuse_shapes_that_do_not_fit() -> None:
    two, three = torch.zeros(1, 2), torch.zeros(1, 3)
    with pytest.raises(ShapeError, match=r"Batch: .* \[\(1, 2\), \(1, 3\), \(1, 2\)\]"):
        Batch(tokens_BT=two, attention_mask_BT=three, counted_BT=two)
    with pytest.raises(ShapeError, match=r"Comparisons: tokens \(1, 2\), attention mask \(1, 3\)"):
        Comparisons(
            tokens_BT=two,
            attention_mask_BT=three,
            row_CK=two,
            rank_CK=two,
            margin_C=two,
            certainty_C=two,
            weight_C=two,
            objective_C=two,
        )


def seq(*tokens: int, prompt: int) -> TokenSequence:
    return TokenSequence(tokens=tokens, counted=[at >= prompt for at in range(len(tokens))])


PAIRS = [
    LabelledAnswers(
        sequences=(seq(1, 2, 3, prompt=1), seq(1, 4, prompt=1)),
        is_good=(True, False),
        ref_logp=(-1.0, -2.0),
    ),
    LabelledAnswers(
        sequences=(seq(5, 6, prompt=1), seq(5, 6, 7, 8, 9, prompt=1)),
        is_good=(True, False),
        ref_logp=(-3.0, -4.0),
    ),
    LabelledAnswers(sequences=(seq(10, 11, prompt=0), seq(12, prompt=0)), is_good=(True, False), ref_logp=(-5.0, -6.0)),
]


def test_one_answer_a_row_longest_pair_first() -> None:
    first, second = answer_batches(PAIRS, rows=2, pad=99)
    assert first.tokens_BT.tolist() == [[5, 6, 99, 99, 99], [5, 6, 7, 8, 9], [1, 2, 3, 99, 99], [1, 4, 99, 99, 99]]
    assert first.attention_mask_BT.sum(dim=1).tolist() == [2, 5, 3, 2]
    assert first.counted_BT.int().tolist() == [[0, 1, 0, 0, 0], [0, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 1, 0, 0, 0]]
    assert first.ref_logp_S.tolist() == [-3.0, -4.0, -1.0, -2.0]
    assert first.is_good_S.tolist() == [True, False, True, False]
    # Nothing predicts the first token of a sequence, whatever the mask says.
    assert second.counted_BT.int().tolist() == [[0, 1], [0, 0]]
    assert second.tokens_BT.tolist() == [[10, 11], [12, 99]]


def test_the_share_of_good_answers_is_that_of_the_step() -> None:
    liked = [
        LabelledAnswers(sequences=(seq(1, 2, prompt=1),), is_good=(good,), ref_logp=(0.0,))
        for good in (True, False, True)
    ]
    batches = answer_batches(liked, rows=1, pad=0)
    assert [batch.good_share for batch in batches] == [2 / 3] * 3
    assert [batch.num_answers for batch in batches] == [1, 1, 1]


def test_shapes_of_answers_are_checked() -> None:
    (batch,) = answer_batches(PAIRS[:1], rows=1, pad=0)
    fields = {name: getattr(batch, name) for name in type(batch).__slots__}
    with pytest.raises(ShapeError, match=r"one shape, found \[\(2, 3\), \(2, 3\), \(2, 2\)\]"):
        type(batch)(**{**fields, "counted_BT": batch.counted_BT[:, :2]})
    with pytest.raises(ShapeError, match="one row, one reference log-prob and one label an answer"):
        type(batch)(**{**fields, "ref_logp_S": batch.ref_logp_S[:1]})
