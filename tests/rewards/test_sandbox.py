"""The sandbox against code that loops, forks, hogs, shouts, phones home, writes, kills, exits and crashes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kedge.core.errors import ConfigError
from kedge.rewards import sandbox, sandbox_child
from kedge.rewards.sandbox import Job, Limits, Outcome, run, run_all

LIMITS = Limits(wall_s=20.0, cpu_s=10, memory_mb=256)


def ending(code: str, limits: Limits = LIMITS) -> tuple[str, str]:
    outcome = run(Job(code=code), limits)
    return outcome.ending, outcome.detail


def test_checks_are_told_apart_by_position() -> None:
    job = Job(code="def f(x):\n    return x + 1", checks=("assert f(1) == 2", "assert f(1) == 3", "assert f(5) == 6"))
    outcome = run(job, LIMITS)
    assert outcome == Outcome(passed=(True, False, True), ending="done", detail="AssertionError: ", stdout="")


def test_a_program_reads_and_prints_unicode() -> None:
    outcome = run(Job(code="print(input()[::-1])", stdin="héllo 日本\n"), LIMITS)
    assert (outcome.ending, outcome.stdout) == ("done", "本日 olléh\n")


def test_stdin_holds_nothing_but_the_input() -> None:
    code = "import os, sys\nos.lseek(0, 0, 0)\nprint(repr(os.read(0, 10**6)))"
    assert run(Job(code=code, stdin="abc"), LIMITS).stdout == "b'abc'\n"


def test_the_guard_of_a_script_opens_only_for_a_program() -> None:
    code = "if __name__ == '__main__':\n    raise ValueError('main')"
    assert run(Job(code=code, checks=("pass",)), LIMITS).passed == (True,)
    assert ending(code) == ("exception", "ValueError: main")


def test_loops_end() -> None:
    start = time.monotonic()
    assert ending("while True: pass", Limits(wall_s=30, cpu_s=1)) == ("timeout", "stopped: timeout")
    assert ending("import time; time.sleep(60)", Limits(wall_s=0.7)) == ("timeout", "stopped: timeout")
    assert time.monotonic() - start < 20


def test_code_that_leaves_its_pipes_does_not_stay() -> None:
    code = "import os, time\nfor fd in range(1, 64):\n    try: os.close(fd)\n    except OSError: pass\ntime.sleep(60)"
    start = time.monotonic()
    assert ending(code, Limits(wall_s=0.7))[0] == "timeout"
    assert time.monotonic() - start < 20


def test_checks_before_an_endless_one_keep_their_result() -> None:
    outcome = run(Job(code="", checks=("pass", "while True: pass", "pass")), Limits(wall_s=1.0))
    assert (outcome.passed, outcome.ending) == ((True, False, False), "timeout")


@pytest.mark.parametrize(
    "code",
    [
        "import os\nfor _ in range(3): os.fork()",  # a real bomb would be one here, should the lock ever break
        "import subprocess\nsubprocess.run(['/bin/true'])",
        "import multiprocessing as m\nm.get_context('fork').Process(target=print).start()",
        "import os\nos.execv('/bin/true', ['true'])",
        "import os\nos.posix_spawn('/bin/true', ['true'], {})",
    ],
)
def test_no_process_is_started(code: str) -> None:
    how, detail = ending(code)
    assert how == "exception"
    assert "[Errno 1] Operation not permitted" in detail


def test_threads_work() -> None:
    code = "import threading\nt = threading.Thread(target=lambda: print(5))\nt.start(); t.join()"
    assert run(Job(code=code), LIMITS).stdout == "5\n"


@pytest.mark.parametrize("code", ["x = bytearray(10**10)", "x = []\nwhile True: x.append('a' * 10**6)"])
def test_memory_is_bounded(code: str) -> None:
    assert ending(code) == ("memory", "MemoryError")


def test_output_is_bounded() -> None:
    outcome = run(Job(code="while True: print('x' * 999)"), Limits(wall_s=30, output_bytes=5000))
    assert (outcome.ending, outcome.stdout) == ("output", ("x" * 999 + "\n") * 5)


def test_files_are_bounded() -> None:
    code = "open('big', 'wb').write(bytes(3 << 20))"
    assert ending(code, Limits(file_mb=2)) == ("exception", "OSError: [Errno 27] File too large")
    assert ending(code, Limits(file_mb=4)) == ("done", "")


def test_a_stricter_machine_stays_strict() -> None:
    code = (
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "from kedge.rewards.sandbox import Job, Limits, run\n"
        "print(run(Job(code=\"open('big', 'wb').write(bytes(2 << 20))\"), Limits(file_mb=4)).detail)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "OSError: [Errno 27] File too large\n"


def test_the_network_is_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5)\nprint('in')"
        assert ending(code) == ("exception", "PermissionError: [Errno 1] Operation not permitted")
        assert run(Job(code=code), Limits(network="allowed")).stdout == "in\n"


@pytest.mark.skipif("files" in sandbox.missing_locks(LIMITS), reason="this kernel has no Landlock")
def test_files_of_others_are_neither_changed_nor_read(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("secret")
    for code in (
        f"open({str(mine)!r}).read()",
        f"open({str(mine)!r}, 'w')",
        f"import os; os.unlink({str(mine)!r})",
        f"import os; os.rename({str(mine)!r}, 'x')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
    ):
        assert ending(code)[1].startswith("PermissionError: [Errno 13]"), code
    assert mine.read_text() == "secret"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_its_own_folder_is_its_own_and_is_deleted() -> None:
    code = "import os\nopen('a', 'w').write('b')\nprint(os.getcwd(), open('a').read(), dict(os.environ).keys())"
    folder, text, *names = run(Job(code=code), LIMITS).stdout.split()
    assert (text, names) == ("b", ["dict_keys(['LC_CTYPE'])"])  # Python itself sets this one
    assert not Path(folder).exists()


@pytest.mark.parametrize("target", ["os.getppid()", "-1", "1"])
def test_signals_reach_nobody_else(target: str) -> None:
    # Signal 0 harms nobody, should the lock ever break.
    assert ending(f"import os\nos.kill({target}, 0)") == (
        "exception",
        "PermissionError: [Errno 1] Operation not permitted",
    )


def test_limits_of_others_cannot_be_set() -> None:
    code = f"import resource\nresource.prlimit({os.getpid()}, resource.RLIMIT_CORE, (0, 0))"
    assert ending(code) == ("exception", "PermissionError: [Errno 1] Operation not permitted")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; sys.exit(0)", ("exception", "sys.exit(0)")),
        ("exit()", ("exception", "sys.exit(None)")),
        ("import os; os._exit(0)", ("crash", "ended before its report was whole (exit code 0)")),
        ("import os; os.abort()", ("crash", "ended before its report was whole (exit code -6)")),
        ("import ctypes; ctypes.string_at(0)", ("crash", "ended before its report was whole (exit code -11)")),
        ("1 / 0", ("exception", "ZeroDivisionError: division by zero")),
        ("raise KeyboardInterrupt", ("exception", "KeyboardInterrupt: ")),
        ("def (", ("exception", "SyntaxError: invalid syntax (<answer>, line 1)")),
        ("f = lambda n: f(n + 1)\nf(0)", ("exception", "RecursionError: maximum recursion depth exceeded")),
        ("import numpy", ("exception", "ModuleNotFoundError: No module named 'numpy'")),
    ],
)
def test_code_that_fails_has_passed_nothing(code: str, expected: tuple[str, str]) -> None:
    outcome = run(Job(code=code, checks=("pass",)), LIMITS)
    assert (outcome.passed, outcome.ending, outcome.detail) == ((False,), *expected)


def test_a_program_may_exit_by_itself() -> None:
    assert run(Job(code="print(1)\nexit()"), LIMITS) == Outcome(passed=(), ending="done", detail="", stdout="1\n")
    assert ending("import sys; sys.exit(3)") == ("exception", "sys.exit(3)")


def test_a_report_without_the_token_is_not_believed() -> None:
    code = """
