"""Mutation testing of the loops: mutants of `trainers/` and `stages/`, drawn with a fixed seed, and how many die.

    python tests/mutants.py [--count 300] [--seed 0] [--start 0] [--children 2] [--seconds 7200]

A mutant is one small change inside a function: a comparison or an operator exchanged, a condition negated, a number or
a truth value changed, or a keyword argument left out, which is what a stage that passes on a setting would forget.
Each runs the tests nearest to its file, in a copy of the tree. mutmut, which serves `algorithms/`, cannot run these
tests: they patch functions that it wraps.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from random import Random

ROOT = Path(__file__).parents[1]
PACKAGES = ("src/kedge/trainers", "src/kedge/stages")
MOST_SECONDS = 300
"""Of the tests of one mutant: a loop that does not end is noticed too."""
NEAREST = {
    "src/kedge/trainers/group": ("trainers", "stages/group"),
    "src/kedge/trainers/supervised": ("trainers", "stages/shared", "stages/sft"),
    "src/kedge/trainers": ("trainers", "stages/ppo", "stages/group"),
    "src/kedge/stages/rl/answer": ("stages/best_of_n", "stages/preference", "stages/rl"),
    "src/kedge/stages/rl/round": ("stages/best_of_n", "stages/preference"),
    "src/kedge/stages/rl/divergence": ("stages/evaluate", "stages/best_of_n"),
    "src/kedge/stages/rl": ("stages/rl", "stages/ppo", "stages/group"),
    "src/kedge/stages/shared": ("stages/shared", "stages/sft", "stages/reward", "stages/preference", "recipe"),
}
"""Tests by the beginning of a file's name, the first that fits; those of its own folder where none does."""
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    file: str
    number: int
    """Among the places in the file that can be changed."""
    what: str

    @property
    def tests(self) -> list[str]:
        folders = next((tests for start, tests in NEAREST.items() if self.file.startswith(start)), None)
        own = Path(self.file).relative_to("src/kedge").parent.as_posix()
        checks = (
            ["tests/stages/test_findings.py"] if self.file.endswith("settings.py") and "stages" in self.file else []
        )
        return [f"tests/{folder}" for folder in folders or (own,)] + checks


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """The nodes inside functions that can be changed, in a fixed order, and what is changed there."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                yield from _places(statement)


def _places(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.FunctionDef | ast.JoinedStr | ast.Assert | ast.Raise):
        return  # a function is walked by itself; texts and errors are what people read
    match node:
        case ast.Compare(ops=[op]) | ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPPED:
            yield node, f"{type(op).__name__} exchanged"
        case ast.UnaryOp(op=ast.Not()):
            yield node, "not left out"
        case ast.If() | ast.IfExp() | ast.While():
            yield node, "condition negated"
        case ast.Constant(value=bool() | int() | float()):
            yield node, f"{node.value!r} changed"
        case ast.Call(keywords=[_, *_]):
            for keyword in node.keywords:
                if keyword.arg is not None:
                    yield keyword, f"argument {keyword.arg} left out"
    for child in ast.iter_child_nodes(node):
        yield from _places(child)


def mutated(source: str, number: int) -> str:
    """The source with the change at that place."""
    tree = ast.parse(source)
    node, _ = list(places(tree))[number]
    match node:
        case ast.Compare():
            node.ops = [_swapped(node.ops[0])]
        case ast.BinOp() | ast.BoolOp():
            node.op = _swapped(node.op)
        case ast.UnaryOp():
            tree = _Replace(node, node.operand).visit(tree)
        case ast.If() | ast.IfExp() | ast.While():
            node.test = ast.UnaryOp(op=ast.Not(), operand=copy.deepcopy(node.test))
        case ast.Constant(value=bool()):
            node.value = not node.value
        case ast.Constant():
            node.value = node.value + 1
        case ast.keyword():
            call = next(call for call in ast.walk(tree) if isinstance(call, ast.Call) and node in call.keywords)
            call.keywords.remove(node)
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _swapped(operator: ast.AST) -> ast.AST:
    return SWAPPED[type(operator)]()


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def all_mutants() -> list[Mutant]:
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return [
        Mutant(str(file.relative_to(ROOT)), number, f"line {getattr(node, 'lineno', 0)}: {what}")
        for file in files
        for number, (node, what) in enumerate(places(ast.parse(file.read_text(encoding="utf-8"))))
    ]


def copy_tree(to: Path) -> Path:
    """What the tests read."""
    for name in ("src", "tests", "recipes", "benchmarks", "docs"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "pyproject.toml"):
        shutil.copyfile(ROOT / name, to / name)
    return to


def is_killed(mutant: Mutant, work: Path, more: Sequence[str]) -> bool:
    """Whether a test notices; the tree is as it was afterwards."""
    file = work / mutant.file
    before = file.read_text(encoding="utf-8")
    file.write_text(mutated(before, mutant.number), encoding="utf-8")
    paths = os.pathsep.join(filter(None, (str(work / "src"), os.environ.get("PYTHONPATH"))))
    threads = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    marks = ["-m", "not slow and not gpu and not browser and not vllm"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *marks, *more, *mutant.tests]
    environment = {**os.environ, **threads, "PYTHONPATH": paths}
    try:
        done = subprocess.run(
            command, cwd=work, env=environment, check=False, capture_output=True, timeout=MOST_SECONDS
        )
        return done.returncode not in (0, 5)
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(before, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="leave out so many of those drawn: a cut run goes on")
    parser.add_argument("--children", type=int, default=2, help="mutants at once")
    parser.add_argument("--seconds", type=float, default=7200, help="mutants that were not begun by then do not count")
    parser.add_argument("--at-least", type=float, default=0.85)
    parser.add_argument("--pytest", action="append", default=[], help="one more argument of pytest; may be repeated")
    options = parser.parse_args()
    everything = all_mutants()
    drawn = Random(options.seed).sample(everything, min(options.count, len(everything)))[options.start :]
    print(f"{len(drawn)} of {len(everything):,} mutants of trainers/ and stages/, seed {options.seed}", flush=True)
    until, trees = time.monotonic() + options.seconds, SimpleQueue[Path]()
    outcomes: list[bool] = []

    def run(mutant: Mutant) -> None:
        if time.monotonic() > until:
            return
        work = trees.get()
        killed = is_killed(mutant, work, options.pytest)
        trees.put(work)
        outcomes.append(killed)
        if not killed:
            print(f"alive: {mutant.file} {mutant.what}", flush=True)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.children) as pool:
        for number in range(options.children):
            trees.put(copy_tree(Path(folder) / str(number)))
        list(pool.map(run, drawn))
    share = sum(outcomes) / len(outcomes)
    print(f"mutation score of trainers/ and stages/: {sum(outcomes)} of {len(outcomes)} killed, {share:.1%}")
    return 0 if share >= options.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
