"""Programs that try to do harm, as data: `attempt(case)` runs one in the sandbox and looks for harm from the outside.

They run in an arena (`arena.py`), a process in namespaces of its own or of another user, whose victims it started
itself: where the sandbox breaks, nothing of this machine is hurt. `@victim@` and the like are filled in there.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import attack_bounds as bounds
import attack_reach as reach

SECRET = "the-secret-of-the-arena"
PRELUDE = """
import ctypes, os, sys, time, signal, resource, struct
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {'ioprio_set': (251, 30), 'bpf': (321, 280), 'perf_event_open': (298, 241), 'userfaultfd': (323, 282),
    'add_key': (248, 217), 'keyctl': (250, 219), 'tkill': (200, 130), 'setpriority': (141, 140), 'mknodat': (259, 33),
    'kcmp': (312, 272), 'open_by_handle_at': (304, 265), 'fanotify_init': (300, 262), 'sync': (162, 81),
    'personality': (135, 92), 'sethostname': (170, 161), 'syslog': (103, 116), 'swapon': (167, 224),
    'reboot': (169, 142), 'init_module': (175, 105), 'acct': (163, 89), 'quotactl': (179, 60),
    'rt_tgsigqueueinfo': (297, 240), 'migrate_pages': (256, 238), 'move_pages': (279, 239), 'mq_open': (240, 180),
    'semget': (64, 190), 'msgget': (68, 186), 'timer_create': (222, 107), 'settimeofday': (164, 170)}
def call(name, *args):
    number = NUMBERS[name][0 if os.uname().machine == 'x86_64' else 1] if isinstance(name, str) else name
    return libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
def broke(what='done'):
    sys.stdout.write('BROKE: %s\\n' % (what,)); sys.stdout.flush()
def each(*actions):
    for action in actions:
        try: action()
        except (OSError, ValueError, MemoryError, AttributeError): pass
"""


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    code: str
    checks: tuple[str, ...] = ()
    """Tests that the program fails: one that passes has been forged."""
    stdin: str = ""
    limits: dict[str, Any] = field(default_factory=dict[str, Any])
    bites: bool = True
    """Whether it does harm where there is no sandbox at all, in the arena."""

    def __str__(self) -> str:
        return self.name


_WITHOUT_BITE = frozenset(
    {
        *(f"file: {name}" for name in ("chown", "device", "open by handle", "list the home", "/dev/mem", "raw disk")),
        *(
            f"kernel: {name}"
            for name in ("setns", "umount", "bpf", "clock", "kernel log", "modules", "swap", "x32 calls")
        ),
        *("file: terminal", "process: execveat", "kernel: capabilities back", "leftover: the folder itself"),
        *("memory: mlock", "memory: mlockall", "priority: ioprio of the user"),
    }
)
"""Attacks that do no harm in the arena even without a sandbox: its kernel, its user or its emptiness prevents them."""


def _simple(group: str, programs: dict[str, str], **limits: Any) -> list[Attack]:
    can_bite = group not in ("staying", "flood")
    named = {f"{group}: {name}": code for name, code in programs.items()}
    return [
        Attack(name, code, limits=limits, bites=can_bite and name not in _WITHOUT_BITE) for name, code in named.items()
    ]


def _all() -> list[Attack]:
    small = {"memory_mb": 256, "wall_s": 5.0, "disk_mb": 32, "files": 1024}
    expected = ("assert f(2) == 918273",)
    forged = [Attack(f"verdict: {name}", code, checks=expected, bites=False) for name, code in bounds.FORGERY.items()]
    nonsense = [Attack(f"report: {name}", code, checks=expected, bites=False) for name, code in bounds.NONSENSE.items()]
    return [
        *_simple("signal", reach.SIGNALS, **small),
        *_simple("priority", reach.PRIORITIES, **small),
        *_simple("file", reach.FILES, **small),
        *_simple("process", reach.PROCESSES, **small),
        *_simple("kernel", reach.KERNEL, **small),
        *_simple("network", reach.NETWORK, **small),
        *_simple("memory", bounds.MEMORY, **small),
        *_simple("disk", bounds.DISK, **small),
        *_simple("leftover", bounds.LEFTOVERS, **small),
        *_simple("staying", bounds.STAYING, wall_s=0.15, cpu_s=1),
        *_simple("flood", bounds.FLOODS, wall_s=0.4, memory_mb=256),
        *forged,
        *nonsense,
    ]


CASES: tuple[Attack, ...] = tuple(_all())


class Arena:
    """The process in which attacks are tried. `problem` says why there is none on this machine."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="kedge-arena-")
        Path(self._folder).chmod(0o755)
        command = [sys.executable, str(Path(__file__).with_name("arena.py")), self._folder]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"KEDGE_KEY": SECRET},
            start_new_session=True,
        )
        self.layers, self.problem = list[str](), "the arena did not start"
        greeting = self._read()
        if greeting is not None:
            self.layers, self.problem = greeting["layers"], greeting["problem"]

    def attempt(self, case: Attack, isolation: str | None) -> str | None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"name": case.name, "isolation": isolation}) + "\n")
        self._process.stdin.flush()
        reply = self._read()
        if reply is None:
            self.close()
            return "the arena, in the place of the trainer, did not survive"
        return reply["harm"]

    def _read(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)


_arenas: list[Arena] = []


def arena() -> Arena:
    """The arena of this process; a new one where an attack has destroyed the last."""
    if not _arenas or (not _arenas[-1].problem and not _arenas[-1].is_alive):
        _arenas.append(Arena())
        atexit.register(_arenas[-1].close)
    return _arenas[-1]


def attempt(case: Attack, isolation: str | None = None) -> str | None:
    """Run an attack in the sandbox: None where it held, else what the attack achieved.

    `isolation` is a layer, the strongest that works here unless given, or `none` for no sandbox at all.
    """
    return arena().problem or arena().attempt(case, isolation)
