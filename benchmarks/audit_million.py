"""How fast and how lean the audit is on a million pairs (about 1.5 GB), and whether it finds what was planted.

Writes synthetic pairs to a temporary folder, audits them in a child process, prints pairs per second and peak memory.
Exit code 1 when a planted count was not found, or when the peak passes 2 GiB.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

BLOCK_BASES, EXACT, IDENTICAL, SWAPPED, NEAR = 1000, 10, 5, 4, 5
BLOCK = BLOCK_BASES + EXACT + IDENTICAL + SWAPPED + NEAR
LIMIT_MIB = 2048


class Writer:
    """Sentences drawn from a fixed pool, so that texts look like text and are quick to make."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        letters = "etaoinshrdlucmfwyp"
        words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(30_000)]
        self._pool = [" ".join(rng.choices(words, k=rng.randint(7, 15))).capitalize() + "." for _ in range(60_000)]
        self._rng = rng

    def text(self, sentences: int) -> str:
        return " ".join(self._rng.choices(self._pool, k=sentences))

    def pair(self) -> dict[str, str]:
        return {"prompt": self.text(6), "chosen": self.text(9), "rejected": self.text(7)}


def block(writer: Writer) -> Iterator[dict[str, str]]:
    """A thousand pairs that have nothing in common, and a few that are wrong in a known way."""
    bases = [writer.pair() for _ in range(BLOCK_BASES)]
    yield from bases
    yield from bases[:EXACT]
    for _ in range(IDENTICAL):
        yield {**writer.pair(), "rejected": (same := writer.text(8)), "chosen": same}
    for base in bases[20 : 20 + SWAPPED]:
        yield {**base, "chosen": base["rejected"], "rejected": base["chosen"]}
    for base in bases[40 : 40 + NEAR]:
        yield {**writer.pair(), "prompt": base["prompt"] + " Really"}


def write_pairs(path: Path, blocks: int) -> None:
    writer = Writer(0)
    with path.open("w") as file:
        for _ in range(blocks):
            file.writelines(json.dumps(pair) + "\n" for pair in block(writer))


def audit_here(path: str) -> None:
    """The child: audit one file, print the numbers as JSON."""
    from kedge.data.auditing import audit

    start, start_cpu = time.perf_counter(), time.process_time()
    result = audit([path])
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    file = result.files[0]
    counts = {finding.code: finding.evidence["count"] for finding in result.findings}
    numbers = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "items": file.items,
        "prompts": file.prompts,
        "near clusters": file.near_prompts.clusters,
        **{code: counts[code] for code in ("duplicates.exact", "pairs.identical", "pairs.contradictory")},
    }
    print(json.dumps(numbers))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1_000_000, help="how many, rounded up to whole blocks of 1,024")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        audit_here(args.child)
        return 0
    blocks = -(-args.pairs // BLOCK)
    with tempfile.TemporaryDirectory(prefix="kedge-audit-") as folder:
        path = Path(folder) / "pairs.jsonl"
        write_pairs(path, blocks)
        size_mb = path.stat().st_size / 1e6
        print(f"{blocks * BLOCK:,} pairs, {size_mb:,.0f} MB")
        output = subprocess.run([sys.executable, __file__, "--child", str(path)], check=True, stdout=subprocess.PIPE)
    numbers = json.loads(output.stdout)
    planted = {
        "items": blocks * BLOCK,
        "prompts": blocks * (BLOCK_BASES + IDENTICAL + NEAR),
        "near clusters": blocks * NEAR,
        "duplicates.exact": blocks * EXACT,
        "pairs.identical": blocks * IDENTICAL,
        "pairs.contradictory": blocks * 2 * SWAPPED,
    }
    print(f"{numbers['items'] / numbers['seconds']:,.0f} pairs/s ({size_mb / numbers['seconds']:.0f} MB/s)")
    print(f"{numbers['items'] / numbers['cpu_seconds']:,.0f} pairs per second of processor time")
    print(f"{numbers['peak_mib']:,.0f} MiB peak (limit {LIMIT_MIB:,})")
    for name, count in planted.items():
        print(f"{name}: {numbers[name]:,} found, {count:,} planted{'' if numbers[name] == count else '  <-- differs'}")
    is_good = all(numbers[name] == count for name, count in planted.items()) and numbers["peak_mib"] < LIMIT_MIB
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
