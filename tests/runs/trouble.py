"""What a disk, a clock or a person can do to a run folder: each case ends with one clear message, never a traceback.

`CASES` are names, `attempt` tries one and says what went wrong, or None where it held.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from kedge.cli.main import main
from kedge.models.loading.tiny import make_tiny
from kedge.runs.folder import Run

Attempt = Callable[[Path], "str | None"]

RECIPE = """\
kedge: 1
name: prep
model: ./tiny
device: cpu
stages:
  prepare: {kind: data, files: [pairs.jsonl], heldout: 0.2}
"""
TRAINED = """\
kedge: 1
name: prep
model: ./tiny
device: cpu
stages:
  sft: {kind: sft, data: demos.jsonl, batch: 2, max_length: 64, samples: 0, checkpoints: {every: 1}}
"""


def attempt(case: str) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        make_tiny(home / "tiny", hidden=32, layers=1)
        pairs = [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(10)]
        (home / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        said = [{"role": "user", "content": "Say yes"}, {"role": "assistant", "content": "Yes."}]
        (home / "demos.jsonl").write_text(4 * (json.dumps({"messages": said}) + "\n"))
        (home / "a.yaml").write_text(RECIPE)
        return _ATTEMPTS[case](home)


def kedge(*arguments: object) -> tuple[int, str]:
    """The exit code and all that a command prints; a traceback is an error of its own kind."""
    output = StringIO()
    with (
        redirect_stdout(output),
        redirect_stderr(output),
        patch.object(sys, "argv", ["kedge", *map(str, arguments)]),
    ):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException as error:
            return 99, f"traceback: {type(error).__name__}: {error}"
    return code, output.getvalue()


def expect(result: tuple[int, str], code: int, words: str) -> str | None:
    found, output = result
    text = " ".join(output.split())
    if found != code:
        return f"exit code {found} instead of {code}: {text[-300:]}"
    return None if re.search(words, text) else f"no word of {words!r}: {text[-300:]}"


def _run(home: Path, *more: object) -> tuple[int, str]:
    return kedge("run", home / "a.yaml", "--runs", home / "runs", "--no-check", *more)


@contextmanager
def _largest_file(size: int) -> Generator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _limit_of_file_size(size: int) -> Attempt:
    def try_it(home: Path) -> str | None:
        (home / "a.yaml").write_text(TRAINED)
        with _largest_file(size):
            fault = expect(_run(home), 1, r"Cannot write .*: no file may grow so large here \(ulimit -f\)")
        return fault or expect(_run(home, "--resume"), 0, "done:")

    return try_it


def _full_disk(home: Path) -> str | None:
    real = os.write

    def full(handle: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{handle}").endswith(".jsonl"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data)

    with patch.object(os, "write", full):
        fault = expect(_run(home), 1, r"Cannot append to .*events\.jsonl: the disk is full .* then resume the run")
    return fault or expect(_run(home, "--resume"), 0, "done:")


def _read_only(home: Path) -> str | None:
    real = os.mkdir

    def refuse(path: object, *arguments: object, **named: object) -> None:
        if "runs" in str(path):
            raise PermissionError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        real(path, *arguments, **named)  # pyright: ignore[reportArgumentType, reportCallIssue]

    with patch.object(os, "mkdir", refuse):
        return expect(_run(home), 1, r"read-only for this user .* Choose a folder that you may write to")


def _loop_as_run_folder(home: Path) -> str | None:
    (home / "runs").mkdir()
    (home / "runs/prep").symlink_to("prep")
    return expect(_run(home), 1, "symbolic link on the way leads nowhere, or back to itself")


def _loop_as_manifest(home: Path) -> str | None:
    _run(home)
    (home / "runs/prep/run.json").unlink()
    (home / "runs/prep/run.json").symlink_to("run.json")
    for command in ("report", "doctor"):
        if fault := expect(kedge(command, home / "runs/prep"), 2, r"is not a run|symbolic link"):
            return fault
    return expect(_run(home), 1, "already|not empty|symbolic link")


def _loop_inside(home: Path) -> str | None:
    """A link in a circle among the files of a run does no harm."""
    _run(home)
    (home / "runs/prep/prepare/around").symlink_to("around")
    (home / "runs/prep/up").symlink_to("..")
    for result in (_run(home, "--resume"), kedge("report", home / "runs/prep"), kedge("doctor", home / "runs/prep")):
        if fault := expect(result, 0, ""):
            return fault
    return None


def _loop_as_input(home: Path) -> str | None:
    (home / "pairs.jsonl").unlink()
    (home / "pairs.jsonl").symlink_to("pairs.jsonl")
    return expect(_run(home), 2, r"pairs\.jsonl")


def _long_name(home: Path) -> str | None:
    fault = expect(_run(home, "--set", "name=" + "a" * 300), 2, "name: .*at most")
    if fault or (home / "runs").exists():
        return fault or "something was written"
    (home / "a.yaml").write_text(RECIPE.replace("prepare:", "b" * 300 + ":"))
    return expect(_run(home), 2, "at most|100|characters")


def _long_path(home: Path) -> str | None:
    return expect(kedge("run", home / "a.yaml", "--runs", home / ("c" * 300), "--no-check"), 1, "too long")


def _clock_goes_back(home: Path) -> str | None:
    clock = iter(range(2_000_000_000, 0, -1000))
    with patch.object(time, "time", lambda: float(next(clock))):
        if fault := expect(_run(home), 0, "done:"):
            return fault
    records = Run.open(home / "runs/prep/prepare", for_writing=False).read_events()
    times = [record["at"] for record in records]
    if times != sorted(times):
        return f"the times of events go back: {times}"
    result = kedge("report", home / "runs/prep")
    page = (home / "runs/prep/report.html").read_text()
    return expect(result, 0, "") or ("a negative time" if re.search(r"[−-]\d+(\.\d+)? (s|min|h)\b", page) else None)


def _altered(change: Callable[[list[str]], list[str]], words: str) -> Attempt:
    """A journal that is changed after the run: `report` and `doctor` say it, and a resumption refuses."""

    def try_it(home: Path) -> str | None:
        _run(home)
        run = home / "runs/prep"
        journal = run / "prepare/events.jsonl"
        with Run.open(run / "prepare", for_writing=True) as stage:
            for number in range(3):
                stage.event("info", "note", f"note {number}")
        journal.write_text("".join(change(journal.read_text().splitlines(keepends=True))))
        if fault := expect(kedge("doctor", run), 0, f"journals were altered.*{words}"):
            return fault
        if fault := expect(kedge("report", run), 0, ""):
            return fault
        if not re.search(words, (run / "report.html").read_text()):
            return "the report does not say it"
        fault = expect(_run(home, "--resume"), 2, f"altered after they had been written: .*{words}.*events.jsonl.chain")
        (run / "prepare/.events.jsonl.chain").unlink()
        return fault or expect(_run(home, "--resume"), 0, "done before, kept")

    return try_it


def _leftovers(home: Path) -> str | None:
    """What a kill leaves half written is swept when the run goes on."""
    (home / "a.yaml").write_text(TRAINED)
    _run(home)
    stage = home / "runs/prep/sft"
    with Run.open(stage, for_writing=True) as run:
        run.reopen()
    left = [
        "checkpoints/.step-000009.partial-77/state.json",
        ".model.77.partial/config.json",
        ".model.77.old/config.json",
        ".reward-report.json.77.partial",
        "finished/.member-1.77.partial/state.json",
    ]
    for name in left:
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        (stage / name).write_text("{")
    if fault := expect(_run(home, "--resume"), 0, "done:"):
        return fault
    still = [name for name in left if (stage / name).exists()]
    return f"still there: {still}" if still else None


_ATTEMPTS: dict[str, Attempt] = {
    "a limit of file sizes, met by a checkpoint": _limit_of_file_size(80_000),
    "a limit of file sizes, met by a model": _limit_of_file_size(160_000),
    "a full disk": _full_disk,
    "a read-only folder": _read_only,
    "a symlink loop as the run folder": _loop_as_run_folder,
    "a symlink loop as run.json": _loop_as_manifest,
    "a symlink loop inside of a run": _loop_inside,
    "a symlink loop as a data file": _loop_as_input,
    "names of 300 characters": _long_name,
    "a path of 300 characters": _long_path,
    "a clock that goes back": _clock_goes_back,
    "a changed line": _altered(lambda lines: [lines[0].replace("info", "warning"), *lines[1:]], r"events\.jsonl:1:"),
    "a removed line": _altered(lambda lines: [lines[0], *lines[2:]], r"events\.jsonl:2:"),
    "removed last lines": _altered(lambda lines: lines[:-2], r"events\.jsonl: 2 lines are missing"),
    "lines in another order": _altered(lambda lines: [*lines[:-2], lines[-1], lines[-2]], r"events\.jsonl:\d+:"),
    "an emptied journal": _altered(lambda _: [], r"events\.jsonl: \d+ lines are missing from line 1"),
    "half-written files of a killed run": _leftovers,
}
CASES = tuple(_ATTEMPTS)
