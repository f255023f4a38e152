"""How much of an optimiser step is computed at once: tokens or rows a pass, chosen, halved when memory runs out.

A step is the sum of its passes whatever their size is, so Kedge may choose it. `auto` is a number of tokens: on CUDA
the fewest with which a step reaches the best rate, by a few trial passes, and that leave memory free; elsewhere a
constant, so that no clock decides what is computed. A pass that does not fit is an event and not the end of a run: the
step is computed again in passes of half the size, with the same random numbers.

Several processes (`kedge.core.world`) share the passes of a step. They meet at the end of an attempt, never within one:
where it did not fit on one of them, all do it again in smaller passes. Where weights are sharded they meet within every
pass: one that does not fit then ends the run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from kedge.core.errors import ModelError
from kedge.core.records import cut, send
from kedge.core.seeds import seed_for
from kedge.core.world import ALONE, World, passes_of, together
from kedge.models.forward.capture import release_graphs
from kedge.models.training.gauge import Gauge, gauge_of

T = TypeVar("T")
ResultT = TypeVar("ResultT")

CPU_TOKENS = 2_048
"""Tokens a pass where no clock decides: enough to keep the cores of a CPU busy."""
LEAST_TOKENS = 2_048
"""The smallest pass that is tried on CUDA."""
SHARE_OF_FREE = 0.8
"""The most of the free memory that a pass may be expected to take."""
WORTHWHILE = 1.03
"""Twice the tokens are tried again while the rate rises by more than this factor."""
GOOD_ENOUGH = 0.97
"""The fewest tokens with this share of the best rate are taken."""
LONGER_STEP = 2
"""So many times as long as the first step a later one may be, where memory allows, and still be one pass."""
WITHOUT_GRADIENTS = {"cuda": 65_536}
CPU_WITHOUT_GRADIENTS = 8_192
"""Tokens at once without gradients, where one layer's activations are kept instead of all layers'."""

Report = Callable[[Literal["info", "warning"], str, str], object]
"""Level, code and message of an event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSize:
    """The most of a step that is in one pass: so many tokens, or so many rows (pairs, comparisons); one of the two.

    No pass is larger than one of `shares` equal shares of the step, so that as many processes have something to do.
    """

    tokens: int | None = None
    rows: int | None = None
    shares: int = 1

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.rows is None) or (self.tokens or self.rows or 0) < 1:
            raise ValueError(f"a pass has a number of tokens or of rows, 1 or more: found {self}")

    def halved(self) -> PassSize | None:
        """
        >>> PassSize(rows=8).halved(), PassSize(tokens=1).halved()
        (PassSize(tokens=None, rows=4, shares=1), None)
        """
        if self.tokens is not None:
            return replace(self, tokens=self.tokens // 2) if self.tokens > 1 else None
        assert self.rows is not None
        return replace(self, rows=self.rows // 2) if self.rows > 1 else None

    def __str__(self) -> str:
        """
        >>> str(PassSize(tokens=8192)), str(PassSize(rows=1))
        ('passes of at most 8,192 tokens', 'passes of at most 1 row')
        """
        number, noun = (self.tokens, "token") if self.tokens is not None else (self.rows, "row")
        return f"passes of at most {number:,} {noun}{'' if number == 1 else 's'}"


WHOLE_STEP = PassSize(tokens=2**62)
Cut = Callable[[PassSize], Sequence[T]]
"""What a step is cut into, for any size of its passes."""


class Passes:
    """The size of one learner's passes. `size` is None until `auto` is decided, at the first step."""

    def __init__(
        self,
        asked: int | Literal["auto"] = "auto",
        *,
        report: Report = lambda level, code, message: None,
        gauge: Callable[[torch.device], Gauge | None] = gauge_of,
        owner: str = "",
        world: World = ALONE,
    ) -> None:
        """`asked` is the setting `micro_batch`; `owner` names the learner in events where a run has several; `world`
        are the processes that share the passes."""
        self.asked, self.world = asked, world
        self.size: PassSize | None = None if asked == "auto" else PassSize(rows=asked)
        self._report, self._gauge, self._owner = report, gauge, f"{owner}: " if owner else ""

    def choose(
        self,
        device: torch.device,
        *,
        tokens_of: Callable[[PassSize], Sequence[int]],
        trial: Callable[[PassSize], int],
        reserved_bytes: int = 0,
    ) -> None:
        """Decide `auto`. `tokens_of` says of each pass of the step, at a size, how many tokens it would have; `trial`
        computes one pass of a size, drops what it gave, and says how many tokens it had; `reserved_bytes` will be taken
        by something else later."""
        gauge = self._gauge(device)
        if gauge is None:
            self.size = PassSize(tokens=CPU_TOKENS)
            self._report("info", "micro_batch.chosen", f"{self._owner}{self.size}")
            return
        whole = -(-sum(tokens_of(WHOLE_STEP)) // self.world.size)
        on_full = partial(_release, device)
        trials = list(_trials(gauge, whole, trial, reserved_bytes, on_full=on_full, world=self.world))
        if trials:
            rates = [
                step_rate(tokens_of(PassSize(tokens=trial.tokens, shares=self.world.size)), trials) for trial in trials
            ]
            chosen, rate = next(pair for pair in zip(trials, rates, strict=True) if pair[1] >= GOOD_ENOUGH * max(rates))
            # Where a step in one pass is best, a longer step should not become two of them.
            tokens = (
                chosen.tokens if chosen.tokens < whole else max(whole, min(LONGER_STEP * whole, chosen.most_tokens))
            )
            tried = ", ".join(f"{trial.tokens:,}" for trial in trials)
            message = f"{rate:,.0f} tokens a second; tried {tried}"
        else:
            tokens, message = LEAST_TOKENS, "a pass of that many did not fit when it was tried"
        self.size = PassSize(tokens=min(self.world.gather(tokens)))
        self._report("info", "micro_batch.chosen", f"{self._owner}{self.size} ({message})")

    def run(self, device: torch.device, attempt: Callable[[PassSize], ResultT], cut: Cut[Any]) -> list[ResultT]:
        """`attempt` with the size as it is, or, when memory runs out, with half of it, and again with half of that.

        `attempt` starts from nothing each time; it is given the same random numbers. Gives the results of all
        processes, by rank.
        """
        with own_random_numbers(self.world, device):
            numbers = random_state(device)
            while True:
                size = replace(self._decided(), shares=self.world.size)
                results = _attempted(self.world, partial(attempt, size))
                fitting = [result for result in results if result is not None]
                if len(fitting) == self.world.size:
                    return fitting
                self.size = self._smaller(self._decided(), cut)
                _release(device)
                restore(numbers, device)

    def _decided(self) -> PassSize:
        assert self.size is not None
        return self.size

    def state(self) -> dict[str, Any]:
        size = self.size
        return {"asked": self.asked, "tokens": size and size.tokens, "rows": size and size.rows}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with the size of the run so far, unless another one is asked for now."""
        if state["asked"] == self.asked and (state["tokens"] or state["rows"]):
            self.size = PassSize(tokens=state["tokens"], rows=state["rows"])

    def _smaller(self, size: PassSize, cut: Cut[Any]) -> PassSize:
        smaller = next_smaller(size, cut, shares=self.world.size)
        if smaller is None:
            raise ModelError(
                f"{self._owner}out of memory in a pass that cannot be cut further: set memory.recompute: true, a "
                "smaller max_length or shorter answers, lora, or base_bits 8 or 4"
            )
        self._report(
            "warning",
            "micro_batch.halved",
            f"{self._owner}out of memory in {size}: the step is done again in {smaller}",
        )
        return smaller


class InferenceSize:
    """Tokens or rows at once without gradients (log-probs, values, scores); halved when memory runs out."""

    def __init__(self, device: torch.device, asked: int | Literal["auto"] = "auto", *, world: World = ALONE) -> None:
        """`asked` is a setting: `auto` for tokens, or a number of rows; `world` are the processes that share the
        passes."""
        tokens = WITHOUT_GRADIENTS.get(device.type, CPU_WITHOUT_GRADIENTS)
        self.size = PassSize(tokens=tokens) if asked == "auto" else PassSize(rows=asked)
        self.world, self._device = world, device

    def each(self, cut: Cut[T], compute: Callable[[T], ResultT]) -> list[ResultT]:
        """`compute` on this process's share of the parts of a cut, which are not kept: a lazy cut has one of them in
        memory at a time. What the processes computed is for the caller to bring together."""
        while True:
            results = list[ResultT]()
            if all(_attempted(self.world, partial(self._compute, cut, compute, results))):
                return results
            smaller = next_smaller(self.size, cut, shares=self.world.size)
            if smaller is None:
                raise ModelError("out of memory while a single sequence is read: allow shorter ones")
            self.size = smaller
            _release(self._device)

    def _compute(self, cut: Cut[T], compute: Callable[[T], ResultT], results: list[ResultT]) -> bool:
        """Compute this process's share into `results`."""
        parts = cut(replace(self.size, shares=self.world.size))
        for place, counts in passes_of(self.world, range(len(parts))):
            result = compute(parts[place])
            if counts:
                results.append(result)
        return True

    def by_length(self, lengths: Sequence[int], compute: Callable[[list[int]], torch.Tensor]) -> torch.Tensor:
        """`compute` on all rows, the longest first so that rows of similar length share a pass, in their own order.

        `lengths` are the rows' tokens, one row or more; `compute` gives a tensor with an entry for each of some rows.
        """
        parts = self.each(
            lambda size: cut(
                range(len(lengths)),
                length=lengths.__getitem__,
                rows=size.rows,
                tokens=size.tokens,
                shares=size.shares,
            ),
            lambda rows: (rows, compute(rows)),
        )
        if self.world.size > 1:
            shares = self.world.gather([(rows, result.cpu()) for rows, result in parts])
            parts = [(rows, result.to(self._device)) for share in shares for rows, result in share]
        results = torch.cat([result for _, result in parts])
        order = torch.tensor([row for rows, _ in parts for row in rows]).argsort()
        return results.index_select(0, send(order, results.device))


def _attempted(world: World, attempt: Callable[[], ResultT]) -> list[ResultT | None]:
    """What `attempt` gives on each process; None where memory runs out."""
    if world.mesh is None:
        return together(world, partial(_unless_full, attempt))
    try:
        result = attempt()
    except torch.OutOfMemoryError as error:
        raise _too_large_for_shards() from error
    return [*world.gather(result)]


def _too_large_for_shards() -> ModelError:
    """The others wait for this process in the middle of a pass: nothing can be done again."""
    return ModelError(
        "out of memory in a pass through sharded weights, which cannot be done again in smaller ones: set a smaller "
        "micro_batch (rows at once in a process), memory.recompute: true, or more processes; --resume goes on"
    )


def _unless_full(attempt: Callable[[], ResultT]) -> ResultT | None:
    """What `attempt` gives; None where memory runs out. It is left then: its error keeps the tensors of a failed pass
    alive."""
    try:
        return attempt()
    except torch.OutOfMemoryError:
        return None


def next_smaller(size: PassSize, cut: Cut[Any], *, shares: int = 1) -> PassSize | None:
    """The next half of a size that cuts into more passes among `shares` processes; None where no size does."""

    def num_passes(size: PassSize) -> int:
        return len(cut(replace(size, shares=shares)))

    now, smaller = num_passes(size), size.halved()
    while smaller is not None and num_passes(smaller) <= now:
        smaller = smaller.halved()
    return smaller


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A pass of at most `tokens`, which had `num_tokens`."""

    tokens: int
    num_tokens: int
    seconds: float
    most_tokens: int
    """Those that would fit, from the memory that these took."""


def step_rate(passes: Sequence[int], trials: Sequence[Trial]) -> float:
    """Tokens a second of a step that is cut into passes of so many tokens, from what trial passes took.

    A pass takes as long as a line between its neighbours says, and never less than the smallest trial: where the host
    is waited for, a rest of a few tokens costs as much as a pass.

    >>> small, large = (Trial(tokens=n, num_tokens=n, seconds=1.0, most_tokens=9_999) for n in (2_048, 4_096))
    >>> step_rate([4_096], [small, large]), step_rate([4_096, 134], [small, large])
    (4096.0, 2115.0)
    """
    points = sorted((trial.num_tokens, trial.seconds) for trial in trials)
    tokens, seconds = zip(*points, strict=True)
    return sum(passes) / max(float(np.interp(passes, tokens, seconds).sum()), 1e-9)


def _trials(
    gauge: Gauge,
    step_tokens: int,
    trial: Callable[[PassSize], int],
    reserved_bytes: int,
    *,
    on_full: Callable[[], None],
    world: World,
) -> Iterator[Trial]:
    """Passes of twice as many tokens each time, while that pays and fits; `on_full` is called where one does not."""
    gauge.release()
    free = gauge.free_bytes()
    room = SHARE_OF_FREE * (free - reserved_bytes)
    tokens, last_rate, is_full = min(max(-(-step_tokens // 8), LEAST_TOKENS), step_tokens), 0.0, False
    while True:
        try:
            trial(PassSize(tokens=tokens))  # compiles, captures, allocates
            start = gauge.seconds()
            num_tokens = trial(PassSize(tokens=tokens))
            seconds = gauge.seconds() - start
        except torch.OutOfMemoryError as error:
            if world.mesh is not None:
                raise _too_large_for_shards() from error
            is_full = True
            break
        most_tokens = int(room * num_tokens / max(free - gauge.free_bytes(), 1))
        if world.mesh is not None:  # all go on together, or none
            slowest, fullest = zip(*world.gather((seconds, most_tokens)), strict=True)
            seconds, most_tokens = max(slowest), min(fullest)
        yield Trial(tokens=tokens, num_tokens=num_tokens, seconds=seconds, most_tokens=most_tokens)
        rate = num_tokens / max(seconds, 1e-9)
        larger = min(2 * tokens, step_tokens)
        if tokens >= step_tokens or rate <= WORTHWHILE * last_rate or larger > most_tokens:
            break
        tokens, last_rate = larger, rate
    if is_full:
        on_full()
    gauge.release()


@contextmanager
def own_random_numbers(world: World, device: torch.device) -> Generator[None]:
    """Within the block each process has random numbers of its own, so that no two rows of a step have the same dropout;
    after it the generators of all are alike again. A single process goes on with those that it has."""
    if world.size == 1:
        yield
        return
    seed = int(torch.randint(2**62, ()))  # the same on all
    with same_random_numbers(device):
        torch.manual_seed(seed_for(seed, "process", world.rank))
        yield


@contextmanager
def same_random_numbers(device: torch.device) -> Generator[None]:
    """After the block the generators are as they were before it."""
    before = random_state(device)
    try:
        yield
    finally:
        restore(before, device)


def random_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), of_device


def restore(state: tuple[torch.Tensor, torch.Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def _release(device: torch.device) -> None:
    """After a pass that did not fit: give back what it held, and the graphs of large passes."""
    release_graphs(device)
    gc.collect()  # the error and the frames that it came through may hold each other, and so the tensors
    if device.type == "cuda":
        torch.cuda.empty_cache()
