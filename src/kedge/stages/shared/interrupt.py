"""Stopping between two steps: Ctrl-C once finishes the step that is under way, saves and stops; twice stops at once.

SIGTERM, which schedulers send, is the same. Where several processes run together, they agree on a stop at the end of a
step: all stop after the same one, whichever of them was asked.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from types import FrameType
from typing import Final

from kedge.core.world import ALONE, World

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether somebody asked to stop: with a signal, or by a callback. A loop looks at it after every step."""

    def __init__(self, world: World = ALONE) -> None:
        self._world = world
        self._is_agreed = False
        self.is_asked_here = False
        """This process was asked; others may not have heard of it yet."""

    @property
    def is_asked(self) -> bool:
        """The same on all processes."""
        return self._is_agreed or (self.is_asked_here and self._world.size == 1)

    def ask(self) -> None:
        self.is_asked_here = True

    def agree(self, asked: Iterable[bool] | None = None) -> None:
        """From here on the processes stop if one of them was asked to; `asked` is what each of them says."""
        self._is_agreed = any(self._world.gather(self.is_asked_here) if asked is None else asked)


@contextmanager
def interruptible(stop: StopRequest, say: Callable[[str], None]) -> Generator[None]:
    """Within, the first Ctrl-C only asks to stop. Outside the main thread nothing changes."""

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if stop.is_asked_here:
            raise KeyboardInterrupt
        stop.ask()
        say("stopping after this step, with everything saved; once more to stop at once")

    with _handled(on_signal):
        yield


@contextmanager
def terminable() -> Generator[None]:
    """Within, SIGTERM ends the run as Ctrl-C does: what is under way is told to have been interrupted."""
    with _handled(signal.default_int_handler):
        yield


@contextmanager
def _handled(on_signal: Callable[[int, FrameType | None], None]) -> Generator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
