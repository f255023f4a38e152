"""Which walls stand around code that nobody has read: found by trying, once a process, and said.

`bubblewrap` and `namespaces` give a program a machine of its own: it sees Python's libraries, read-only, and a folder
in memory. `limits` leaves it on this machine without the calls and the files that do harm, and is weaker: see
`WEAKNESSES`.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kedge.core.errors import ConfigError
from kedge.rewards.sandboxed import folders as scratch_folders
from kedge.rewards.sandboxed.namespaces import NOBODY, WORK

Layer = Literal["bubblewrap", "namespaces", "limits"]
Isolation = Literal["auto", "bubblewrap", "namespaces", "limits", "any"]
"""`any` is for code of ours: whatever works here, without asking."""
Network = Literal["none", "allowed"]

WEAKNESSES = (
    "it sees which files exist, how large they are and which processes run",
    "the bytes of its files are counted 100 times a second, so that it can pass their bound for a moment",
    "it is the same user as the run, or nobody where that is root",
    "a hole in the list of allowed system calls is not covered by a second wall",
)
"""What `limits` does not prevent, where the kernel has seccomp (with a listener: Linux 5.5) and Landlock."""

_START_S = 30.0
_BOOT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from kedge.rewards.sandboxed import server
sys.path.pop(0)
server.main(int(sys.argv[2]), json.loads(sys.argv[3]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wall:
    """A layer, and what every program inside shares."""

    layer: Layer
    network: Network
    uses_packages: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of trying a layer: `locks` where it works, else `reason`."""

    locks: dict[str, bool]
    reason: str = ""


class Server:
    """A process that starts programs behind a wall (`kedge.rewards.sandboxed.server`)."""

    def __init__(self, wall: Wall) -> None:
        self._scratch = tempfile.mkdtemp(prefix="kedge-sandbox-") if wall.layer == "limits" else ""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                _command(wall, theirs.fileno(), self._scratch),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={},
                cwd="/",
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._line = ours
        self._lock = threading.Lock()
        try:
            self.locks = self._greeting()
        except OSError:
            self.close()
            raise

    def _greeting(self) -> dict[str, bool]:
        self._line.settimeout(_START_S)
        greeting = b""
        while not greeting.endswith(b"\n") and (chunk := self._line.recv(4096)):
            greeting += chunk
        self._line.settimeout(None)
        if not greeting:
            self._process.kill()
            errors = self._process.communicate()[1].decode(errors="replace").strip()
            raise OSError(errors.splitlines()[-1] if errors else "it ended without a word")
        words = json.loads(greeting)
        if "error" in words:
            raise OSError(words["error"])
        return words["locks"]

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(self, order: dict[str, Any], handles: tuple[int, int, int]) -> socket.socket:
        """Begin a program with its stdin, stdout and report; the socket ends it when shut, and says how it ended."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(self._line, [b"x"], [theirs.fileno(), *handles])
        text = json.dumps(order).encode()
        try:
            ours.sendall(f"{len(text)}\n".encode() + text)
        except OSError:
            ours.close()
            raise
        return ours

    def close(self) -> None:
        self._line.close()
        if self._process.stderr is not None:
            self._process.stderr.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._scratch:
            with suppress(OSError):
                for name in os.listdir(self._scratch):
                    scratch_folders.remove(f"{self._scratch}/{name}")
                os.rmdir(self._scratch)


_servers: dict[Wall, Server] = {}
_trials: dict[tuple[Layer, Network], Trial] = {}
_guard = threading.RLock()


def _forget() -> None:
    """The child of a fork has servers that are its parent's."""
    global _guard  # the parent's may be held by a thread that does not exist here
    _guard = threading.RLock()
    _servers.clear()


def _close_all() -> None:
    for server in _servers.values():
        server.close()
    _servers.clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(_close_all)


def server_for(wall: Wall) -> Server:
    """The server behind this wall; it is started when it is first needed, or has died."""
    with _guard:
        server = _servers.get(wall)
        if server is None or not server.is_alive:
            if server is not None:
                server.close()
            server = _servers[wall] = Server(wall)
        return server


def tried(layer: Layer, network: Network = "none") -> Trial:
    """Whether a layer works here: its server is started and has to run a program. Asked once a process."""
    with _guard:
        if (layer, network) not in _trials:
            _trials[layer, network] = _try(layer, network)
        return _trials[layer, network]


def choose(isolation: Isolation, network: Network = "none") -> Layer:
    """The layer that a setting means here. Raises ConfigError where code must not run, with what to do about it."""
    layers: tuple[Layer, ...] = ("bubblewrap", "namespaces", "limits")
    if isolation in layers:
        return _written_out(isolation, network)
    reasons: list[str] = []
    for layer in layers:
        trial = tried(layer, network)
        if trial.reason:
            reasons.append(f"{layer}: {trial.reason}")
        elif isolation == "any" or layer != "limits" or _is_enough(trial):
            return layer
    raise ConfigError(_refusal(reasons))


def describe(layer: Layer, network: Network = "none") -> str:
    """One line on what is used, for people."""
    locks = tried(layer, network).locks
    names = {"calls": "allowed system calls", "files": "Landlock", "nobody": "runs as nobody"}
    names |= {"counts": "files and threads counted as they are made"} if layer == "limits" else {}
    closed = ", ".join(words for name, words in names.items() if locks.get(name))
    missing = ", ".join(words for name, words in names.items() if not locks.get(name))
    line = f"isolation {layer}" + (f" ({closed})" if closed else "") + (f", without: {missing}" if missing else "")
    return line + (f"; not prevented: {'; '.join(WEAKNESSES)}" if layer == "limits" else "")


