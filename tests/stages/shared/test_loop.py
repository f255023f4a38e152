"""The loop around a learner without a model: what is logged, evaluated and saved at which step, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.core.batches import Batch
from kedge.core.errors import NumericsError
from kedge.core.protocols import Metrics
from kedge.models.training.passes import WHOLE_STEP, Cut
from kedge.runs import Run, new_manifest
from kedge.runs.checkpoints import CheckpointSettings
from kedge.runs.folder import RunTracker
from kedge.runs.state import load_state
from kedge.stages.shared.context import Context
from kedge.stages.shared.loop import TrainLoop, held_out_metrics, keep_bad, stop_if_asked
from kedge.trainers.supervised import EvalSettings

NEVER = 1000
HeldOut = Callable[[int], float]


@dataclass(frozen=True)
class Named:
    """A batch of `number` tokens."""

    number: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.number)


@dataclass
class Scripted:
    """A learner whose loss is 100 minus the step, and that refuses the steps it is told to.

    Each update draws a random number, as dropout does.
    """

    total_steps: int
    bad: frozenset[int] = frozenset()
    step: int = 0
    trained: list[int] = field(default_factory=list[int])

    def update(self, batches: Cut[Named]) -> Metrics:
        self.step += 1
        self.trained += [batch.num_tokens for batch in batches(WHOLE_STEP)]
        drawn = torch.rand(()).item()
        if self.step in self.bad:
            raise NumericsError(f"step {self.step}: the loss is nan; the weights are unchanged")
        return {"loss": 100.0 - self.step, "drawn": drawn}

    def measure(self, batches: Cut[Named]) -> Metrics:
        return {"loss": sum(float(batch.number) for batch in batches(WHOLE_STEP)) + self.step}

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "weights": {"w": torch.tensor([float(self.step)])}}

    def load(self, state: Mapping[str, Any]) -> None:
        self.step = int(state["step"])


@pytest.fixture
def run(tmp_path: Path) -> Generator[Run]:
    manifest = new_manifest(name="a", kind="sft", seed=0, settings={})
    with Run.create(tmp_path / "run", manifest=manifest, keep=CheckpointSettings(keep=99)) as created:
        yield created


def context_of(run: Run) -> Context:
    return Context(
        name="sft",
        seed=0,
        run=run,
        tracker=RunTracker(run),
        device="cpu",
        chat_template=None,
        recipe_folder=run.folder,
        sources={},
        say=lambda _: None,
    )


def train(
    run: Run,
    learner: Scripted,
    *,
    held_out: HeldOut | None = None,
    eval_every: int = NEVER,
    save_every: int = NEVER,
    patience: int | None = None,
    first_step: int = 0,
    stop_at: int | None = None,
) -> TrainLoop[Named]:
    """The loop as stages write it. Somebody asks to stop while step `stop_at` of the learner is under way."""
    torch.manual_seed(7)
    context = context_of(run)
    loop = TrainLoop(
        context,
        learner,
        checkpoints=CheckpointSettings(every=save_every),
        evaluation=EvalSettings(every=eval_every, patience=patience),
        first_step=first_step,
    )
    for number in loop.steps(range(learner.step + 1, learner.total_steps + 1)):
        if number == stop_at:
            context.stop.ask()
        batch = Named(torch.tensor(number))
        metrics = loop.update(lambda _, batch=batch: [batch])
        if metrics is None:
            continue
        if held_out and loop.is_evaluation_due:
            metrics["heldout/loss"] = held_out(learner.step)
        loop.finish(metrics)
    return loop


def logged(run: Run) -> dict[int, dict[str, float]]:
    left_out = ("step", "at", "time/", "tokens/per_second", "train/drawn")
    return {
        line["step"]: {name: value for name, value in line.items() if not name.startswith(left_out)}
        for line in run.read_metrics()
    }


def saved(run: Run) -> list[tuple[int, bool]]:
    """The steps of the checkpoints, and whether each is the best."""
    best = run.checkpoints.pins().get("best")
    return [(step, step == best) for step in run.checkpoints.steps()]


def codes(run: Run) -> list[tuple[int | None, str]]:
    return [(event["step"], event["code"]) for event in run.read_events()]


# Journal


def test_every_step_is_logged_once_with_the_metrics_of_that_step(run: Run) -> None:
    learner = Scripted(total_steps=3)
    loop = train(run, learner)
    assert logged(run) == {1: {"train/loss": 99.0}, 2: {"train/loss": 98.0}, 3: {"train/loss": 97.0}}
    assert learner.trained == [1, 2, 3]
    assert codes(run) == []
    assert (loop.step, loop.is_resumed) == (3, False)


def test_speed_is_that_of_the_step_and_of_steps_refused_before_it(run: Run) -> None:
    train(run, Scripted(total_steps=4, bad=frozenset({2})))
    num_tokens = {line["step"]: line["time/step"] * line["tokens/per_second"] for line in run.read_metrics()}
    assert num_tokens == pytest.approx({1: 1, 3: 2 + 3, 4: 4})


def test_the_seconds_of_a_step_are_those_of_its_parts(run: Run) -> None:
    def slow(step: int) -> float:
        time.sleep(0.02)
        return 1.0

    train(run, Scripted(total_steps=4, bad=frozenset({2})), held_out=slow, eval_every=4, save_every=1)
    first, third, fourth = run.read_metrics()
    parts = {"time/step", "time/data", "time/update"}
    assert {name for name in first if name.startswith("time/")} == parts
    assert {name for name in third if name.startswith("time/")} == parts | {"time/save"}, "of the step before"
    assert {name for name in fourth if name.startswith("time/")} == parts | {"time/save", "time/evaluate"}
    assert fourth["time/evaluate"] >= 0.02
    for line in (first, third, fourth):
        assert sum(line[name] for name in line if name.startswith("time/")) <= 2 * line["time/step"] + 1e-9


def test_steps_of_earlier_learners_come_before(run: Run) -> None:
    loop = train(run, Scripted(total_steps=3, bad=frozenset({2})), save_every=1, first_step=10)
    assert list(logged(run)) == [11, 13]
    assert saved(run) == [(11, False), (13, False)]
    assert codes(run) == [(12, "step.not_finite")]
    assert (run.folder / "bad-steps/step-000012").is_dir()
    assert loop.step == 13


# Evaluation and checkpoints


def test_it_evaluates_every_so_many_steps_and_at_the_end(run: Run) -> None:
    train(run, Scripted(total_steps=7), eval_every=3, held_out=float)
    evaluated = {step: line["heldout/loss"] for step, line in logged(run).items() if "heldout/loss" in line}
    assert evaluated == {3: 3.0, 6: 6.0, 7: 7.0}


def test_without_settings_nothing_is_ever_due(run: Run) -> None:
    loop = TrainLoop(context_of(run), Scripted(total_steps=2, step=2), checkpoints=CheckpointSettings())
    assert not loop.is_evaluation_due


def test_held_out_metrics_have_names_of_their_own() -> None:
    batches = [Named(torch.tensor(2)), Named(torch.tensor(5))]
    assert held_out_metrics(Scripted(total_steps=9, step=4), lambda _: batches) == {"heldout/loss": 11.0}


def test_it_saves_every_so_many_steps_at_the_end_and_whenever_it_is_at_its_best(run: Run) -> None:
    falls_then_rises = {2: 5.0, 4: 4.0, 6: 4.5, 8: 4.0, 9: 3.0}
    train(run, Scripted(total_steps=9), eval_every=2, save_every=3, held_out=falls_then_rises.__getitem__)
    # 4.0 at step 8 is not better than 4.0 at step 4.
    assert saved(run) == [(2, False), (3, False), (4, False), (6, False), (9, True)]


def test_the_best_is_pinned(run: Run) -> None:
    train(run, Scripted(total_steps=6), eval_every=2, save_every=3, held_out={2: 5.0, 4: 4.0, 6: 4.5}.__getitem__)
    assert saved(run) == [(2, False), (3, False), (4, True), (6, False)]


def test_without_held_out_data_there_is_no_best(run: Run) -> None:
    train(run, Scripted(total_steps=5), eval_every=1, save_every=2)
    assert saved(run) == [(2, False), (4, False), (5, False)]


# Early stopping


def test_patience_ends_it_and_the_best_weights_are_taken(run: Run) -> None:
    losses = {1: 5.0, 2: 6.0, 3: 4.0, 4: 4.0, 5: 9.0, 6: 1.0}
    learner = Scripted(total_steps=6)
    loop = train(run, learner, eval_every=1, held_out=losses.__getitem__, patience=2, first_step=20)
    assert (learner.step, loop.step) == (5, 25)
    assert saved(run) == [(21, False), (23, True), (25, False)]  # the step it stopped at is saved: resuming knows
    assert list(logged(run)) == [21, 22, 23, 24, 25]
    loop.take_best()
    assert (learner.step, loop.step) == (3, 25)


def test_without_patience_the_last_weights_are_kept(run: Run) -> None:
    learner = Scripted(total_steps=3)
    train(run, learner, eval_every=1, held_out=float).take_best()
    assert learner.step == 3


def test_a_run_that_had_stopped_early_does_not_take_one_more_step_when_resumed(run: Run) -> None:
    train(run, Scripted(total_steps=9), eval_every=1, held_out=float, patience=2)
    learner = Scripted(total_steps=9)
    loop = train(run, learner, eval_every=1, held_out=float, patience=2)
    assert (learner.trained, learner.step, loop.is_resumed) == ([], 3, True)
    loop.take_best()
    assert learner.step == 1


# Refused steps


def test_a_refused_step_is_kept_reported_and_gone_on_from(run: Run) -> None:
    train(run, Scripted(total_steps=4, bad=frozenset({2})), save_every=2, eval_every=2, held_out=lambda step: -step)
    assert list(logged(run)) == [1, 3, 4]
    assert saved(run) == [(4, True)]  # step 2 would have been evaluated and saved
    (event,) = run.read_events()
    assert (event["level"], event["code"], event["step"]) == ("warning", "step.not_finite", 2)
    assert event["message"] == (
        "dropped: step 2: the loss is nan; the weights are unchanged; its batch is kept in bad-steps/step-000002"
    )
    (batch,) = load_state(run.folder / "bad-steps/step-000002")["batches"]
    assert batch["number"].item() == 2


def test_a_refused_last_step_is_still_evaluated_and_saved(run: Run) -> None:
    train(run, Scripted(total_steps=3, bad=frozenset({3})), held_out=lambda _: 0.5)
    assert logged(run)[3] == {"heldout/loss": 0.5}
    assert saved(run) == [(3, True)]


def test_too_many_refused_steps_in_a_row_stop_the_run(run: Run) -> None:
    with pytest.raises(NumericsError, match="step 7: the loss is nan"):
        train(run, Scripted(total_steps=20, bad=frozenset(range(3, 20))))
    assert codes(run) == [(step, "step.not_finite") for step in (3, 4, 5, 6, 7)]


def test_one_good_step_begins_the_count_anew(run: Run) -> None:
    train(run, Scripted(total_steps=10, bad=frozenset({1, 2, 3, 4, 6, 7, 8, 9})))
    assert list(logged(run)) == [5, 10]
    assert len(codes(run)) == 8


def test_the_batches_of_a_refused_step_are_kept_as_they_were(run: Run) -> None:
    batch = Batch(
        tokens_BT=torch.tensor([[5, 7, 0]]),
        attention_mask_BT=torch.tensor([[True, True, False]]),
        counted_BT=torch.tensor([[False, True, False]]),
    )
    assert keep_bad(run, 12, [batch]) == "bad-steps/step-000012"
    (kept,) = load_state(run.folder / "bad-steps/step-000012")["batches"]
    assert {name: tensor.tolist() for name, tensor in kept.items()} == {
        "tokens_BT": [[5, 7, 0]],
        "attention_mask_BT": [[True, True, False]],
        "counted_BT": [[False, True, False]],
    }


# Interruption


def drawn(run: Run) -> dict[int, float]:
    return {line["step"]: line["train/drawn"] for line in run.read_metrics()}


@pytest.mark.parametrize("bad", [frozenset[int](), frozenset({4, 5})])
def test_asked_to_stop_it_saves_the_step_and_a_resumed_run_is_the_same(tmp_path: Path, bad: frozenset[int]) -> None:
    """Step 4, in which it is asked, may itself be one that is refused."""
    manifest = new_manifest(name="a", kind="sft", seed=0, settings={})
    with Run.create(tmp_path / "whole", manifest=manifest) as whole:
        train(whole, Scripted(total_steps=7, bad=bad), eval_every=2, held_out=float, first_step=10)
    with Run.create(tmp_path / "cut", manifest=manifest) as cut:
        with pytest.raises(KeyboardInterrupt):
            train(cut, Scripted(total_steps=7, bad=bad), eval_every=2, held_out=float, first_step=10, stop_at=4)
        assert 14 in cut.checkpoints.steps()
        event = cut.read_events()[-1]
        assert (event["level"], event["code"], event["step"]) == ("info", "run.interrupted", 14)
        assert event["message"] == "stopped at step 14, which is saved"
        learner = Scripted(total_steps=7, bad=bad)
        loop = train(cut, learner, eval_every=2, held_out=float, first_step=10)
        assert loop.is_resumed
        assert learner.trained == [5, 6, 7]
        assert (logged(cut), drawn(cut)) == (logged(whole), drawn(whole))


def test_refused_steps_before_an_interruption_count_after_it(run: Run) -> None:
    bad = frozenset(range(3, 20))
    with pytest.raises(KeyboardInterrupt):
        train(run, Scripted(total_steps=20, bad=bad), stop_at=5)
    with pytest.raises(NumericsError, match="step 7: the loss is nan"):
        train(run, Scripted(total_steps=20, bad=bad))


def test_asked_in_the_last_step_it_ends_as_if_nobody_had(run: Run) -> None:
    loop = train(run, Scripted(total_steps=3), stop_at=3)
    assert loop.step == 3
    assert codes(run) == []


def test_a_step_that_is_saved_anyway_is_saved_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    real = run.save_checkpoint

    def counted(step: int, *arguments: Any, **settings: Any) -> Any:
        steps.append(step)
        return real(step, *arguments, **settings)

    monkeypatch.setattr(run, "save_checkpoint", counted)
    with pytest.raises(KeyboardInterrupt):
        train(run, Scripted(total_steps=9), save_every=2, stop_at=4)
    assert steps == [2, 4]


def test_between_two_learners_it_stops_where_it_is(run: Run) -> None:
    context = context_of(run)
    stop_if_asked(context, 8)
    assert codes(run) == []
    context.stop.ask()
    with pytest.raises(KeyboardInterrupt):
        stop_if_asked(context, 8)
    assert codes(run) == [(8, "run.interrupted")]


# Resuming


def test_a_checkpoint_of_an_earlier_learner_is_not_taken_up(run: Run) -> None:
    train(run, Scripted(total_steps=4), save_every=2)
    learner = Scripted(total_steps=4)
    loop = train(run, learner, save_every=2, first_step=4)
    assert (loop.is_resumed, learner.trained) == (False, [1, 2, 3, 4])
    assert list(logged(run)) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_records_behind_the_checkpoint_are_written_again(run: Run) -> None:
    train(run, Scripted(total_steps=5), save_every=2)
    before = drawn(run)
    run.checkpoints.discard_after(4)
    learner = Scripted(total_steps=5)
    train(run, learner, save_every=2)
    assert learner.trained == [5]
    assert drawn(run) == before
    assert codes(run) == [(None, "run.resumed")]
