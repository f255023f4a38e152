"""What the stages that train share: checkpoints that resume exactly, timing, and where a model is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol, TypeVar

import torch

from kedge.core.errors import ConfigError
from kedge.core.protocols import Metrics, Tracker
from kedge.models.training.learner import Learner
from kedge.runs.checkpoints import CheckpointSettings
from kedge.runs.folder import Run
from kedge.runs.state import capture_rng, load_state, restore_rng, save_state
from kedge.stages.shared.context import Context
from kedge.trainers.supervised import LookSettings, Patience, Watch, train

BatchT = TypeVar("BatchT")


def pick_device(wanted: str) -> str:
    """`auto` is the GPU where there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted


def checked_device(wanted: str) -> str:
    """The same for `--device`, with words for one that is not there."""
    try:
        device = torch.device(pick_device(wanted))
    except RuntimeError as error:
        raise ConfigError(f"--device {wanted}: there is no such device; auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {wanted}: torch finds no GPU here; use cpu")
    return str(device)


class Meter:
    """What training costs: seconds, and on a GPU the peak of its memory."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._since = time.perf_counter()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def read(self) -> dict[str, str]:
        found = {"training time": f"{time.perf_counter() - self._since:.1f} s"}
        if self._device == "cuda":
            found["peak GPU memory"] = f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"
        return found


class Timed:
    """A tracker of one learner's steps that adds how fast they go: seconds a step, tokens a second.

    `first_step` is how many steps of the run came before this learner's.
    """

    def __init__(self, tracker: Tracker, *, first_step: int = 0) -> None:
        self._tracker = tracker
        self._first_step = first_step
        self._tokens = 0
        self._since = time.perf_counter()

    def counting(
        self, steps: Iterable[Sequence[BatchT]], tokens_of: Callable[[BatchT], int]
    ) -> Iterator[Sequence[BatchT]]:
        """The same steps; their tokens are counted on the way."""
        for batches in steps:
            self._tokens += sum(tokens_of(batch) for batch in batches)
            yield batches

    def log(self, metrics: Metrics, *, step: int) -> None:
        now = time.perf_counter()
        seconds, tokens = now - self._since, self._tokens
        self._since, self._tokens = now, 0
        speed = {"time/step": seconds, "tokens/per_second": tokens / seconds}
        self._tracker.log({**metrics, **speed}, step=self._first_step + step)

    def event(self, event: Mapping[str, Any]) -> None:
        self._tracker.event({**event, "step": self._first_step + event["step"]})

    def close(self) -> None:
        self._tracker.close()


def resume(run: Run, learner: Learner[Any], patience: Patience, *, first_step: int = 0) -> bool:
    """Take up the newest good checkpoint of this learner; False when it has to start from the beginning."""
    latest = run.checkpoints.latest()
    is_mine = latest is not None and latest.checkpoint.step > first_step
    if latest is not None and is_mine:
        state = load_state(latest.checkpoint.folder)
        learner.load(state["learner"])
        patience.load(state["patience"])
        restore_rng(state["rng"])
    done = first_step + learner.step or None
    skipped = latest.skipped if latest else ()
    if is_mine or skipped or _has_records_after(run, done):
        run.resume_at(done)
        for reason in skipped:
            run.event("warning", "checkpoint.damaged", f"left out: {reason}")
    return is_mine


def _has_records_after(run: Run, step: int | None) -> bool:
    found = (one.get("step") for one in (*run.read_metrics(), *run.read_samples(), *run.read_events()))
    return any(at is not None and (step is None or at > step) for at in found)


def save(run: Run, learner: Learner[Any], patience: Patience, *, is_best: bool, first_step: int = 0) -> None:
    state = {"learner": learner.state(), "patience": patience.state(), "rng": capture_rng()}
    step = first_step + learner.step
    run.save_checkpoint(step, lambda folder: save_state(folder, state), pin="best" if is_best else None)


def keep_bad(run: Run, step: int, batches: Sequence[Any]) -> str:
    """The tensors of a step that was refused, as they were when the loss or the gradient was not finite."""
    folder = run.folder / "bad-steps" / f"step-{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    save_state(
        folder, {"batches": [{one.name: getattr(batch, one.name) for one in fields(batch)} for batch in batches]}
    )
    return str(folder.relative_to(run.folder))


def take_best(run: Run, learner: Learner[Any], patience: Patience, *, first_step: int = 0) -> None:
    """After early stopping, the weights of the best look are the ones to keep."""
    if patience.limit is not None and 0 < patience.best_step != learner.step:
        best = run.checkpoints.read(first_step + patience.best_step, check_hashes=True)
        learner.load(load_state(best.folder)["learner"])


class Schedule(Protocol):
    """What the settings of every stage that trains say about looking and saving."""

    @property
    def look(self) -> LookSettings: ...
    @property
    def checkpoints(self) -> CheckpointSettings: ...


def fit(
    context: Context,
    learner: Learner[BatchT],
    schedule: Schedule,
    *,
    steps_from: Callable[[int], Iterable[Sequence[BatchT]]],
    held: Sequence[BatchT],
    tokens_of: Callable[[BatchT], int],
    first_step: int = 0,
    before: Callable[[], None] = lambda: None,
) -> int:
    """Train a learner from where it was to its end; returns the step of the run at which it ended.

    `steps_from(n)` are the steps after the first n. `before` happens once, at the beginning. `first_step` is how many
    steps of the run came before this learner's.
    """
    run, patience = context.run, Patience(limit=schedule.look.patience)
    if not resume(run, learner, patience, first_step=first_step):
        before()
    timed = Timed(context.tracker, first_step=first_step)
    watch = Watch(
        tracker=timed,
        look=lambda: {f"heldout/{name}": value for name, value in learner.measure(held).items()} if held else {},
        look_every=schedule.look.every,
        save=lambda is_best: save(run, learner, patience, is_best=is_best, first_step=first_step),
        save_every=schedule.checkpoints.every,
        patience=patience,
        keep=lambda batches: keep_bad(run, first_step + learner.step, batches),
    )
    train(learner, timed.counting(steps_from(learner.step), tokens_of), watch, total=learner.total_steps)
    last_step = first_step + learner.step
    take_best(run, learner, patience, first_step=first_step)
    return last_step
