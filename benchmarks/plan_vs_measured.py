"""`kedge plan` beside peaks and steps that were measured on an H200: how far the plan is off, row by row.

The stages are those of stages_vs_trl.py: the same data, lengths, batches and order. Nothing is run and no weights are
written: the plan reads configurations and data alone. Measured rows are those of the first table of docs/speed.md and
the ones below. Given a size of passes that the run chose, as its event `micro_batch.chosen` tells it, the plan is also
made with that: what is left is the error of the formulas. With `--probe`, on such a card, each row is corrected by two
real steps of random weights. Needs: a file of preferences, a tokenizer's folder.

    python benchmarks/plan_vs_measured.py --pairs hh.jsonl.gz --tokenizer FOLDER
    python benchmarks/plan_vs_measured.py --pairs … --tokenizer … --probe --shapes 0.5b --stages sft reward dpo ppo
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kedge.commands.plan.probe import probe_recipe
from kedge.plan.machines import GIB, Machine, find_machine
from kedge.plan.plan import Correction, reckon, works_of
from kedge.recipe.schema import load_recipe
from peers.stage_case import SHAPES, STAGES, StageCase, StageName, Way, config_of, write_data, write_inputs
from stages_vs_trl import stage_of

PAGE = Path(__file__).parents[1] / "docs/speed.md"
PAIRS = 800
FITTED_TIMES = ("135m", "0.5b")
"""Shapes of the rows that the shares of time were chosen by; no constant of the memory was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    shape: str
    stage: StageName
    way: Way
    step_s: float
    peak_gib: float
    steps: int
    pass_tokens: int | None = None
    """Tokens of a pass that the run chose, where its events were kept."""
    base_bits: int = 16
    recompute: bool = False


LATER = (
    MeasuredRow(shape="0.5b", stage="sft", way="full", step_s=0.063, peak_gib=15.07, steps=20, pass_tokens=11_482),
    MeasuredRow(shape="0.5b", stage="reward", way="full", step_s=0.092, peak_gib=24.27, steps=20, pass_tokens=27_538),
    MeasuredRow(shape="0.5b", stage="dpo", way="full", step_s=0.098, peak_gib=23.06, steps=20, pass_tokens=26_244),
    MeasuredRow(shape="0.5b", stage="grpo", way="full", step_s=0.482, peak_gib=34.52, steps=8, pass_tokens=39_792),
    MeasuredRow(shape="0.5b", stage="ppo", way="full", step_s=1.257, peak_gib=22.56, steps=8, pass_tokens=8_460),
)
"""Measured after the table, with the sizes of their passes (for PPO the larger of the two learners')."""