import os
for fd in range(3, 64):
    try: os.write(fd, b'{"check": 0, "passed": true}\\n{"end": "done", "detail": ""}\\n')
    except OSError: pass
os._exit(0)
"""
    outcome = run(Job(code=code, checks=("pass",)), LIMITS)
    assert (outcome.passed, outcome.ending) == ((False,), "crash")


def test_nonsense_in_the_report_harms_nobody() -> None:
    """The code has found the token, as it can: it may cheat, but not break the run."""
    code = """
import os, sys
frame = sys._getframe()
while 'token' not in frame.f_locals: frame = frame.f_back
token = frame.f_locals['token'].encode()
for line in (b'{', b'[]', b'3', b'{"check": []}', b'{"check": 0}', b'{"end": 5}', b'{"end": []}', b'[' * 9999):
    for fd in range(3, 64):
        try: os.write(fd, token + line + b'\\n')
        except OSError: pass
os._exit(0)
"""
    outcome = run(Job(code=code, checks=("pass",)), LIMITS)
    assert (outcome.passed, outcome.ending) == ((False,), "crash")


def test_packages_only_where_asked_for() -> None:
    assert run(Job(code="import numpy\nprint(numpy.arange(3))", uses_packages=True), Limits(memory_mb=4096)).stdout == (
        "[0 1 2]\n"
    )


def test_order_is_kept_and_work_is_done_side_by_side() -> None:
    code = "import time\nprint({i}, time.monotonic())\ntime.sleep({s})\nprint(time.monotonic())"
    outcomes = run_all([Job(code=code.format(i=i, s=0.9 - 0.4 * i)) for i in range(3)], LIMITS, workers=2)
    rows = [outcome.stdout.split() for outcome in outcomes]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    began, ended = ([float(row[at]) for row in rows] for at in (1, 2))
    assert began[1] < ended[0]
    assert began[2] >= min(ended[:2])  # two at once, not three


def test_it_works_from_another_thread_and_leaves_nothing_open() -> None:
    before, found = os.listdir("/proc/self/fd"), list[Outcome]()
    thread = threading.Thread(target=lambda: found.append(run(Job(code="print(2)"), LIMITS)))
    thread.start()
    thread.join()
    assert found[0].stdout == "2\n"
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_killed_parent_leaves_no_child_behind(tmp_path: Path) -> None:
    code = (
        "from kedge.rewards.sandbox import Job, Limits, run\n"
        "run(Job(code='import time; time.sleep(60)'), Limits(wall_s=60))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)})
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    until(lambda: bool(children.read_text()))
    child = Path(f"/proc/{children.read_text().split()[0]}")
    until(lambda: "Seccomp:\t2" in (child / "status").read_text())  # the last of the locks
    parent.kill()
    parent.wait()
    until(lambda: not child.exists() or "State:\tZ" in (child / "status").read_text())


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_seccomp_alone_cuts_the_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container that forbids namespaces."""
    source = Path(sandbox_child.__file__).read_text()
    cut = "    return libc.unshare(_NEW_USER | _NEW_IPC | (0 if network else _NEW_NET)) == 0\n"
    assert cut in source
    child = tmp_path / "child.py"
    child.write_text(source.replace(cut, "    return False\n"))
    monkeypatch.setattr(sandbox, "_CHILD", child)
    assert ending("import socket; socket.socket()")[1] == "PermissionError: [Errno 1] Operation not permitted"


