"""Ctrl-C once: finish what is under way, save, stop. Twice: stop at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether somebody asked to stop."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.is_asked = False
        self._say = say

    def ask(self, _number: int, _frame: FrameType | None) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True
        self._say("stopping after this step, with everything saved; once more to stop at once")


@contextmanager
def interruptible(say: Callable[[str], None]) -> Generator[Interrupt]:
    """Within, the first Ctrl-C only asks. Elsewhere than in the main thread nothing changes."""
    interrupt = Interrupt(say)
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = signal.signal(signal.SIGINT, interrupt.ask)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