def _is_enough(trial: Trial) -> bool:
    """Whether `limits` may be taken without being asked for: not for root, and not without its two locks."""
    return os.geteuid() != 0 and trial.locks["calls"] and trial.locks["files"]


def _written_out(layer: Layer, network: Network) -> Layer:
    trial = tried(layer, network)
    if trial.reason:
        raise ConfigError(f"isolation: {layer} does not work here: {trial.reason}. {_ADVICE}")
    if layer == "limits" and network == "none" and not trial.locks["calls"]:
        raise ConfigError(
            "isolation: limits cannot cut a process off from the network here (no seccomp filter on this system), so "
            "unknown code is not run. Run on Linux (x86_64, aarch64), or set `network: allowed` if the whole machine "
            "is a sandbox"
        )
    return layer


_ADVICE = (
    "Install bubblewrap (apt-get install bubblewrap), or allow user namespaces (sysctl user.max_user_namespaces=10000; "
    "on Ubuntu also kernel.apparmor_restrict_unprivileged_userns=0; in Docker --security-opt seccomp=unconfined), or "
    "write `isolation: limits` into the recipe, which is weaker"
)


def _refusal(reasons: list[str]) -> str:
    who = "as root" if os.geteuid() == 0 else "without both seccomp and Landlock"
    listed = "".join(f"\n  {reason}" for reason in reasons)
    head = f"code that nobody has read is not run here: no namespaces, and {who} `limits` must be asked for."
    return f"{head}{listed}\n{_ADVICE}"


def _try(layer: Layer, network: Network) -> Trial:
    if layer != "limits" and sys.platform != "linux":
        return Trial(locks={}, reason="it needs Linux")
    if layer == "bubblewrap" and shutil.which("bwrap") is None:
        return Trial(locks={}, reason="bwrap is not installed")
    try:
        server = server_for(Wall(layer=layer, network=network, uses_packages=False))
        failure = _first_program(server)
    except OSError as error:
        return Trial(locks={}, reason=str(error))
    if failure or (layer != "limits" and not server.locks["calls"]):
        return Trial(locks={}, reason=failure or "this kernel has no seccomp filter for this processor")
    return Trial(locks=server.locks)


def _first_program(server: Server) -> str:
    """Run a program that reads a library; gives why that failed."""
    reader, writer = os.pipe()
    nothing = os.open(os.devnull, os.O_RDWR)
    limits = {"cpu_s": 10, "memory_mb": 512, "file_mb": 1, "disk_mb": 1, "files": 16}
    order = {"token": "", "code": "import colorsys", "checks": [], "limits": limits, "locks": needed(server.locks)}
    try:
        with server.start(order, (nothing, nothing, writer)) as control:
            control.settimeout(_START_S)
            words = control.makefile("rb").read()
        os.close(writer)
        writer = -1
        is_done = b'"end": "done"' in os.read(reader, 4096)
        return "" if is_done else str(json.loads(words or b"{}").get("error") or "a first program did not run")
    finally:
        for handle in (reader, nothing, *([writer] if writer >= 0 else [])):
            os.close(handle)


def needed(locks: dict[str, bool]) -> list[str]:
    """The locks that must close around every program, since they do close here."""
    return [name for name in ("calls", "files", "counts") if locks[name]]


def _command(wall: Wall, line: int, scratch: str) -> list[str]:
    shown = libraries(uses_packages=wall.uses_packages)
    setup = {
        "layer": wall.layer,
        "network": wall.network == "allowed",
        "folders": shown,
        "packages": _packages() if wall.uses_packages else [],
        "scratch": scratch,
    }
    source = str(Path(__file__).parents[2])
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    start = [python, "-I", "-S", "-B", "-X", "utf8", "-c", _BOOT, source, str(line), json.dumps(setup)]
    return [*_bubblewrap(wall, shown, python), *start] if wall.layer == "bubblewrap" else start


def _bubblewrap(wall: Wall, shown: dict[str, str], python: str) -> list[str]:
    spaces = ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    spaces += [] if wall.network == "allowed" else ["--unshare-net"]
    if os.geteuid() == 0:  # real root becomes nobody for each program; a user namespace would know no nobody
        who = [part for name in ("SYS_ADMIN", "SETUID", "SETGID") for part in ("--cap-add", f"CAP_{name}")]
    else:
        who = ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    package = Path(__file__).parent
    own = [package.parent / "__init__.py", package / "__init__.py", package / "sandboxed", Path(python)]
    places = shown | {str(file): os.path.realpath(file) for file in own}
    # Made here, parents are open to nobody; bubblewrap would copy the rights of the real ones.
    parents = dict.fromkeys(str(parent) for place in places for parent in [*Path(place).parents][-2::-1])
    opened = [part for parent in parents for part in ("--dir", parent)]
    binds = [part for place, real in places.items() for part in ("--ro-bind-try", real, place)]
    root = [*opened, *binds, "--dev", "/dev", "--proc", "/proc", "--dir", WORK, "--chdir", "/", "--remount-ro", "/"]
    return [shutil.which("bwrap") or "bwrap", *spaces, *who, *root, "--"]


def libraries(*, uses_packages: bool) -> dict[str, str]:
    """What a program may read of this machine: where it is seen, and where it really is."""
    base = [f"{prefix}/{name}" for prefix in {sys.base_prefix, sys.base_exec_prefix} for name in ("lib", "lib64")]
    standard = [sysconfig.get_path("stdlib")]
    system = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/localtime", "/etc/ld.so.cache"]
    places = [*base, *standard, *system, *(_packages() if uses_packages else [])]
    present = [place for place in places if os.path.exists(place)]
    outer = [place for place in present if not any(place.startswith(f"{other}/") for other in present)]
    return {place: os.path.realpath(place) for place in outer}


def _packages() -> list[str]:
    return list(dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]))
