"""Where attacks are tried: a process that first leaves this machine behind, then starts the victims itself.

It takes namespaces of users, processes, mounts, messages and network, in which every folder is read-only but its own;
where there are none and this is root, it becomes another user; else it refuses. Run as a script by `attacks.Arena`:
names of cases come in, one line each, and what harm was seen goes out.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kedge.core.errors import ConfigError
from kedge.rewards import isolation
from kedge.rewards.sandbox import Job, Limits, Outcome, run
from kedge.rewards.sandboxed import kernel
from kedge.rewards.sandboxed.folders import remove

sys.path.insert(0, str(Path(__file__).parent))
from attacks import CASES, PRELUDE, SECRET, Attack

_STRANGER = 65533
_FILES_OF_OTHERS = 64
"""On the same disk, made by the arena and the sandbox themselves while an attack runs."""
_BY_NAME = {case.name: case for case in CASES}


def leave_machine(folder: str) -> str:
    """Enter namespaces, or become another user; says why neither is possible."""
    uid, gid = os.geteuid(), os.getegid()
    flags = kernel.NEW_USER | kernel.NEW_NS | kernel.NEW_PID | kernel.NEW_IPC | kernel.NEW_NET | kernel.NEW_UTS
    try:
        kernel.unshare(flags)
    except OSError as error:
        return _become_stranger(folder, str(error))
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {uid} 1"), ("gid_map", f"1000 {gid} 1")):
        Path(f"/proc/self/{name}").write_text(text)
    _follow(os.fork())
    kernel.keep_mounts_private()
    kernel.set_mount_flags("/", kernel.READ_ONLY)
    kernel.checked(kernel.libc.mount(b"proc", b"/proc", b"proc", 14, None), "proc")
    kernel.mount_tmpfs(folder, "size=512m,mode=755")
    kernel.mount_tmpfs("/dev/shm", "size=64m,mode=1777")
    _follow(os.fork())  # the first process of the namespace buries what is left over
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:  # the loopback device is down at first
        fcntl.ioctl(handle, 0x8914, struct.pack("16sH14s", b"lo", 1, b""))
    return ""


def _follow(child: int) -> None:
    """In the parent, wait for the child and end as it does."""
    if child:
        while True:
            pid, status = os.wait()
            if pid == child:
                os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _become_stranger(folder: str, reason: str) -> str:
    if os.geteuid() != 0:
        return f"no namespaces ({reason}), and no right to become another user"
    try:
        os.chown(folder, _STRANGER, _STRANGER)
        os.setgroups([])
        os.setresgid(_STRANGER, _STRANGER, _STRANGER)
        os.setresuid(_STRANGER, _STRANGER, _STRANGER)
    except OSError as error:
        return f"no namespaces ({reason}), and another user cannot be taken ({error})"
    readable = [sys.executable, os.__file__, __file__]
    if not all(os.access(file, os.R_OK) for file in readable):
        return f"no namespaces ({reason}), and another user cannot read Python"
    return ""


class Victims:
    """What attacks are after: a process, files, listeners, this process itself, and a secret in its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tmp = folder / "victim", folder / "tmp"
        for place in (self.folder, self.tmp):
            place.mkdir(mode=0o750)
        os.environ["TMPDIR"] = str(self.tmp)
        self.file = self.folder / "note"
        self.heard: list[str] = []
        self._listen(str(folder / "listening"))
        self.place = {
            "parent": str(os.getpid()),
            "file": str(self.file),
            "folder": str(self.folder),
            "tmp": str(self.tmp),
            "home": os.path.expanduser("~"),
            "python": os.path.realpath(sys.executable),
            "port": str(self.port),
            "unix": str(folder / "listening"),
            "abstract": f"kedge-arena-{os.getpid()}",
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.renew()

    def renew(self) -> None:
        """Everything as it was before any attack."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process = subprocess.Popen(  # in a group of its own
            [sys.executable, "-I", "-S", "-c", "import time; time.sleep(9999)"], cwd="/", start_new_session=True
        )
        for place in (self.folder, *self.tmp.iterdir()):
            if not place.name.startswith("kedge-sandbox-") or place.name == "kedge-sandbox-none":
                remove(str(place)) if place.is_dir() and not place.is_symlink() else place.unlink()
        self.folder.mkdir(mode=0o750)
        self.file.write_text(SECRET)
        self.file.chmod(0o640)
        os.utime(self.file, (1e9, 1e9))
        self.heard.clear()
        self.place["victim"] = str(self.process.pid)
        self.before = self.state()

    def _listen(self, path: str) -> None:
        tcp = socket.create_server(("127.0.0.1", 0))
        self.port = tcp.getsockname()[1]
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", self.port))
        unix, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        unix.bind(path)
        abstract.bind(f"\0kedge-arena-{os.getpid()}")
        datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        datagram.bind(f"\0kedge-arena-{os.getpid()}-datagram")
        for name, server in (("tcp", tcp), ("unix", unix), ("abstract", abstract)):
            server.listen()
            threading.Thread(target=self._accept, args=(name, server), daemon=True).start()
        for name, server in (("udp", udp), ("datagram", datagram)):
            threading.Thread(target=self._receive, args=(name, server), daemon=True).start()

    def _accept(self, name: str, server: socket.socket) -> None:
        while True:
            server.accept()
            self.heard.append(name)

    def _receive(self, name: str, server: socket.socket) -> None:
        while True:
            server.recv(10)
            self.heard.append(name)

    def state(self) -> dict[str, Any]:
        """All that an attack might change, and that must be as before."""
        assert self.process is not None
        pids = {"victim": self.process.pid, "parent": os.getpid()}
        state: dict[str, Any] = {name: process_state(pid) for name, pid in pids.items()}
        files = {str(path.relative_to(self.folder)): path for path in [self.folder, *self.folder.rglob("*")]}
        state["files"] = {name: file_state(path) for name, path in files.items()}
        state["left in tmp"] = sorted(name for name in os.listdir(self.tmp) if not name.startswith("kedge-sandbox-"))
        state["left in folders"] = [str(path) for path in self.tmp.glob("kedge-sandbox-*/*")]
        return state


def process_state(pid: int) -> str:
    """Alive, its priorities and its limits."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state in "ZXT":
            return f"state {state}"
        priority = kernel.libc.syscall(252 if os.uname().machine == "x86_64" else 31, 1, pid)
        numbers = (os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid), priority)
        core, score = (
            resource.prlimit(pid, resource.RLIMIT_CORE),
            Path(f"/proc/{pid}/oom_score_adj").read_text().strip(),
        )
        return f"alive {numbers} {sorted(os.sched_getaffinity(pid))} {core} {score}"
    except OSError:
        return "gone"


