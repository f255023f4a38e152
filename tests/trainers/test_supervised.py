"""Early stopping on held-out losses, and its state in a checkpoint."""

from __future__ import annotations

import math

import pytest

from kedge.trainers.supervised import MAX_BAD_STEPS, EarlyStopping, EvalSettings


def test_it_is_over_after_so_many_evaluations_without_a_better_one() -> None:
    stopping = EarlyStopping(patience=2)
    seen = [(stopping.observe(loss, step), stopping.is_over) for step, loss in enumerate([5.0, 6.0, 4.0, 4.0, 9.0], 1)]
    assert seen == [(True, False), (False, False), (True, False), (False, False), (False, True)]
    assert (stopping.best, stopping.best_step, stopping.waited) == (4.0, 3, 2)


def test_without_patience_it_is_never_over() -> None:
    stopping = EarlyStopping(patience=None)
    assert [stopping.observe(1.0, step) for step in range(1, 100)] == [True] + [False] * 98
    assert not stopping.is_over


def test_a_loss_that_is_not_a_number_is_never_the_best() -> None:
    stopping = EarlyStopping(patience=None)
    assert [stopping.observe(loss, step) for step, loss in enumerate([math.nan, 5.0, math.nan], 1)] == [
        False,
        True,
        False,
    ]
    assert (stopping.best, stopping.best_step) == (5.0, 2)


def test_it_goes_on_from_its_state() -> None:
    before = EarlyStopping(patience=2)
    before.observe(3.0, 7)
    before.observe(4.0, 8)
    after = EarlyStopping(patience=2)
    after.load(before.state())
    assert not after.is_over
    assert not after.observe(3.0, 9)
    assert (after.is_over, after.best_step) == (True, 7)


def test_the_defaults_that_recipes_rely_on() -> None:
    assert (EvalSettings().every, EvalSettings().patience) == (50, None)
    assert MAX_BAD_STEPS == 5
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        EvalSettings(every=0)
