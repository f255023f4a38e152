"""What a program in the sandbox costs, a layer at a time: the first one, then one after the other, then four at once.

Prints milliseconds a program that does nothing, so that all of it is the sandbox.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable

from kedge.rewards import isolation
from kedge.rewards.isolation import Layer
from kedge.rewards.sandbox import Job, Limits, run, run_all

LAYERS: tuple[Layer, ...] = ("bubblewrap", "namespaces", "limits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=400)
    count = parser.parse_args().programs
    start = time.perf_counter()
    for _ in range(20):
        subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)
    print(f"{'a bare interpreter':<20}{(time.perf_counter() - start) / 20 * 1e3:8.1f} ms")
    print(f"{'layer':<20}{'start':>11}{'one by one':>14}{'four at once':>16}")
    for layer in LAYERS:
        start = time.perf_counter()
        if reason := isolation.tried(layer).reason:
            print(f"{layer:<20}does not work here: {reason}")
            continue
        started_s = time.perf_counter() - start
        limits, jobs = Limits(isolation=layer), [Job(code="")] * count
        single_s = timed_s(lambda limits=limits, jobs=jobs: [run(job, limits) for job in jobs])
        many_s = timed_s(lambda limits=limits, jobs=jobs: run_all(jobs, limits, workers=4))
        cells = (started_s * 1e3, single_s / count * 1e3, many_s / count * 1e3)
        print(f"{layer:<20}{cells[0]:8.0f} ms{cells[1]:11.1f} ms{cells[2]:13.1f} ms")


def timed_s(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
