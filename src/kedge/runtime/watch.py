"""What processes that run together tell each other outside of their meetings: which error ended one, and who hangs.

Everything goes through the store that they met in. A thread in every process looks there twice a second: asked for it,
it writes down what all threads of its process are doing, and it ends a process that stays behind after the others.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from kedge.core.errors import KedgeError, ProcessError, ProcessLost, RunError
from kedge.core.world import portable

_ERROR, _ALARM, _AT = "kedge/error", "kedge/alarm", "kedge/at"
_PAUSE_S: Final = 0.5
_LAST_LOOK_S: Final = 60.0
"""How long the store may take to answer a last look, on a machine that is busy."""
_ANSWER_S: Final = 5.0
"""How long a process waits for what the others say of themselves."""
_GRACE_S: Final = 20.0
"""How long process 0 may go on after another one has ended the run: a report may have to be written."""
_OTHERS_GRACE_S: Final = 2.0
"""The same for the others, who write nothing."""


class Watch:
    """Of one process. `store` is one of torch's, `stacks` the folder for what its threads are doing."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.stacks: Path | None = None
        self.is_waiting = False
        """In a meeting, in which the others are waited for."""
        self._store = store
        self._own = store.clone()  # a connection of its own: one that waits holds up everybody who shares it
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="kedge-watch", daemon=True)
        self._thread.start()
        # Python ends threads that are inside of torch when it ends itself, and torch answers that with an abort.
        atexit.register(self.close)

    def close(self) -> None:
        """Stop looking: the run has ended well, or this process ends."""
        self._is_over.set()
        self._thread.join(timeout=_LAST_LOOK_S)
        atexit.unregister(self.close)

    def tell(self, error: BaseException) -> None:
        """Let the others know what ended this process; the first error of all is the one that counts."""
        cause = _own_error(error)
        if cause is None:
            return
        with suppress(RuntimeError):  # nobody is there to hear it
            self._store.compare_set(_ERROR, "", pickle.dumps((self.rank, portable(cause))).hex())

    def heard(self, *, wait_s: float = _ANSWER_S) -> BaseException | None:
        """The error that ended another process, in words that name it; None where none has said so."""
        rank_and_error = self._first_error(wait_s)
        if rank_and_error is None or rank_and_error[0] == self.rank:
            return None
        rank, error = rank_and_error
        if isinstance(error, KeyboardInterrupt):
            return error
        if isinstance(error, KedgeError):
            return type(error)(f"process {rank}: {error}")
        return RunError(f"process {rank}: {type(error).__name__}: {error}")

    def hang(self, seconds: float) -> ProcessError:
        """The error that names who keeps the others waiting, after all have written down what they are doing."""
        self._ask_all()
        where = {rank: self._answer(rank) for rank in range(self.size)}
        late = [f"process {rank} ({at or 'it does not answer'})" for rank, at in where.items() if at != "waits"]
        who = " and ".join(late) or "the connection between the processes"
        place = f"; what every process was doing is in {self.stacks}" if self.stacks else ""
        return ProcessError(
            f"{who} kept the others waiting for more than {seconds:g} s{place}. Where that is no fault, raise "
            "placement.timeout; --resume goes on from the last checkpoint"
        )

    def _first_error(self, wait_s: float) -> tuple[int, BaseException] | None:
        until = time.monotonic() + wait_s
        while True:
            try:
                if self._store.check([_ERROR]):
                    return pickle.loads(bytes.fromhex(self._store.get(_ERROR).decode()))
            except RuntimeError:  # the store is gone, with the process that held it
                return None
            if time.monotonic() >= until:
                return None
            time.sleep(0.05)

    def _ask_all(self) -> None:
        self._store.set(_ALARM, str(self.rank))
        until = time.monotonic() + _ANSWER_S
        while time.monotonic() < until and not self._store.check([f"{_AT}/{rank}" for rank in range(self.size)]):
            time.sleep(0.05)

    def _answer(self, rank: int) -> str:
        key = f"{_AT}/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _look(self) -> None:
        """The thread: answers an alarm once, and ends the process some time after the run has ended elsewhere."""
        has_answered, ends_at = False, float("inf")
        while not self._is_over.wait(_PAUSE_S):
            try:
                if not has_answered and self._own.check([_ALARM]):
                    self._write_stacks()
                    self._own.set(f"{_AT}/{self.rank}", "waits" if self.is_waiting else "is at work elsewhere")
                    has_answered = True
                is_ending = self._own.check([_ERROR])
            except RuntimeError:
                is_ending = True
            if is_ending:
                ends_at = min(ends_at, time.monotonic() + (_OTHERS_GRACE_S if self.rank else _GRACE_S))
            if time.monotonic() > ends_at:
                os._exit(ProcessLost.exit_code)

    def _write_stacks(self) -> None:
        if self.stacks is None:
            return
        with suppress(OSError):  # a full disk is no reason to keep silent about who hangs
            self.stacks.mkdir(parents=True, exist_ok=True)
            with (self.stacks / f"rank-{self.rank}.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)


def _own_error(error: BaseException) -> BaseException | None:
    """What this process did wrong; None where it only ends because of others.

    An error may be in the midst of being handled when the process finds the others gone: then that error is the cause.
    """
    current: BaseException | None = error
    while isinstance(current, ProcessLost | ProcessError):
        behind = current.__cause__ or current
        current = behind.__context__
    return current or (error if isinstance(error, ProcessError) else None)
