"""What surrounds the optimiser steps of one learner: resuming, journal, early stopping, checkpoints, interruption.

The loop itself is written out in each stage:

    loop = TrainLoop(context, learner, checkpoints=settings.checkpoints, evaluation=settings.eval)
    with interruptible(context.stop, context.say):
        for rows in loop.steps(order):
            metrics = loop.update(batches_of(rows, pad))
            if metrics is None:
                continue
            if loop.is_evaluation_due:
                metrics |= held_out_metrics(learner, held_out)
            loop.finish(metrics)
    loop.take_best()
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Generic, Protocol, TypeVar

from kedge.core.batches import Batch
from kedge.core.errors import NumericsError
from kedge.core.protocols import Metrics
from kedge.data.batching import TokenSequence, padded_batches
from kedge.models.forward.sharding import gathered_state
from kedge.models.settings import AutoSize
from kedge.models.training.passes import Cut, Passes, PassSize
from kedge.runs.checkpoints import CheckpointSettings
from kedge.runs.folder import Run
from kedge.runs.state import capture_rng, load_state, restore_rng, save_state
from kedge.runtime.local import Clock
from kedge.stages.shared.context import Context
from kedge.trainers.supervised import MAX_BAD_STEPS, EarlyStopping, EvalSettings


class TokenBatch(Protocol):
    @property
    def num_tokens(self) -> int: ...


BatchT = TypeVar("BatchT", bound=TokenBatch)
BatchInT = TypeVar("BatchInT", bound=TokenBatch, contravariant=True)
ItemT = TypeVar("ItemT")


class LearnerRole(Protocol[BatchInT]):
    """A module that learns. `update` is one optimiser step, and counts it in `step` even when it refuses it."""

    @property
    def step(self) -> int: ...
    @property
    def total_steps(self) -> int: ...
    def update(self, batches: Cut[BatchInT]) -> Metrics: ...
    def measure(self, batches: Cut[BatchInT]) -> Metrics: ...
    def state(self) -> dict[str, Any]: ...
    def load(self, state: Mapping[str, Any]) -> None: ...


class TrainLoop(Generic[BatchT]):
    """`step` counts the steps of the run, `first_step` of them by the learners that came before this one."""

    def __init__(
        self,
        context: Context,
        learner: LearnerRole[BatchT],
        *,
        checkpoints: CheckpointSettings,
        evaluation: EvalSettings | None = None,
        first_step: int = 0,
    ) -> None:
        """The learner takes up the newest good checkpoint that is its own; without one it starts from the beginning."""
        self._context = context
        self._learner = learner
        self._checkpoints = checkpoints
        self._evaluation = evaluation
        self._stopping = EarlyStopping(patience=evaluation.patience if evaluation else None)
        self._first_step = first_step
        self._num_refused = 0
        self._num_tokens = 0
        self._clock = Clock()
        self.is_resumed = self._resume()
        self.step = first_step + learner.step

    def steps(self, items: Iterable[ItemT]) -> Iterator[ItemT]:
        """What each step is made of, one item a step, until the items end or early stopping does."""
        self._clock.take()
        if self._stopping.is_over:  # a resumed run that was killed just after it had stopped
            return
        for item in self._clock.each(items, "data"):
            yield item
            if self._stopping.is_over:
                return

    def update(self, batches: Cut[BatchT]) -> dict[str, float] | None:
        """One optimiser step and its metrics; None where it was refused, and there is nothing to log.

        `batches` are what the step is cut into for a size of its passes. Those of a step whose loss or gradient is not
        finite are kept for study. The last step of all has empty metrics then, for it is evaluated and saved all the
        same.
        """
        computed = _Recorded(batches)
        try:
            with self._clock.lap("update"):
                metrics = self._learner.update(computed)
        except NumericsError as error:
            self._note_refusal(computed.last, error)
            if self._num_refused == MAX_BAD_STEPS:
                raise
            if self._learner.step < self._learner.total_steps:
                self._stop_if_asked()
                return None
            return {}
        finally:
            self._num_tokens += sum(batch.num_tokens for batch in computed.last)
        self.step = self._first_step + self._learner.step
        self._num_refused = 0
        return {f"train/{name}": value for name, value in metrics.items()}

    @property
    def is_evaluation_due(self) -> bool:
        step, evaluation = self._learner.step, self._evaluation
        return evaluation is not None and (step == self._learner.total_steps or step % evaluation.every == 0)

    def finish(self, metrics: Metrics) -> None:
        """Log the step and save it where that is due. Asked to stop, the run ends here with this step saved."""
        step = self._learner.step
        is_best = "heldout/loss" in metrics and self._stopping.observe(metrics["heldout/loss"], step)
        self._log(metrics)
        is_last = step == self._learner.total_steps or self._stopping.is_over
        is_saved = is_best or is_last or step % self._checkpoints.every == 0
        if is_saved:
            with self._clock.lap("save"):
                self._save(is_best=is_best)
        if not is_last:
            self._stop_if_asked(is_saved=is_saved)

    def take_best(self) -> None:
        """After early stopping, the weights of the best evaluation are the ones to keep."""
        stopping = self._stopping
        if stopping.patience is not None and 0 < stopping.best_step != self._learner.step:
            best = self._context.run.checkpoints.read(self._first_step + stopping.best_step, check_hashes=True)
            self._learner.load(load_state(best.folder)["learner"])

    def _resume(self) -> bool:
        run = self._context.run
        latest = run.checkpoints.latest()
        is_own = latest is not None and latest.checkpoint.step > self._first_step
        if latest is not None and is_own:
            state = load_state(latest.checkpoint.folder)
            self._learner.load(state["learner"])
            self._stopping.load(state["patience"])
            self._num_refused = state["refused"]
            restore_rng(state["rng"])
        done = self._first_step + self._learner.step or None
        skipped = latest.skipped if latest else ()
        if is_own or skipped or run.has_later_records(done):
            run.resume_at(done)
            for reason in skipped:
                run.event("warning", "checkpoint.damaged", f"left out: {reason}")
        return is_own

    def _log(self, metrics: Metrics) -> None:
        laps = self._clock.take()
        if "heldout/loss" in metrics:
            laps["evaluate"] = laps["step"] - sum(laps.get(phase, 0.0) for phase in ("data", "update", "save"))
        speed = {f"time/{name}": seconds for name, seconds in laps.items()}
        speed["tokens/per_second"] = self._num_tokens / laps["step"]
        self._num_tokens = 0
        self._context.tracker.log({**metrics, **speed}, step=self.step)

    def _note_refusal(self, batches: Sequence[BatchT], error: NumericsError) -> None:
        self.step = self._first_step + self._learner.step
        self._num_refused += 1
        place = self._context.once(lambda: keep_bad(self._context.run, self.step, batches))
        message = f"dropped: {error}; its batch is kept in {place}"
        event = {"level": "warning", "code": "step.not_finite", "message": message, "step": self.step}
        self._context.tracker.event(event)

    def _stop_if_asked(self, *, is_saved: bool = False) -> None:
        if not self._context.stop.is_asked:  # a signal may come at any moment: from here on it counts for the next step
            return
        if not is_saved:
            self._save(is_best=False)
        stop_if_asked(self._context, self.step)

    def _save(self, *, is_best: bool) -> None:
        state = {
            "learner": self._learner.state(),
            "patience": self._stopping.state(),
            "refused": self._num_refused,
            "rng": capture_rng(),
        }
        state = gathered_state(state)
        pin = "best" if is_best else None
        self._context.run.save_checkpoint(self.step, lambda folder: save_state(folder, state), pin=pin)


def stop_if_asked(context: Context, step: int) -> None:
    """End the run, of which everything up to `step` is saved, if somebody asked for that."""
    if context.stop.is_asked:
        context.event("info", "run.interrupted", f"stopped at step {step}, which is saved", step=step)
        raise KeyboardInterrupt


class _Recorded(Generic[BatchT]):
    """What a step was cut into when it was computed last."""

    def __init__(self, batches: Cut[BatchT]) -> None:
        self._batches = batches
        self.last: Sequence[BatchT] = ()

    def __call__(self, size: PassSize) -> Sequence[BatchT]:
        self.last = self._batches(size)
        return self.last


def passes_for(context: Context, micro_batch: AutoSize) -> Passes:
    """The size of a stage's passes, which says as an event what it is and when it changes."""
    return Passes(micro_batch, report=context.event, world=context.world)


def batches_of(sequences: Sequence[TokenSequence], pad: int) -> Cut[Batch]:
    """Sequences, a row each, in batches of a size of passes."""
    return lambda size: padded_batches(sequences, rows=size.rows, tokens=size.tokens, shares=size.shares, pad=pad)


def steps_left(max_steps: int | None, step: int) -> int | None:
    """How many steps of a stage are left after `step` of them; None where nothing bounds them."""
    return None if max_steps is None else max(0, max_steps - step)


def held_out_metrics(learner: LearnerRole[BatchT], batches: Cut[BatchT]) -> dict[str, float]:
    return {f"heldout/{name}": value for name, value in learner.measure(batches).items()}


def keep_bad(run: Run, step: int, batches: Sequence[Any]) -> str:
    """Keep the tensors of a step that was refused, as they were when the loss or the gradient was not finite.

    Gives the folder that they are in, seen from that of the run.
    """
    folder = run.folder / "bad-steps" / f"step-{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    save_state(
        folder, {"batches": [{field.name: getattr(batch, field.name) for field in fields(batch)} for batch in batches]}
    )
    return str(folder.relative_to(run.folder))
