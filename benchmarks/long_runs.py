"""How long `kedge report`, `doctor`, `watch` and `compare` take on a run of 100,000 steps, and how much memory.

Writes the folder of a synthetic PPO run (60 metrics a step, four samples every ten steps, an event every hundred) and
runs each command on it as a user would, in a process of its own. Exit code 1 when one takes longer than 3 s or more
than 300 MB, or imports torch.

    python benchmarks/long_runs.py [--steps 100000] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.runs.folder import Run
from kedge.runs.journal import Chain
from kedge.runs.manifest import new_manifest
from kedge.testing.streams import PPO_SETTINGS, ppo_metrics

STEPS, LIMIT_S, LIMIT_MB = 100_000, 3.0, 300.0
_EXTRA = 28
"""Metrics beside those of `kedge.testing.streams`: shares of reward parts, members and length buckets."""
_SAMPLE_EVERY, _SAMPLES, _EVENT_EVERY, _GOLD_EVERY = 10, 4, 100, 10
_CODES = ("kl.over_target", "policy.gradient_spike", "answers.longer", "checkpoint.saved")
_BEGIN = 1_750_000_000.0


def write_run(folder: Path, steps: int, *, seed: int = 0) -> Path:
    """The folder of a finished PPO run with so many steps."""
    manifest = new_manifest(name=folder.name, kind="ppo", seed=1, settings={**PPO_SETTINGS, "iterations": steps})
    with Run.create(folder, manifest=manifest) as run:
        _write(folder / "metrics.jsonl", _metrics(steps, seed))
        _write(folder / "samples.jsonl", _samples(steps, seed))
        _write(folder / "events.jsonl", _events(steps))
        run.finish("done")
    return folder


def _write(path: Path, records: Iterator[dict[str, Any]]) -> None:
    """A journal with its chain, as a run writes it: whether it was altered is checked by most readers."""
    lines = [json.dumps(record).encode() for record in records]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    chain = Chain(path)
    chain.open(lines)
    chain.close()


def _metrics(steps: int, seed: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed + 1)
    for record in ppo_metrics(steps, seed=seed):
        step = int(record.pop("step"))
        if step % _GOLD_EVERY:
            del record["gold/mean"]
        extra = {f"reward/part_{number:02d}": rng.gauss(number, 0.3) for number in range(_EXTRA)}
        yield {"step": step, "at": round(_BEGIN + 1.9 * step, 3), **record, **extra}


def _samples(steps: int, seed: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed + 2)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(5000)]
    prompts = [" ".join(rng.choices(words, k=30)) for _ in range(2000)]
    for step in (1, *range(_SAMPLE_EVERY, steps + 1, _SAMPLE_EVERY)):
        for number in range(_SAMPLES):
            yield {
                "step": step,
                "at": round(_BEGIN + 1.9 * step, 3),
                "number": number,
                "prompt": f"<|im_start|>user\n{rng.choice(prompts)}<|im_end|>\n<|im_start|>assistant\n",
                "answer": " ".join(rng.choices(words, k=100)) + "<|im_end|>",
                "reward": rng.gauss(1, 0.5),
                "kl": rng.gauss(4, 1),
                "length": 130,
                "finished": True,
                "gold": None,
            }


def _events(steps: int) -> Iterator[dict[str, Any]]:
    for number, step in enumerate(range(_EVENT_EVERY, steps + 1, _EVENT_EVERY)):
        code = _CODES[number % len(_CODES)]
        level = "info" if code == "checkpoint.saved" else "warning"
        evidence = {"value": step / 7, "cause": "The cause of it.", "advice": "Lower `actor.lr`."}
        message = f"What {code} says of step {step}, in a sentence of the usual length, with a number or two."
        common = {"step": step, "at": round(_BEGIN + 1.9 * step, 3)}
        yield {**common, "level": level, "code": code, "message": message, "evidence": evidence}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`seconds` by the clock, `busy_s` of the processor (other work on the machine does not count), and the peak."""

    seconds: float
    busy_s: float
    peak_mb: float
    imports_torch: bool
    exit_code: int


# The peak is read by the child itself: what the kernel counts for it begins with the size of the process that made it.
_CHILD = """import re, sys
from kedge.cli.main import main
try:
    main()
finally:
    sys.stdout.flush()
    peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1)
    print(peak, "torch" if "torch" in sys.modules else "no torch", file=sys.__stderr__)
"""


def measure(arguments: list[str], *, on_terminal: bool = False) -> Measured:
    """One command in a process of its own, with the interpreter's start and all imports."""
    with tempfile.TemporaryFile() as errors, _screen(on_terminal) as screen:
        begun = time.perf_counter()
        child = subprocess.Popen([sys.executable, "-c", _CHILD, *arguments], stdout=screen, stderr=errors)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - begun
        child.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        peak, _, torch = errors.read().decode().strip().splitlines()[-1].partition(" ")
    return Measured(
        seconds=seconds,
        busy_s=usage.ru_utime + usage.ru_stime,
        peak_mb=int(peak) / 1024,
        imports_torch=torch != "no torch",
        exit_code=child.returncode,
    )


@contextmanager
def _screen(is_terminal: bool) -> Generator[int]:
    """Where the command writes: nowhere, or to a terminal whose text is read and thrown away."""
    if not is_terminal:
        yield subprocess.DEVNULL
        return
    ours, theirs = pty.openpty()
    reader = threading.Thread(target=_drain, args=(ours,), daemon=True)
    reader.start()
    try:
        yield theirs
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)


def _drain(terminal: int) -> None:
    with suppress(OSError):  # it is gone when the command has ended
        while os.read(terminal, 65536):
            pass


def main() -> int:
    parser = argparse.ArgumentParser(description="Seconds and memory of the reading commands on a long run.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--folder", type=Path, help="where the two runs are written, or lie from an earlier time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        home: Path = options.folder or Path(temporary)
        runs = [home / "long-a", home / "long-b"]
        for seed, run in enumerate(runs):
            if not run.exists():
                write_run(run, options.steps, seed=seed)
        size = (runs[0] / "metrics.jsonl").stat().st_size / 1e6
        print(f"{options.steps:,} steps, metrics.jsonl of {size:.0f} MB")
        return _table(runs)


def _table(runs: list[Path]) -> int:
    one, two = (str(runs[0].parent / name) for name in ("compare-one.html", "compare-two.html"))
    commands = {
        "report": ["report", str(runs[0])],
        "doctor": ["doctor", str(runs[0])],
        "watch": ["watch", str(runs[0])],
        "watch, on a terminal": ["watch", str(runs[0])],
        "compare": ["compare", str(runs[0]), "--out", one, "--force"],
        "compare, two such runs": ["compare", str(runs[0]), str(runs[1]), "--out", two, "--force"],
    }
    print(f"{'command':34}{'seconds':>9}{'busy':>8}{'MB':>7}")
    failures = 0
    for name, arguments in commands.items():
        result = measure(arguments, on_terminal="terminal" in name)
        is_fine = (
            result.exit_code == 0
            and result.seconds <= LIMIT_S
            and result.peak_mb <= LIMIT_MB
            and not result.imports_torch
        )
        failures += not is_fine
        note = "  imports torch" if result.imports_torch else ""
        note += f"  failed with exit code {result.exit_code}" if result.exit_code else ""
        print(f"{name:34}{result.seconds:9.2f}{result.busy_s:8.2f}{result.peak_mb:7.0f}{note}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
