"""Mutation testing of the loops: mutants of `trainers/` and `stages/`, drawn with a fixed seed, and how many die.

    python tests/mutants.py [--count 300] [--seed 0] [--work FOLDER]

Works on a copy of the tree, so that the checkout stays as it is. Drawn: one in many of all mutants that mutmut makes,
each function weighing by how much there is to change in it. A mutant that no test runs counts as alive.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[1]
MUTATED = ["src/kedge/trainers/*", "src/kedge/stages/*"]
TESTS = ["tests/trainers", "tests/stages", "tests/recipe", "tests/evaluate"]
CONFIG = """[tool.mutmut]
source_paths = ["src"]
only_mutate = {mutated}
also_copy = ["recipes", "benchmarks", "pyproject.toml"]
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = ["-p", "no:cacheprovider", "-m", "not slow and not gpu and not browser"]
process_isolation = "forkserver"
"""
DEAD = {1, 3, 36, 24, -24, 152, 255, -9, -11}
"""Exit codes of a mutant's tests that mean that it was noticed: a failed test, or a time-out."""


def copy_tree(to: Path) -> None:
    """What the tests read, with the settings of mutmut for these folders."""
    for name in ("src", "tests", "recipes", "benchmarks", "docs"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copyfile(ROOT / name, to / name)
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    others = re.sub(r"\[tool\.mutmut\]\n(?:[^\[\n].*\n|\n)*", "", settings)
    own = CONFIG.format(mutated=json.dumps(MUTATED), tests=json.dumps(TESTS))
    (to / "pyproject.toml").write_text(others + own, encoding="utf-8")


def mutmut(work: Path, *arguments: str, quietly: bool = False) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "mutmut", *arguments]
    done = subprocess.run(command, cwd=work, env=environment, check=False, text=True, stdout=subprocess.PIPE)
    if not quietly and done.returncode:
        print(done.stdout[-4000:])
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return done.stdout


def all_mutants(work: Path) -> list[str]:
    """The names of all mutants, after they were made and each function was matched with the tests that run it."""
    mutmut(work, "run", "--max-children", "2", "no_such_mutant", quietly=True)
    return sorted(exit_codes(work))


def exit_codes(work: Path) -> dict[str, int | None]:
    """By mutant: None where it did not run."""
    codes: dict[str, int | None] = {}
    for file in sorted((work / "mutants").rglob("*.meta")):
        codes |= json.loads(file.read_text(encoding="utf-8"))["exit_code_by_key"]
    return codes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=None, help="keep the copy there, to look at it")
    parser.add_argument("--children", type=int, default=os.cpu_count() or 2, help="tests at once")
    parser.add_argument("--at-least", type=float, default=0.85)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        copy_tree(work)
        names = all_mutants(work)
        drawn = sorted(Random(options.seed).sample(names, min(options.count, len(names))))
        print(f"{len(drawn)} of {len(names):,} mutants of trainers/ and stages/, seed {options.seed}")
        mutmut(work, "run", "--max-children", str(options.children), *drawn, quietly=True)
        codes = exit_codes(work)
        alive = [name for name in drawn if codes[name] not in DEAD]
        for name in alive:
            print(f"alive ({codes[name]}): {name}")
        share = 1 - len(alive) / len(drawn)
        print(f"mutation score of trainers/ and stages/: {len(drawn) - len(alive)} of {len(drawn)} killed, {share:.1%}")
        return 0 if share >= options.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
