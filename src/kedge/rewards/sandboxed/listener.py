"""Answers the kernel, which asks before a program makes a file or a thread where no tmpfs and no limit bounds them.

The call waits for the answer (a seccomp listener, `confine.listen_to_calls`), so that no bound is passed, however busy
the machine is and however rarely this process runs.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from kedge.rewards.sandboxed import seccomp
from kedge.rewards.sandboxed.folders import Quota

_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_QUESTION_BYTES, _CALL_AT = 80, 16
_GO_ON = 1


class Listener:
    """The questions of one program."""

    def __init__(self, handle: int, quota: Quota) -> None:
        self.handle, self._quota = handle, quota
        self._thread_call = seccomp.thread_call(os.uname().machine)

    def answer(self, pid: int) -> str:
        """Let the next call go on, or tell which bound it would break: then the program has to be ended."""
        question = bytearray(_QUESTION_BYTES)
        try:
            fcntl.ioctl(self.handle, _RECEIVE, question)
        except OSError:  # a signal came first, and it will ask again; or it has ended
            return ""
        (call,) = struct.unpack_from("i", question, _CALL_AT)
        is_thread = call == self._thread_call
        broken = self._quota.before_thread(pid) if is_thread else self._quota.before_file(pid)
        if broken:
            return broken
        try:
            # That the call goes on is safe here: it is counted, and nothing is read that the program could change.
            fcntl.ioctl(self.handle, _SEND, struct.pack("=QqiI", *struct.unpack_from("Q", question), 0, 0, _GO_ON))
        except OSError:
            if not is_thread:
                self._quota.not_made()
        return ""


def receive(line: socket.socket, quota: Quota) -> Listener | None:
    """The listener that a program hands over before it starts; None where it has none."""
    with line:
        _, handles, _, _ = socket.recv_fds(line, 1, 1)
    return Listener(handles[0], quota) if handles else None
