"""A generator that the first process of several holds: it samples and takes weights, and all get its answers.

What it raises, all raise. Answers are told where they are waited for, which all processes do in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Final

import torch
from torch import Tensor

from kedge.core.errors import KedgeError
from kedge.core.protocols import Generator
from kedge.core.records import Prompts, Rollouts, to_device
from kedge.core.world import World, once
from kedge.rollout.generators import close_generator, with_sampling
from kedge.rollout.settings import SamplingSettings

_PATIENCE_S: Final = 1.0
"""The others hear so often that answers are still waited for: a long batch is no process that hangs."""


class Told(Future[Rollouts]):
    """Rollouts that the first process has, or will have; to wait for them is a meeting of all processes."""

    def __init__(self, world: World, own: Future[Rollouts] | None, device: torch.device) -> None:
        super().__init__()
        self._world, self._own, self._device = world, own, device

    def result(self, timeout: float | None = None) -> Rollouts:
        self._hear()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._hear()
        return super().exception(timeout)

    def cancel(self) -> bool:
        if self._own is not None:
            self._own.cancel()
        return super().cancel()

    def _hear(self) -> None:
        while not self.done():
            outcome = self._world.same(None if self._own is None else _outcome(self._own))
            if isinstance(outcome, KedgeError):
                self.set_exception(outcome)
            elif outcome is not None:
                self.set_result(to_device(outcome, self._device))


def _outcome(own: Future[Rollouts]) -> Rollouts | KedgeError | None:
    """Rollouts on the CPU, on which any process can read them, or why there are none; None where they are not there
    yet."""
    wait([own], _PATIENCE_S)
    if not own.done():
        return None
    try:
        return to_device(own.result(), "cpu")
    except KedgeError as error:
        return error


class FirstProcess:
    def __init__(
        self,
        world: World,
        own: Generator | None,
        *,
        device: torch.device,
        max_mismatch: float,
        before: Callable[[], None] | None = None,
    ) -> None:
        """`own` is the generator on the first process, and None on the others; rollouts are on `device`. Every process
        does what `before` says, and all have done so before a batch is sampled."""
        self._world, self._own, self._device, self._before = world, own, device, before
        self.max_mismatch = max_mismatch

    def submit(self, prompts: Prompts, seed: int) -> Future[Rollouts]:
        if self._before is not None:
            self._before()
            self._world.gather(None)
        return Told(self._world, None if self._own is None else self._own.submit(prompts, seed), self._device)

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """All processes have the same weights: those of the first are sent."""
        if self._own is not None:
            self._own.load_weights(weights, version)

    def with_sampling(self, sampling: SamplingSettings) -> FirstProcess:
        own = None if self._own is None else with_sampling(self._own, sampling)
        return FirstProcess(self._world, own, device=self._device, max_mismatch=self.max_mismatch, before=self._before)

    def close(self) -> None:
        if self._own is not None:
            close_generator(self._own)


def first_process(
    world: World,
    open_own: Callable[[], Generator],
    *,
    device: torch.device,
    max_mismatch: float,
    before: Callable[[], None] | None = None,
) -> FirstProcess:
    """The generator that the first process opens; where that fails, it fails on all."""
    opened: list[Generator] = []
    once(world, lambda: opened.append(open_own()))
    own = opened[0] if opened else None
    return FirstProcess(world, own, device=device, max_mismatch=max_mismatch, before=before)
