"""Every figure that the pages of docs/ still want from a GPU, in one call: as many as there are minutes for.

Each is a command of its own with a limit of minutes; what it prints goes to TO/NAME.log as it comes, its files below
TO. Those that tell seconds have the card to themselves, one after another; neighbours in the list whose numbers do not
depend on who else is at work (tests, loading, studies) run side by side. One that fails or takes too long ends alone. A
figure that is there is passed over, so that several short calls do what one long one does; a study goes on where it
was. `--tiny` makes every command small enough for any machine: so one sees, before a GPU is paid for, that all of them
start and come to an end.

    python benchmarks/gpu_figures.py --list
    python benchmarks/gpu_figures.py --data DATA --tokenizer FOLDER --to FIGURES --minutes 28 --page speed.md plan.md
    python benchmarks/gpu_figures.py --data DATA --tokenizer FOLDER --to FIGURES --only gpu-tests stages-7b
    python benchmarks/gpu_figures.py --data DATA --tokenizer FOLDER --to TRIED --tiny

DATA has pairs/hh-harmless.jsonl.gz and what the studies read; FOLDER is a tokenizer with a chat template. The studies
want the alias smollm2-135m, and TRL's side `pip install 'trl==1.12.0'`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
SEEDS = (1, 2, 3)
GRACE_S = 5.0
"""From asking a command to end until it is made to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    name: str
    page: str
    """Of docs/, where it is wanted."""
    minutes: float
    """At most."""
    command: str
    """After `python`, with {data}, {tokenizer} and {to} in it."""
    tiny: str
    """Said after the command by --tiny; the later of two options holds."""
    is_alone: bool = True
    """It tells seconds, or others wait for it: nothing runs beside it."""


PAIRS = "--pairs {data}/pairs/hh-harmless.jsonl.gz --tokenizer {tokenizer}"
FEW_STEPS = "--steps 12 --skipped 4 --iterations 5 --skipped-iterations 2"
FEWER_STEPS = "--steps 3 --skipped 1 --iterations 2 --skipped-iterations 1"


def stages(name: str, minutes: float, options: str) -> Figure:
    return Figure(
        name=f"stages-{name}",
        page="speed.md",
        minutes=minutes,
        command=f"benchmarks/stages_vs_trl.py {PAIRS} {FEW_STEPS} {options} --journals {{to}}/journals/{name}",
        tiny=f"--shapes tiny --base-bits 16 --batch 4 --max-length 256 {FEWER_STEPS}",
    )


def probed(shape: str, way: str) -> Figure:
    rows = f"--probe {{to}}/probed-{shape}-{way}.jsonl --measure"
    return Figure(
        name=f"probed-{shape}-{way}",
        page="plan.md",
        minutes=3,
        command=f"benchmarks/plan_vs_measured.py {PAIRS} {rows} --shapes {shape} --ways {way}",
        tiny="--shapes tiny",
    )