def test_what_this_kernel_cannot_lock_is_files_at_most() -> None:
    assert set(sandbox.missing_locks(LIMITS)) <= {"files"}


def test_without_any_lock_code_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    source = Path(sandbox_child.__file__).read_text()
    for name in ("_cut_namespaces", "_cut_files", "_cut_calls"):
        source = source.replace(f"def {name}(libc: Any", f"def {name}(*a, **k): return False\ndef old{name}(libc: Any")
    child = tmp_path / "child.py"
    child.write_text(source)
    monkeypatch.setattr(sandbox, "_CHILD", child)
    with pytest.raises(ConfigError, match="cannot cut a process off from the network"):
        ending(f"open({str(marker)!r}, 'w')")
    assert not marker.exists()
    assert sandbox.missing_locks(LIMITS) == ["network", "processes", "files"]
    assert ending(f"open({str(marker)!r}, 'w')", Limits(network="allowed")) == ("done", "")
    assert marker.exists()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise SystemExit('no ctypes here')", "the sandbox did not start: no ctypes here"),
        ("import time; time.sleep(60)", "the sandbox did not start: no sign of life (timeout)"),
    ],
)
def test_an_interpreter_that_does_not_start_is_no_fault_of_the_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, why: str
) -> None:
    child = tmp_path / "child.py"
    child.write_text(code)
    monkeypatch.setattr(sandbox, "_CHILD", child)
    monkeypatch.setattr(sandbox, "_START_S", 1.0)
    expected = Outcome(passed=(False,), ending="unstarted", detail=why, stdout="")
    assert run(Job(code="", checks=("pass",)), LIMITS) == expected


def test_no_process_left_is_no_fault_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert ending("") == (
        "unstarted",
        "the sandbox did not start: [Errno 2] No such file or directory: '/no/such/python'",
    )


def test_the_clock_starts_with_the_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text(Path(sandbox_child.__file__).read_text().replace("import builtins", "import builtins, time", 1))
    child.write_text(child.read_text().replace("    order: dict", "    time.sleep(1.2)\n    order: dict", 1))
    monkeypatch.setattr(sandbox, "_CHILD", child)
    assert run(Job(code="print(1)"), Limits(wall_s=1.0)).stdout == "1\n"


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_the_filter_is_a_sound_program(architecture: str) -> None:
    """Jumps stay inside and the last rule returns, else the kernel refuses the program."""
    program = sandbox_child.filter_program(architecture, pid=42, network=False)
    rules = [program[at : at + 8] for at in range(0, len(program), 8)]
    assert len(program) % 8 == 0
    for index, rule in enumerate(rules):
        jumps = rule[2:4] if rule[0] & 0x07 == 0x05 else b"\0\0"
        assert index + 1 + max(jumps) < len(rules) or index == len(rules) - 1
    assert rules[-1][:2] == b"\x06\x00"
