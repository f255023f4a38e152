"""The sandbox against code that loops, forks, hogs, shouts, phones home, writes, kills, exits and crashes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.rewards import isolation, sandbox
from kedge.rewards.isolation import Layer
from kedge.rewards.sandbox import Job, Limits, Outcome, run, run_all
from kedge.rewards.sandboxed import seccomp

LIMITS = Limits(wall_s=20.0, cpu_s=10, memory_mb=256, isolation="any")
LAYERS: list[Layer] = ["bubblewrap", "namespaces", "limits"]


def in_layer(layer: Layer, **bounds: Any) -> Limits:
    if isolation.tried(layer).reason:
        pytest.skip(f"{layer} does not work on this machine: {isolation.tried(layer).reason}")
    return Limits(isolation=layer, **bounds)


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
    assert ending("while True: pass", Limits(isolation="any", wall_s=30, cpu_s=1)) == ("timeout", "stopped: timeout")
    assert ending("import time; time.sleep(60)", Limits(isolation="any", wall_s=0.7)) == ("timeout", "stopped: timeout")
    assert time.monotonic() - start < 20


def test_code_that_leaves_its_pipes_does_not_stay() -> None:
    code = "import os, time\nfor fd in range(1, 64):\n    try: os.close(fd)\n    except OSError: pass\ntime.sleep(60)"
    start = time.monotonic()
    assert ending(code, Limits(isolation="any", wall_s=0.7))[0] == "timeout"
    assert time.monotonic() - start < 20


def test_checks_before_an_endless_one_keep_their_result() -> None:
    outcome = run(Job(code="", checks=("pass", "while True: pass", "pass")), Limits(isolation="any", wall_s=1.0))
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
    outcome = run(Job(code="while True: print('x' * 999)"), Limits(isolation="any", wall_s=30, output_bytes=5000))
    assert (outcome.ending, outcome.stdout) == ("output", ("x" * 999 + "\n") * 5)


def test_files_are_bounded() -> None:
    code = "open('big', 'wb').write(bytes(3 << 20))"
    assert ending(code, Limits(isolation="any", file_mb=2)) == ("exception", "OSError: [Errno 27] File too large")
    assert ending(code, Limits(isolation="any", file_mb=4)) == ("done", "")


def test_a_stricter_machine_stays_strict() -> None:
    code = (
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "from kedge.rewards.sandbox import Job, Limits, run\n"
        "print(run(Job(code=\"open('big', 'wb').write(bytes(2 << 20))\"), Limits(isolation='any', file_mb=4)).detail)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "OSError: [Errno 27] File too large\n"


@pytest.mark.parametrize("layer", LAYERS)
def test_its_own_folder_is_its_own_and_is_deleted(layer: Layer) -> None:
    code = "import os\nopen('a', 'w').write('b')\nprint(os.getcwd(), open('a').read(), dict(os.environ).keys())"
    folder, text, *names = run(Job(code=code), in_layer(layer)).stdout.split()
    assert (text, names) == ("b", ["dict_keys(['LC_CTYPE'])"])  # Python itself sets this one
    assert not Path(folder).exists()


HONEST = """
import asyncio, concurrent.futures, datetime, decimal, fractions, json, os, queue, random, shutil, tempfile, threading
import time, zoneinfo

async def double(x):
    await asyncio.sleep(0.001)
    return 2 * x

async def many():
    return await asyncio.gather(*map(double, range(3)))

print(asyncio.run(many()))
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    print(list(pool.map(str, range(3))))
with tempfile.TemporaryDirectory() as folder:
    open(f"{folder}/a", "w").write("text")
    print(open(shutil.move(f"{folder}/a", f"{folder}/b")).read(), os.listdir(folder))
