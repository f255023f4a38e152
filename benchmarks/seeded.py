"""What benchmarks of a few seeds share: their flags, a folder for each seed, the table and the processor time."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

ScaleT = TypeVar("ScaleT")
ResultT = TypeVar("ResultT")


def run_seeds(
    description: str,
    run_seed: Callable[[int, Path, ScaleT], ResultT],
    table: Callable[[Sequence[int], Sequence[ResultT]], str],
    *,
    whole: ScaleT,
    small: ScaleT,
) -> list[ResultT]:
    """Each seed of the command line at the scale it asks for; prints the table, and gives what was measured."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    started = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        home = args.folder or Path(scratch)
        results = [run_seed(seed, home / str(seed), small if args.small else whole) for seed in args.seeds]
    print(table(args.seeds, results))
    print(f"{(time.process_time() - started) / 60:.1f} minutes of processor time")
    return results
