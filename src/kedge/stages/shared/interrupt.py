"""Stopping between two steps: Ctrl-C once finishes the step that is under way, saves and stops; twice stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether somebody asked to stop: with Ctrl-C, or by a callback. A loop looks at it after every step."""

    def __init__(self) -> None:
        self.is_asked = False

    def ask(self) -> None:
        self.is_asked = True


@contextmanager
def interruptible(stop: StopRequest, say: Callable[[str], None]) -> Generator[None]:
    """Within, the first Ctrl-C only asks to stop. Outside the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if stop.is_asked:
            raise KeyboardInterrupt
        stop.ask()
        say("stopping after this step, with everything saved; once more to stop at once")

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
