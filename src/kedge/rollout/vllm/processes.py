"""A generator that the first process of several holds: it samples and takes weights, and all get its answers.

What it raises, all raise. Answers are told where they are waited for, which all processes do in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future

from torch import Tensor

from kedge.core.errors import KedgeError
from kedge.core.protocols import Generator
from kedge.core.records import Prompts, Rollouts, to_device
from kedge.core.world import World
from kedge.rollout.generators import close_generator, with_sampling
from kedge.rollout.settings import SamplingSettings


class Told(Future[Rollouts]):
    """Rollouts that the first process has, or will have; `result` is a meeting of all processes."""

    def __init__(self, world: World, own: Future[Rollouts] | None) -> None:
        super().__init__()
        self._world, self._own = world, own

    def result(self, timeout: float | None = None) -> Rollouts:
        if not self.done():
            outcome = self._world.same(None if self._own is None else _outcome(self._own.result))
            assert outcome is not None
            if isinstance(outcome, KedgeError):
                self.set_exception(outcome)
            else:
                self.set_result(outcome)
        return super().result(timeout)


class FirstProcess:
    def __init__(self, world: World, own: Generator | None, *, max_mismatch: float) -> None:
        self._world, self._own = world, own
        self.max_mismatch = max_mismatch

    def submit(self, prompts: Prompts, seed: int) -> Future[Rollouts]:
        return Told(self._world, None if self._own is None else self._own.submit(prompts, seed))

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        if self._own is not None:
            self._own.load_weights(weights, version)

    def with_sampling(self, sampling: SamplingSettings) -> FirstProcess:
        own = None if self._own is None else with_sampling(self._own, sampling)
        return FirstProcess(self._world, own, max_mismatch=self.max_mismatch)

    def close(self) -> None:
        if self._own is not None:
            close_generator(self._own)


def first_process(world: World, open_own: Callable[[], Generator], max_mismatch: float) -> FirstProcess:
    """The generator that the first process opens; where that fails, it fails on all."""
    own, failure = None, None
    if world.rank == 0:
        try:
            own = open_own()
        except KedgeError as error:
            failure = error
    failure = world.same(failure)
    if failure is not None:
        raise failure
    return FirstProcess(world, own, max_mismatch=max_mismatch)


def _outcome(result: Callable[[], Rollouts]) -> Rollouts | KedgeError:
    """Rollouts on the CPU, on which any process can read them, or why there are none."""
    try:
        return to_device(result(), "cpu")
    except KedgeError as error:
        return error