print(random.Random(3).random(), datetime.date(2024, 2, 29).isoformat(), zoneinfo.ZoneInfo("UTC"))
print(json.dumps({"a": str(decimal.Decimal("0.1") + 1)}), fractions.Fraction(1, 3), time.localtime().tm_year > 2000)
os.mkdir("d"); os.rename("d", "e"); os.rmdir("e")
"""


@pytest.mark.parametrize("layer", LAYERS)
def test_honest_programs_are_not_disturbed(layer: Layer) -> None:
    outcome = run(Job(code=HONEST), in_layer(layer))
    assert (outcome.ending, outcome.detail) == ("done", "")
    assert outcome.stdout.splitlines() == [
        "[0, 2, 4]",
        "['0', '1', '2']",
        "text ['b']",
        "0.23796462709189137 2024-02-29 UTC",
        '{"a": "1.1"} 1/3 True',
    ]


@pytest.mark.parametrize("layer", ["bubblewrap", "namespaces"])
def test_it_runs_as_nobody_and_alone(layer: Layer) -> None:
    code = "import os\nprint(os.getuid(), os.getgid(), os.getpid(), os.getppid(), os.path.exists('/proc/self'))"
    shows_proc = layer == "bubblewrap"  # which cannot be listed or read
    assert run(Job(code=code), in_layer(layer)).stdout == f"65534 65534 1 0 {shows_proc}\n"


@pytest.mark.parametrize("layer", LAYERS)
def test_the_disk_is_bounded(layer: Layer) -> None:
    code = "import time\nfor n in range(100):\n    open(f'f{n}', 'wb').write(bytes(1 << 20))\n    time.sleep(0.005)"
    held = (
        ("disk", "stopped: disk") if layer == "limits" else ("exception", "OSError: [Errno 28] No space left on device")
    )
    assert ending(code, in_layer(layer, disk_mb=8)) == held
    assert ending(code, in_layer(layer, disk_mb=200)) == ("done", "")


MAKING = {
    "folders": "os.mkdir(f'f{n}')",
    "files": "os.close(os.open(f'f{n}', os.O_CREAT | os.O_WRONLY))",
    "symlinks": "os.symlink('x', f'f{n}')",
    "links": "os.link('first', f'f{n}')",
    "unlinked": "held.append(os.open('.', os.O_TMPFILE | os.O_RDWR))",
}


@pytest.mark.parametrize("make", MAKING.values(), ids=MAKING)
def test_no_file_more_than_allowed_is_made_without_a_quota_of_the_disk(make: str) -> None:
    """However rarely the keeper of the program runs: looking now and then would let hundreds pass."""
    code = f"import os\nheld = []\nopen('first', 'w').close()\nfor n in range(3000):\n    {make}\n    os.write(1, b'.')"
    outcome = run(Job(code=code), in_layer("limits", files=16))
    assert (outcome.ending, outcome.stdout) == ("disk", "." * 15)


def test_files_that_were_removed_do_not_count() -> None:
    code = "import os\nfor n in range(100):\n    open('a', 'w').close()\n    os.mkdir('b')\n    os.rmdir('b')"
    assert ending(code, in_layer("limits", files=8)) == ("done", "")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; sys.exit(0)", ("exception", "sys.exit(0)")),
        ("exit()", ("exception", "sys.exit(None)")),
        ("import os; os._exit(0)", ("crash", "ended before its report was whole (exit code 0)")),
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


def test_a_program_that_aborts_has_crashed() -> None:
    outcome = run(Job(code="import os; os.abort()", checks=("pass",)), LIMITS)
    # The first process of a namespace is not reached by its own signals: there the C library crashes instead.
    assert outcome.detail.endswith(("(exit code -6)", "(exit code -11)"))
    assert (outcome.passed, outcome.ending) == ((False,), "crash")


def test_a_program_may_exit_by_itself() -> None:
    assert run(Job(code="print(1)\nexit()"), LIMITS) == Outcome(passed=(), ending="done", detail="", stdout="1\n")
    assert ending("import sys; sys.exit(3)") == ("exception", "sys.exit(3)")


def test_packages_only_where_asked_for() -> None:
    assert run(
        Job(code="import numpy\nprint(numpy.arange(3))", uses_packages=True), Limits(memory_mb=4096, isolation="any")
    ).stdout == ("[0 1 2]\n")


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


@pytest.mark.parametrize("layer", LAYERS)
def test_a_killed_parent_leaves_no_child_behind(tmp_path: Path, layer: Layer) -> None:
    in_layer(layer)
    code = (
        "from kedge.rewards.sandbox import Job, Limits, run\n"
        f"run(Job(code='import time; time.sleep(60)'), Limits(wall_s=60, isolation={layer!r}))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)})
    try:
        until(lambda: any("Seccomp:\t2" in status_of(pid) for pid in descendants(parent.pid)))  # the last of the locks
        family = descendants(parent.pid)
    finally:
        parent.kill()
        parent.wait()
    until(lambda: not any(is_alive(pid) for pid in family))


def status_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    return bool(status_of(pid)) and "State:\tZ" not in status_of(pid)


def descendants(pid: int) -> list[int]:
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*children, *(below for child in children for below in descendants(child))]


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_that_died_is_started_again() -> None:
    assert ending("print(1)") == ("done", "")
    for server in list(isolation._servers.values()):  # pyright: ignore[reportPrivateUsage]
        server._process.kill()  # pyright: ignore[reportPrivateUsage]
        server._process.wait()  # pyright: ignore[reportPrivateUsage]
    assert ending("print(1)") == ("done", "")


def test_no_process_left_is_no_fault_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(wall: isolation.Wall) -> isolation.Server:
        raise OSError("no process left")

    monkeypatch.setattr(isolation, "server_for", fail)
    expected = Outcome(
        passed=(False,), ending="unstarted", detail="the sandbox did not start: no process left", stdout=""
    )
    assert run(Job(code="", checks=("pass",)), LIMITS) == expected


@pytest.mark.parametrize("network", [False, True])
@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_the_filter_is_a_sound_program(architecture: str, network: bool) -> None:
    """Jumps stay inside, else the kernel would not take it, and the last rule refuses what is not named."""
    program = seccomp.filter_program(architecture, pid=42, network=network, own_files=True)
    rules = [program[at : at + 8] for at in range(0, len(program), 8)]
    assert len(program) % 8 == 0
    for index, rule in enumerate(rules):
        jumps = rule[2:4] if rule[0] & 0x07 == 0x05 else b"\0\0"
        assert index + 1 + max(jumps) < len(rules) or index == len(rules) - 1
    assert rules[-1] == b"\x06\x00\x00\x00\x01\x00\x05\x00"


def test_nobody_is_waited_for_who_holds_a_pipe_of_a_program_that_ended() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"left")
    buffer = bytearray()
    sandbox._drain(reader, buffer, 100)  # pyright: ignore[reportPrivateUsage]
    os.close(reader)
    os.close(writer)
    assert buffer == b"left"