def main() -> None:
    args = parse()
    machine = find_machine(None if args.probe else "h200")
    chosen_rows = [row for row in rows() if row.shape in args.shapes and row.stage in args.stages]
    if args.probe:
        probe(chosen_rows, args.pairs, args.tokenizer, machine)
        return
    print(
        "| shape | stage | way | measured GiB | planned | error | with its passes | measured s/step | planned | error |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    errors = list[tuple[MeasuredRow, float]]()
    with tempfile.TemporaryDirectory() as home:
        write_data(Path(home), args.pairs, PAIRS)
        for row in chosen_rows:
            errors.append((row, show(row, Path(home), args.tokenizer, machine)))
    for name, chosen in (("all rows", errors), ("1.5B alone", [pair for pair in errors if pair[0].shape == "1.5b"])):
        near = sum(abs(error) <= 0.25 for _, error in chosen)
        print(f"\n{name}: {near} of {len(chosen)} peaks within 25 %")


def show(row: MeasuredRow, home: Path, tokenizer: str, machine: Machine) -> float:
    """One line of the table; gives the error of the peak."""
    recipe = load_recipe(write_recipe(row, home, tokenizer))
    (work,) = works_of(recipe, machine)
    memory, time = reckon(work, machine, Correction())
    peak = memory.peak / GIB
    with_passes = ""
    if row.pass_tokens:
        known, _ = reckon(work, machine, Correction(pass_tokens=row.pass_tokens))
        with_passes = f"{known.peak / GIB:.1f} ({known.peak / GIB / row.peak_gib - 1:+.0%})"
    error, slower = peak / row.peak_gib - 1, time.step / row.step_s - 1
    bits = f", {row.base_bits} bits" if row.base_bits != 16 else ""
    print(
        f"| {row.shape.upper()} | {row.stage} | {row.way}{bits}{', recompute' if row.recompute else ''} "
        f"| {row.peak_gib:.1f} | {peak:.1f} | {error:+.0%} | {with_passes} "
        f"| {row.step_s:.3f} | {time.step:.3f} | {slower:+.0%} |",
        flush=True,
    )
    return error


def probe(chosen: Sequence[MeasuredRow], pairs: Path, tokenizer: str, machine: Machine) -> None:
    """Each row with two real steps on this machine, beside the peak of the whole run that was measured."""
    print("| shape | stage | way | measured GiB | planned | two steps | corrected | error |")
    print("|---|---|---|---|---|---|---|---|")
    near = 0
    for shape in dict.fromkeys(row.shape for row in chosen):
        with tempfile.TemporaryDirectory() as home:
            write_inputs(Path(home), pairs, tokenizer, shape, with_reward=True)
            write_data(Path(home), pairs, PAIRS)
            for row in chosen:
                if row.shape == shape:
                    near += abs(probe_row(row, Path(home), machine)) <= 0.1
    print(f"\n{near} of {len(chosen)} corrected peaks within 10 %")


def probe_row(row: MeasuredRow, home: Path, machine: Machine) -> float:
    file = recipe_of_row(row, home)
    recipe = load_recipe(file)
    (found,) = probe_recipe(file, (), recipe, works_of(recipe, machine), machine, lambda text: None)
    error = found.corrected_peak / GIB / row.peak_gib - 1
    numbers = (found.planned_peak, found.measured_peak, found.corrected_peak)
    cells = " | ".join(f"{number / GIB:.1f}" for number in numbers)
    said = found.problem or f"{error:+.0%}"
    print(f"| {row.shape} | {row.stage} | {row.way} | {row.peak_gib:.1f} | {cells} | {said} |", flush=True)
    return float("inf") if found.problem else error


def rows() -> Iterator[MeasuredRow]:
    """Those of the page, then the later ones."""
    shapes = {"135M": (24, 12), "0.5B": (24, 12), "1.5B": (16, 7)}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 13 and cells[1] in shapes:
            learnt, sampled = shapes[cells[1]]
            stage: StageName = cells[2]  # pyright: ignore[reportAssignmentType]: the page has no others
            way: Way = cells[3]  # pyright: ignore[reportAssignmentType]
            yield MeasuredRow(
                shape=cells[1].lower(),
                stage=stage,
                way=way,
                step_s=float(cells[4]),
                peak_gib=float(cells[6]),
                steps=sampled if stage in ("grpo", "ppo") else learnt,
            )
    yield from LATER


def write_recipe(row: MeasuredRow, home: Path, tokenizer: str) -> Path:
    """The recipe of a row, over a model of which the configuration alone is there."""
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(tokenizer)
    policy, reward = home / "policy", home / "reward"
    config_of(words, row.shape).save_pretrained(policy)
    words.save_pretrained(policy)
    (policy / "model.safetensors").touch()
    reward.mkdir(exist_ok=True)
    (reward / "config.json").write_text("{}")
    return recipe_of_row(row, home)


def recipe_of_row(row: MeasuredRow, home: Path) -> Path:
    """The recipe of stages_vs_trl.py for one row."""
    case = StageCase(
        home=str(home),
        stage=row.stage,
        way=row.way,
        shape=row.shape,
        batch=64 if row.stage in ("grpo", "ppo") else 32,
        steps=row.steps,
        skipped=0,
        max_length=768,
        micro_batch=64,
        base_bits=row.base_bits,
        recompute=row.recompute,
    )
    recipe = home / "recipe.json"
    stages = {row.stage: stage_of(case)}
    recipe.write_text(json.dumps({"kedge": 1, "name": row.way, "model": case.file("policy"), "stages": stages}))
    return recipe


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, required=True, help="the file of preferences that was measured with")
    parser.add_argument("--tokenizer", required=True, help="the folder of a tokenizer with a chat template")
    parser.add_argument("--probe", action="store_true", help="two real steps of each row on this machine")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    return parser.parse_args()


if __name__ == "__main__":
    main()
