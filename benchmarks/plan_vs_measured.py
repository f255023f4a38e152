"""`kedge plan` beside peaks and steps that were measured: how far the plan is off, row by row.

The stages are those of stages_vs_trl.py: the same data, lengths, batches and order. Without an option nothing is run
and no weights are written: the plan reads configurations and data alone, and the measured rows are those of an H200 in
the first table of docs/speed.md. Given a size of passes that the run chose, as its event `micro_batch.chosen` tells it,
the plan is also made with that: what is left is the error of the formulas. With `--probe`, on such a card or on a CPU,
two real steps of random weights correct the plan of each row, and `--measure` runs the stages to their end beside it;
both write to a file, from which `--probed` makes a table. The stages of a way are in one recipe, or with `--alone` in
one each. A CPU wants smaller steps and fewer. Needs: a file of preferences, a tokenizer's folder.

    python benchmarks/plan_vs_measured.py --pairs hh.jsonl.gz --tokenizer FOLDER
    python benchmarks/plan_vs_measured.py --pairs … --tokenizer … --probe rows.jsonl --shapes 0.5b --ways full lora
    python benchmarks/plan_vs_measured.py --pairs … --tokenizer … --probe rows.jsonl --measure --ways trunk
    python benchmarks/plan_vs_measured.py --pairs … --tokenizer … --probe rows.jsonl --measure --shapes 135m \\
        --batch 2 --max-length 128 --steps 8 --iterations 4 --alone
    python benchmarks/plan_vs_measured.py --probed rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kedge.commands.plan.probe import Probed, probe_recipe
from kedge.plan.machines import GIB, Machine, find_machine
from kedge.plan.plan import Correction, reckon, works_of
from kedge.plan.work import StageWork
from kedge.recipe.schema import load_recipe
from peers.stage_case import (
    NEW_TOKENS,
    STAGES,
    StageCase,
    StageName,
    Way,
    config_of,
    stages_of,
    write_data,
    write_inputs,
)
from stages_vs_trl import kedge_side, write_recipe

PAGE = Path(__file__).parents[1] / "docs/speed.md"
WAYS: tuple[Way, ...] = ("full", "lora", "trunk")
STEPS = {"tiny": (4, 2), "135m": (24, 12), "0.5b": (24, 12), "1.5b": (16, 7), "7b": (12, 5)}
"""Of the runs that were measured: of stages that learn from files, and of those that sample."""
LATER_STEPS = {("0.5b", "full"): (20, 8)}
PASSES = {"sft": 11_482, "reward": 27_538, "dpo": 26_244, "grpo": 39_792, "ppo": 8_460}
"""Tokens of a pass that the runs with 0.5B in full chose (for PPO the larger of the two learners')."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of the steps of a recipe."""

    batch: int = 32
    """Conversations or pairs of a step; of the stages that sample, half of the answers."""
    max_length: int = 768
    steps: int | None = None
    iterations: int | None = None
    """None: as many as were measured on an H200."""
    new_tokens: int = NEW_TOKENS
    examples: int = 800
    """Pairs that the data are made of; a tenth of them is held out, and read."""
    alone: bool = False
    """Whether each stage has a recipe of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    shape: str
    stage: StageName
    way: Way
    size: Size = Size()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    row: Row
    step_s: float
    peak_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedRow:
    """GiB of a stage: planned, at the peak of two steps, planned with these, and at the peak of the whole run."""

    row: Row
    machine: str
    planned: float
    two_steps: float
    corrected: float
    pass_tokens: int | None
    whole_run: float | None
    """None where it was not run beside the probe."""
    problem: str


def main() -> None:
    args = parse()
    size = Size(**{field.name: getattr(args, field.name) for field in fields(Size)})
    chosen = [
        Row(shape=shape, stage=stage, way=way, size=size)
        for shape in args.shapes
        for way in args.ways
        for stage in stages_of(way, args.stages)
    ]
    if args.probed:
        show_probed(args.probed)
        return
    with tempfile.TemporaryDirectory() as home:
        write_data(Path(home), args.pairs, args.examples)
        if args.probe:
            probe(chosen, Path(home), args)
        else:
            show_planned(chosen, Path(home), args.tokenizer)


def show_planned(chosen: Sequence[Row], home: Path, tokenizer: str) -> None:
    machine = find_machine("h200")
    print(
        "| shape | stage | way | measured GiB | planned | error | with its passes | measured s/step | planned | error |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    measured, errors = measured_rows(), list[tuple[Row, float]]()
    for row in chosen:
        if row in measured:
            errors.append((row, show(measured[row], home, tokenizer, machine)))
    for name, pairs in (("all rows", errors), ("1.5B alone", [pair for pair in errors if pair[0].shape == "1.5b"])):
        print(f"\n{name}: {sum(abs(error) <= 0.25 for _, error in pairs)} of {len(pairs)} peaks within 25 %")


def show(measured: MeasuredRow, home: Path, tokenizer: str, machine: Machine) -> float:
    """One line of the table; gives the error of the peak."""
    row = measured.row
    work = work_of(row, home, tokenizer, machine)
    memory, time = reckon(work, machine, Correction())
    peak = memory.peak / GIB
    with_passes = ""
    if (row.shape, row.way) == ("0.5b", "full"):
        known, _ = reckon(work, machine, Correction(pass_tokens=PASSES[row.stage]))
        with_passes = f"{known.peak / GIB:.1f} ({known.peak / GIB / measured.peak_gib - 1:+.0%})"
    error, slower = peak / measured.peak_gib - 1, time.step / measured.step_s - 1
    print(
        f"| {row.shape.upper()} | {row.stage} | {row.way} | {measured.peak_gib:.1f} | {peak:.1f} | {error:+.0%} "
        f"| {with_passes} | {measured.step_s:.3f} | {time.step:.3f} | {slower:+.0%} |",
        flush=True,
    )
    return error


def probe(chosen: Sequence[Row], home: Path, args: argparse.Namespace) -> None:
    """Recipes of the rows: two steps of each stage, and with `--measure` all of them."""
    for shape in dict.fromkeys(row.shape for row in chosen):
        write_inputs(home, args.pairs, args.tokenizer, shape, with_reward="ppo" in args.stages)
        write_data(home, args.pairs, args.examples)
        for rows in recipes_of([row for row in chosen if row.shape == shape]):
            append(args.probe, probe_recipe_of(rows, home, is_measured=args.measure))


def recipes_of(rows: Sequence[Row]) -> list[list[Row]]:
    """The stages of a way together, or each alone."""
    ways = [[row for row in rows if row.way == way] for way in dict.fromkeys(row.way for row in rows)]
    return [[row] for row in rows] if rows[0].size.alone else ways


def probe_recipe_of(rows: Sequence[Row], home: Path, *, is_measured: bool) -> list[ProbedRow]:
    machine, cases = find_machine(None), [case_of(row, home) for row in rows]
    file = write_recipe(cases)
    recipe = load_recipe(file)
    found = probe_recipe(file, (), recipe, works_of(recipe, machine), machine, print)
    runs = kedge_side(cases) if is_measured else ()
    whole: Mapping[StageName, float] = {case.stage: run.peak_gib for case, run in runs}
    shutil.rmtree(home / "runs", ignore_errors=True)
    return [probed_row(row, machine, of, whole) for row, of in zip(rows, found, strict=True)]


def probed_row(row: Row, machine: Machine, found: Probed, whole: Mapping[StageName, float]) -> ProbedRow:
    return ProbedRow(
        row=row,
        machine=machine.name,
        planned=found.planned_peak / GIB,
        two_steps=found.measured_peak / GIB,
        corrected=found.corrected_peak / GIB,
        pass_tokens=found.pass_tokens,
        whole_run=whole.get(row.stage),
        problem=found.problem,
    )


def append(file: Path, rows: Sequence[ProbedRow]) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.writelines(f"{json.dumps(asdict(row))}\n" for row in rows)


def show_probed(file: Path) -> None:
    """The probed rows beside the peaks of whole runs: of the same call, or of an H200 on the page."""
    print("| shape | stage | way | a step | measured GiB | planned | error | two steps | corrected | error |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    measured, errors = measured_rows(), list[tuple[float, float]]()
    for line in file.read_text(encoding="utf-8").splitlines():
        probed = read_row(json.loads(line))
        row = probed.row
        on_page = measured[row].peak_gib if row in measured and probed.machine == "h200" else None
        peak = probed.whole_run or on_page
        size = f"{row.size.batch} × {row.size.max_length}{', alone' * row.size.alone}"
        cells = f"| {row.shape.upper()} | {row.stage} | {row.way} | {size} |"
        if probed.problem or not peak:
            print(f"{cells} {probed.problem or 'not run to its end'} |")
            continue
        errors.append((probed.planned / peak - 1, probed.corrected / peak - 1))
        before, after = (f"{error:+.0%}" for error in errors[-1])
        print(
            f"{cells} {peak:.2f} | {probed.planned:.2f} | {before} "
            f"| {probed.two_steps:.2f} | {probed.corrected:.2f} | {after} |"
        )
    for name, which, most in (("planned", 0, 0.25), ("corrected", 1, 0.1)):
        near = sum(abs(pair[which]) <= most for pair in errors)
        print(f"\n{near} of {len(errors)} {name} peaks within {most:.0%}")


def read_row(values: dict[str, Any]) -> ProbedRow:
    row = values.pop("row")
    return ProbedRow(row=Row(**(row | {"size": Size(**row["size"])})), **values)


def measured_rows() -> dict[Row, MeasuredRow]:
    """Those of the page."""
    rows = dict[Row, MeasuredRow]()
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 13 and cells[1].lower() in STEPS and cells[4] != "not run":
            stage: StageName = cells[2]  # pyright: ignore[reportAssignmentType]: the page has no others
            way: Way = cells[3]  # pyright: ignore[reportAssignmentType]
            row = Row(shape=cells[1].lower(), stage=stage, way=way)
            rows[row] = MeasuredRow(row=row, step_s=float(cells[4]), peak_gib=float(cells[6]))
    return rows


def work_of(row: Row, home: Path, tokenizer: str, machine: Machine) -> StageWork:
    """What is planned of a row, over a model of which the configuration alone is there."""
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(tokenizer)
    policy = home / "policy"
    for folder in (policy, home / "reward"):
        config_of(words, row.shape).save_pretrained(folder)
    words.save_pretrained(policy)
    (policy / "model.safetensors").touch()
    (work,) = works_of(load_recipe(write_recipe([case_of(row, home)])), machine)
    return work


def case_of(row: Row, home: Path) -> StageCase:
    """The stage of stages_vs_trl.py."""
    samples, size = row.stage in ("grpo", "ppo"), row.size
    learnt, sampled = LATER_STEPS.get((row.shape, row.way), STEPS[row.shape])
    return StageCase(
        home=str(home),
        stage=row.stage,
        way=row.way,
        shape=row.shape,
        batch=size.batch * (2 if samples else 1),
        steps=(size.iterations or sampled) if samples else (size.steps or learnt),
        skipped=0,
        max_length=size.max_length,
        micro_batch=64,
        new_tokens=size.new_tokens,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, help="the file of preferences that was measured with")
    parser.add_argument("--tokenizer", help="the folder of a tokenizer with a chat template")
    parser.add_argument("--probe", type=Path, metavar="FILE", help="two real steps of each row, appended to a file")
    parser.add_argument("--measure", action="store_true", help="with --probe: run the stages to their end as well")
    parser.add_argument("--probed", type=Path, metavar="FILE", help="a table of what was probed")
    parser.add_argument("--batch", type=int, help="of a step; answers are twice as many (default: %(default)s)")
    parser.add_argument("--max-length", type=int, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="of stages that learn from files (default: those of the H200)")
    parser.add_argument("--iterations", type=int, help="of GRPO and PPO (the same)")
    parser.add_argument("--new-tokens", type=int, help="of an answer (default: %(default)s)")
    parser.add_argument("--examples", type=int, help="pairs that the data are made of (default: %(default)s)")
    parser.add_argument("--alone", action="store_true", help="each stage in a recipe of its own")
    parser.add_argument("--shapes", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.set_defaults(**asdict(Size()))
    args = parser.parse_args()
    if not args.probed and not (args.pairs and args.tokenizer):
        parser.error("without --probed, --pairs and --tokenizer are needed")
    return args


if __name__ == "__main__":
    main()
