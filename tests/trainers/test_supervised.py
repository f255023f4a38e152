"""The loop without a model: what is logged, looked at and saved at which step, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kedge.core.errors import NumericsError
from kedge.core.protocols import Metrics
from kedge.trainers.supervised import MAX_BAD_STEPS, Patience, Watch, train

Never = frozenset[int]()


@dataclass
class Scripted:
    """A learner whose loss is 100 minus the step, and that refuses the steps it is told to."""

    bad: frozenset[int] = Never
    step: int = 0
    seen: list[Sequence[str]] = field(default_factory=list[Sequence[str]])

    def update(self, batches: Sequence[str]) -> Metrics:
        self.step += 1
        self.seen.append(batches)
        if self.step in self.bad:
            raise NumericsError(f"step {self.step}: the loss is nan; the weights are unchanged")
        return {"loss": 100.0 - self.step}


@dataclass
class Told:
    """A tracker and a store that remember."""

    logged: list[tuple[int, dict[str, float]]] = field(default_factory=list[tuple[int, dict[str, float]]])
    events: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    saved: list[tuple[int, bool]] = field(default_factory=list[tuple[int, bool]])

    def log(self, metrics: Metrics, *, step: int) -> None:
        self.logged.append((step, dict(metrics)))

    def event(self, event: Mapping[str, Any]) -> None:
        self.events.append(event)

    def close(self) -> None:
        raise AssertionError("whoever opened the tracker closes it")


def run(
    learner: Scripted,
    *,
    total: int,
    heldout: Callable[[int], float] | None = None,
    look_every: int = 1000,
    save_every: int = 1000,
    patience: Patience | None = None,
    told: Told | None = None,
) -> Told:
    told = told or Told()
    watch = Watch(
        tracker=told,
        look=lambda: {"heldout/loss": heldout(learner.step)} if heldout else {},
        look_every=look_every,
        save=lambda is_best: told.saved.append((learner.step, is_best)),
        save_every=save_every,
        patience=patience or Patience(limit=None),
        keep=lambda batches: f"bad/{batches[0]}",
    )
    train(learner, ([f"batch {at}"] for at in range(learner.step + 1, total + 1)), watch, total=total)
    return told


def test_every_step_is_logged_once_with_the_metrics_of_that_step() -> None:
    learner = Scripted()
    told = run(learner, total=3)
    assert told.logged == [(1, {"train/loss": 99.0}), (2, {"train/loss": 98.0}), (3, {"train/loss": 97.0})]
    assert learner.seen == [["batch 1"], ["batch 2"], ["batch 3"]]
    assert told.events == []


def test_it_looks_every_so_many_steps_and_at_the_end() -> None:
    told = run(Scripted(), total=7, look_every=3, heldout=lambda step: float(step))
    assert {step: found["heldout/loss"] for step, found in told.logged if "heldout/loss" in found} == {
        3: 3.0,
        6: 6.0,
        7: 7.0,
    }


def test_it_saves_every_so_many_steps_at_the_end_and_whenever_it_is_at_its_best() -> None:
    falls_then_rises = {2: 5.0, 4: 4.0, 6: 4.5, 8: 4.0, 9: 3.0}
    told = run(Scripted(), total=9, look_every=2, save_every=3, heldout=falls_then_rises.__getitem__)
    # 4.0 at step 8 is not better than 4.0 at step 4.
    assert told.saved == [(2, True), (3, False), (4, True), (6, False), (9, True)]


def test_without_held_out_data_there_is_no_best() -> None:
    assert run(Scripted(), total=5, look_every=1, save_every=2).saved == [(2, False), (4, False), (5, False)]


def test_patience_ends_it_after_so_many_looks_without_a_better_one() -> None:
    losses = {1: 5.0, 2: 6.0, 3: 4.0, 4: 4.0, 5: 9.0, 6: 1.0}
    learner, patience = Scripted(), Patience(limit=2)
    told = run(learner, total=6, look_every=1, heldout=losses.__getitem__, patience=patience)
    assert learner.step == 5
    assert (patience.best, patience.best_step, patience.waited) == (4.0, 3, 2)
    assert told.saved == [(1, True), (3, True), (5, False)]  # what it stopped at is saved, so that resuming knows
    assert [step for step, _ in told.logged] == [1, 2, 3, 4, 5]


def test_a_look_that_is_not_a_number_is_never_the_best() -> None:
    losses = {1: float("nan"), 2: 5.0, 3: float("nan")}
    patience = Patience(limit=None)
    run(Scripted(), total=3, look_every=1, heldout=losses.__getitem__, patience=patience)
    assert (patience.best, patience.best_step) == (5.0, 2)


def test_patience_goes_on_from_its_state() -> None:
    before = Patience(limit=2)
    before.notes_a_best(3.0, 7)
    before.notes_a_best(4.0, 8)
    after = Patience(limit=2)
    after.load(before.state())
    assert not after.is_over
    assert not after.notes_a_best(3.0, 9)
    assert (after.is_over, after.best_step) == (True, 7)


def test_a_run_that_had_stopped_early_does_not_take_one_more_step_when_resumed() -> None:
    patience = Patience(limit=1, best=1.0, best_step=2, waited=1)
    learner = Scripted(step=4)
    told = run(learner, total=9, patience=patience)
    assert (learner.seen, told.logged, told.saved) == ([], [], [])


def test_a_bad_step_is_dropped_told_and_gone_on_from() -> None:
    learner = Scripted(bad=frozenset({2}))
    told = run(learner, total=4, save_every=2, look_every=2, heldout=lambda step: float(-step))
    assert [step for step, _ in told.logged] == [1, 3, 4]
    assert told.saved == [(4, True)]  # step 2 would have been looked at and saved
    assert told.events == [
        {
            "level": "warning",
            "code": "step.not_finite",
            "message": "dropped: step 2: the loss is nan; the weights are unchanged; its batch is kept in bad/batch 2",
            "step": 2,
        }
    ]


def test_a_bad_last_step_is_still_looked_at_and_saved() -> None:
    told = run(Scripted(bad=frozenset({3})), total=3, heldout=lambda step: 0.5)
    assert told.logged[-1] == (3, {"heldout/loss": 0.5})
    assert told.saved == [(3, True)]


def test_too_many_bad_steps_in_a_row_stop_the_run() -> None:
    assert MAX_BAD_STEPS == 5
    learner, told = Scripted(bad=frozenset(range(3, 20))), Told()
    with pytest.raises(NumericsError, match="step 7: the loss is nan"):
        run(learner, total=20, told=told)
    assert [event["step"] for event in told.events] == [3, 4, 5, 6, 7]


def test_one_good_step_begins_the_count_anew() -> None:
    told = run(Scripted(bad=frozenset({1, 2, 3, 4, 6, 7, 8, 9})), total=10)
    assert [step for step, _ in told.logged] == [5, 10]
    assert len(told.events) == 8
