"""Kill −9 at any moment: the folder opens, nothing is half there, and the resumed run gives the same numbers.

The writer is a small deterministic computation whose state goes through checkpoints; torch is not needed for that.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from kedge.runs import Run

_WORK = """
import json, os, sys
from pathlib import Path
from kedge.runs import CheckpointSettings, Run, new_manifest

def work(folder, last, on_ready=lambda: None):
    keep = CheckpointSettings(keep=2)
    if (folder / "run.json").exists():
        run = Run.open(folder, for_writing=True, keep=keep)
    else:
        run = Run.create(folder, manifest=new_manifest(name="k", kind="toy", seed=1, settings={}), keep=keep)
    latest = run.checkpoints.latest()
    assert latest is None or not latest.skipped, latest
    done, x = 0, 0.5
    if latest:
        done, x = json.loads((latest.checkpoint.folder / "state.json").read_text())
        assert done == latest.checkpoint.step
    run.resume_at(done)
    on_ready()
    for step in range(done + 1, last + 1):
        x = 3.7 * x * (1 - x)
        run.log({"x": x}, step)
        run.sample({"text": "x" * 500}, step)
        if step % 3 == 0:
            def write(to):
                (to / "state.json").write_text(json.dumps([step, x]))
                (to / "padding.bin").write_bytes(bytes(100_000))
            run.save_checkpoint(step, write, pin="best" if step % 6 == 0 else None)
    run.finish("done")
    run.close()
"""

_WRITER = (
    _WORK
    + """
work(Path(sys.argv[1]), int(sys.argv[2]), on_ready=lambda: print("ready", flush=True))
"""
)

# Each child is killed at one more call into the system than the one before, until one comes through; between two of
# them everything must be in order.
_EVERY_CALL = (
    _WORK
    + """
import itertools, shutil, signal

def kill_at(count):
    calls = itertools.count(1)
    def counted(real):
        def call(*args, **kwargs):
            if next(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return call
    for name in ("open", "write", "pwrite", "ftruncate", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))

root = Path(sys.argv[1])
work(root / "begun", 6)  # two checkpoints, one of them pinned: there is something to replace, to retire and to keep
for count in itertools.count(1):
    folder = root / f"{count:04d}"
    shutil.copytree(root / "begun", folder)
    child = os.fork()
    if child == 0:
        kill_at(count)
        work(folder, 13)
        os._exit(0)
    _, code = os.waitpid(child, 0)
    with Run.open(folder, for_writing=False) as reader:
        steps = [record["step"] for record in reader.metrics.read().records]
        assert steps == list(range(1, len(steps) + 1)), (count, steps)
        assert reader.alterations() == [], count
        for step in reader.checkpoints.steps():
            reader.checkpoints.read(step, check_hashes=True)
        latest = reader.checkpoints.latest()
        assert latest.checkpoint.step >= 6 and not latest.skipped, (count, latest)
        assert latest.checkpoint.step <= max(6, len(steps)), (count, latest, steps)
    if code == 0:
        break
    assert os.WTERMSIG(code) == signal.SIGKILL
    work(folder, 13)
    with Run.open(folder, for_writing=False) as reader:
        x, expected = 0.5, []
        for _ in range(13):
            x = 3.7 * x * (1 - x)
            expected.append(x)
        assert [record["x"] for record in reader.read_metrics()] == expected, count
        assert reader.status == "done"
        assert reader.alterations() == [] and reader.metrics.has_chain, count
        assert reader.checkpoints.steps()[-2:] == [9, 12] and reader.checkpoints.pins() == {"best": 12}
        hidden = [path.name for path in folder.rglob(".*") if path.name != ".lock" and path.suffix != ".chain"]
        assert not hidden, (count, hidden)
    shutil.rmtree(folder)
print(count)
"""
)

Start = Callable[..., "subprocess.Popen[str]"]


def test_killed_at_random_moments_it_still_gives_the_same_numbers(tmp_path: Path, start: Start) -> None:
    folder, last = tmp_path / "run", 1_000_000  # more than any child gets to before it is killed
    pick = random.Random(5)
    for _ in range(6):
        child = start(_WRITER, folder, last)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n", child.communicate()[1]
        time.sleep(pick.uniform(0.0, 0.15))
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL

        reader = Run.open(folder, for_writing=False)
        assert reader.status == "interrupted"
        steps = [record["step"] for record in reader.read_metrics()]
        assert steps == list(range(1, len(steps) + 1))
        if (latest := reader.checkpoints.latest(check_hashes=True)) is not None:
            assert latest.skipped == ()
            assert latest.checkpoint.step <= len(steps)

    last = len(Run.open(folder, for_writing=False).read_metrics()) + 5
    output, errors = start(_WRITER, folder, last).communicate()
    assert output == "ready\n", errors

    x, expected = 0.5, list[float]()
    for _ in range(last):
        x = 3.7 * x * (1 - x)
        expected.append(x)
    reader = Run.open(folder, for_writing=False)
    assert [record["x"] for record in reader.read_metrics()] == expected
    assert [record["step"] for record in reader.read_samples()] == list(range(1, last + 1))
    assert reader.status == "done"
    assert len([event for event in reader.read_events() if event["code"] == "run.resumed"]) == 7


@pytest.fixture
def quick_folder(tmp_path: Path) -> Generator[Path]:
    """In memory where there is such a place: thousands of fsyncs are slow on a disk, and a kill is not a power cut."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def test_killed_at_every_single_call_it_still_gives_the_same_numbers(quick_folder: Path, start: Start) -> None:
    output, errors = start(_EVERY_CALL, quick_folder).communicate()

    assert int(output or 0) > 80, errors  # so many calls were there to be killed at