def gpu_tests() -> str:
    """The files that have tests for a GPU."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return " ".join(str(file.relative_to(ROOT)) for file in files if "mark.gpu" in file.read_text(encoding="utf-8"))


def study(name: str, seed: int, minutes: float, parts: str = "", *, is_alone: bool = False) -> Figure:
    places = f"--data {{data}} --work {{to}}/work/{name}-{seed} --to {{to}}/results"
    return Figure(
        name=f"{name}-{seed}{parts and '-'}{parts.replace(' ', '-')}",
        page=f"results/{name}.md",
        minutes=minutes,
        command=f"benchmarks/studies/{name}.py --seed {seed} {places} {parts and '--only'} {parts}",
        tiny="--size small",
        is_alone=is_alone,
    )


FIGURES: tuple[Figure, ...] = (
    Figure(
        name="gpu-tests",
        page="speed.md",
        minutes=5,
        # By file: what other tests import need not be there on a machine with a GPU.
        command=f"-m pytest -m gpu -n 4 -p no:benchmark -p no:cacheprovider {gpu_tests()}",
        tiny="--collect-only",
        is_alone=False,
    ),
    Figure(
        name="loading-7b",
        page="several-gpus.md",
        minutes=3,
        command="benchmarks/shard_cost.py --shape 7b --load-only",
        tiny="--shape tiny",
        is_alone=False,
    ),
    stages("1.5b-full", 5, "--shapes 1.5b --ways full --stages dpo grpo ppo --who kedge"),
    stages("1.5b-ppo", 4, "--shapes 1.5b --ways lora --stages ppo"),
    stages("7b", 6, "--shapes 7b --ways lora --stages sft dpo ppo --who kedge"),
    stages("7b-4", 4, "--shapes 7b --ways lora --stages sft --who kedge --base-bits 4 --recompute"),
    stages("1.5b-8", 3, "--shapes 1.5b --ways lora --stages sft ppo --who kedge --base-bits 8"),
    *(probed(shape, way) for shape in ("135m", "0.5b", "1.5b") for way in ("full", "lora", "trunk")),
    Figure(
        name="offload",
        page="speed.md",
        minutes=4,
        command="benchmarks/offload.py --shape 0.5b --stages ppo --steps 4 --bits 8 4",
        tiny="--shape tiny --bits",
    ),
    # All seeds of this study have one gold.
    study("overoptimisation", 1, 5, "gold", is_alone=True),
    *(study("verifiable", seed, 8, "ppo rejection") for seed in SEEDS),
    *(study("harmless", seed, 12) for seed in SEEDS),
    *(study("overoptimisation", seed, 12) for seed in SEEDS),
)


def main() -> int:
    args = parse()
    chosen = [
        figure
        for figure in FIGURES
        if (not args.only or figure.name in args.only) and (not args.page or figure.page in args.page)
    ]
    if args.list:
        for figure in chosen:
            beside = "" if figure.is_alone else ", beside others"
            print(f"{figure.name:26} docs/{figure.page:28} at most {figure.minutes:g} minutes{beside}")
        return 0
    args.to.mkdir(parents=True, exist_ok=True)
    keep_seeds(args.to / "results")
    places = {"data": args.data, "tokenizer": args.tokenizer, "to": args.to.resolve()}
    deadline = time.monotonic() + 60 * args.minutes

    def make(figure: Figure) -> str:
        state = run(figure, command_of(figure, places, is_tiny=args.tiny), args.to, deadline)
        print(f"{figure.name:26} {state}", flush=True)
        return state

    states = list[str]()
    for is_alone, figures in groupby(chosen, key=lambda figure: figure.is_alone):
        with ThreadPoolExecutor(1 if is_alone else args.at_once) as pool:
            states += pool.map(make, figures)
    return int(any(not state.startswith("done") for state in states))


def command_of(figure: Figure, places: Mapping[str, Path], *, is_tiny: bool) -> list[str]:
    words = f"{figure.command} {figure.tiny if is_tiny else ''}".split()
    return [sys.executable, *(word.format(**places) for word in words)]


def keep_seeds(results: Path) -> None:
    """The parts of studies that were measured before, for new ones to be added to."""
    for file in (ROOT / "docs" / "results").glob("*/seed-*.json"):
        place = results / file.parent.name / file.name
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)


def run(figure: Figure, command: Sequence[str], to: Path, deadline: float) -> str:
    """Run a figure's command within its minutes and before the deadline; says how it ended."""
    is_done = to / f"{figure.name}.done"
    if is_done.exists():
        return "done before"
    left = min(60 * figure.minutes, deadline - time.monotonic())
    if left <= 0:
        return "no minutes left"
    began = time.monotonic()
    with (to / f"{figure.name}.log").open("a") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, process_group=0)
        try:
            code = child.wait(timeout=left)
        except subprocess.TimeoutExpired:
            end(child)
            return f"took more than {left:.0f} s"
    seconds = time.monotonic() - began
    if code:
        return f"failed with exit code {code} after {seconds:.0f} s: {figure.name}.log"
    is_done.touch()
    return f"done in {seconds:.0f} s"


def end(child: subprocess.Popen[bytes]) -> None:
    """End a command and what it has started, which is all of one process group."""
    for which in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, which)
            child.wait(timeout=GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with pairs/, sft/, eval/ …")
    parser.add_argument("--tokenizer", type=Path, help="the folder of a tokenizer with a chat template")
    parser.add_argument("--to", type=Path, help="where logs and results go")
    parser.add_argument("--minutes", type=float, default=28.0, help="after so many, what runs is ended")
    parser.add_argument("--at-once", type=int, default=6, help="of those that may run side by side")
    parser.add_argument("--only", nargs="+", choices=[figure.name for figure in FIGURES], default=())
    parser.add_argument("--page", nargs="+", choices=sorted({figure.page for figure in FIGURES}), default=())
    parser.add_argument("--tiny", action="store_true", help="all commands in small, for any machine")
    parser.add_argument("--list", action="store_true", help="what there is to measure")
    args = parser.parse_args()
    if not args.list and not (args.data and args.tokenizer and args.to):
        parser.error("--data, --tokenizer and --to are needed")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