def file_state(path: Path) -> str:
    status = path.lstat()
    times = (status.st_mtime_ns if path.is_file() else 0, status.st_nlink, oct(status.st_mode), status.st_uid)
    attributes = os.listxattr(path) if hasattr(os, "listxattr") else []
    return f"{times} {attributes} {path.read_text() if path.is_file() else ''}"


class Sampler:
    """The most that was on the disk while an attack ran."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._is_over = folder, threading.Event()
        self.peak_mb, self.peak_files = 0.0, 0
        first = os.statvfs(folder)
        self._start = (first.f_bfree, first.f_ffree)
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_over.wait(0.002):
            now = os.statvfs(self._folder)
            self.peak_mb = max(self.peak_mb, (self._start[0] - now.f_bfree) * now.f_frsize / 2**20)
            self.peak_files = max(self.peak_files, self._start[1] - now.f_ffree)


def processes() -> set[int]:
    """Processes that live, in this namespace or of this user."""
    alive: set[int] = set()
    for name in os.listdir("/proc"):
        with suppress(OSError):
            is_ours = name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.geteuid()
            if is_ours and "\nState:\tZ" not in Path(f"/proc/{name}/status").read_text():
                alive.add(int(name))
    return alive


def unprotected(code: str, case: Attack) -> Outcome:
    """The attack without any sandbox, as a plain process."""
    folder = f"{os.environ['TMPDIR']}/kedge-sandbox-none"
    os.mkdir(folder)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder, text=True
    ) as process:
        with suppress(subprocess.TimeoutExpired):
            stdout, _ = process.communicate(timeout=case.limits.get("wall_s", 5.0))
            return Outcome(passed=(), ending="done", detail="", stdout=stdout)
        process.kill()
    return Outcome(passed=(), ending="timeout", detail="", stdout="")


def harm_of(case: Attack, layer: str, victims: Victims) -> str | None:
    """What an attack achieved; None where it was held."""
    code = PRELUDE + case.code
    for name, text in victims.place.items():
        code = code.replace(f"@{name}@", text)
    limits: dict[str, Any] = {"wall_s": 5.0, "memory_mb": 256, **case.limits}
    alive, begin = processes(), time.monotonic()
    with Sampler(victims.tmp) as sampler:
        if layer == "none":
            outcome = unprotected(code, case)
        else:
            job = Job(code=code, stdin=case.stdin, checks=case.checks)
            outcome = run(job, Limits(**limits, isolation=layer))  # pyright: ignore[reportArgumentType]
    took_s = time.monotonic() - begin
    if outcome.ending == "unstarted":
        return f"the sandbox did not start: {outcome.detail}"
    if took_s > limits["wall_s"] + 5:
        return f"it ran for {took_s:.1f} s"
    return _seen(case, outcome, sampler, limits) or _changed(victims, alive)


def _seen(case: Attack, outcome: Outcome, sampler: Sampler, limits: dict[str, Any]) -> str | None:
    if "BROKE" in outcome.stdout:
        return f"it says that it got through: {outcome.stdout.strip()[:100]}"
    if SECRET in outcome.stdout:
        return "it read the secret"
    if any(outcome.passed):
        return "it forged a passed test"
    if len(outcome.stdout) > 1 << 16:
        return f"it printed {len(outcome.stdout):,} characters"
    if sampler.peak_mb > 3 * limits.get("disk_mb", 64) + 64:
        return f"it wrote {sampler.peak_mb:.0f} MB to the disk"
    if sampler.peak_files > limits.get("files", 4096) + _FILES_OF_OTHERS:
        return f"it made {sampler.peak_files:,} files"
    return None


def _changed(victims: Victims, alive: set[int]) -> str | None:
    """Differences from before, given a moment for what is ending."""
    for _ in range(500):
        left = processes() - alive - {victims.process.pid if victims.process else 0}
        left -= {int(task) for task in os.listdir("/proc/self/task")}
        if not left:
            break
        time.sleep(0.004)
    else:
        return f"{len(left)} processes are left"
    if victims.heard:
        return f"it reached a listener: {victims.heard[0]}"
    now = victims.state()
    for name, before in victims.before.items():
        if now[name] != before:
            return f"{name}: {before} became {now[name]}"[:300]
    return None


def main() -> None:
    folder = Path(sys.argv[1])
    problem = leave_machine(str(folder))
    if problem:
        print(json.dumps({"layers": [], "problem": problem}), flush=True)
        return
    os.chdir("/")
    kernel.drop_capabilities()
    kernel.prctl(4, 1)  # as readable to its user as a trainer is
    victims = Victims(folder)
    layers = [layer for layer in ("bubblewrap", "namespaces", "limits") if not isolation.tried(layer).reason]
    print(json.dumps({"layers": layers, "problem": "" if layers else "no layer works in the arena"}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            harm = harm_of(_BY_NAME[order["name"]], order["isolation"] or layers[0], victims)
        except (ConfigError, OSError) as error:
            harm = f"{type(error).__name__}: {error}"
        if harm or order["isolation"] == "none":
            victims.renew()
        print(json.dumps({"harm": harm}), flush=True)


if __name__ == "__main__":
    main()
