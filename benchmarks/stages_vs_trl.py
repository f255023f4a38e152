"""Every training stage of Kedge beside TRL 1.12.0's on the same preferences: seconds a step, memory, time to a start.

Random weights of real shapes with a real tokenizer, real lengths, the same batch, longest length and precision, one
process a side. Kedge runs as its users run it (`kedge run` on a recipe of all stages); TRL's trainers get the largest
micro-batch that fits and what is fastest without flash-attn. "First s" is from the start of a stage, with its weights
and its data, to the end of its first step; "saving s" from the last step to the end of the stage, with a checkpoint and
the model. The floor is the operations of the real tokens over the rate of a large matrix product on this card. Needs:
pip install 'trl==1.12.0'; a file of preferences; a tokenizer's folder.

    python benchmarks/stages_vs_trl.py --pairs hh.jsonl.gz --tokenizer FOLDER                       # the whole table
    python benchmarks/stages_vs_trl.py --pairs … --tokenizer … --shapes 135m --stages sft reward --ways lora
    python benchmarks/stages_vs_trl.py --pairs … --tokenizer … --shapes tiny --steps 4 --batch 4    # anywhere
    python benchmarks/stages_vs_trl.py --pairs … --tokenizer … --shapes 7b --ways lora --who kedge --base-bits 4
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from peers.floor import Rates, measured_rates
from peers.stage_case import (
    ALPHA,
    GROUP,
    RANK,
    RESULT,
    SHAPES,
    STAGES,
    StageCase,
    StageMeasured,
    StageName,
    Way,
    median,
    stages_of,
    write_inputs,
)

_LOOK_S = 0.5
"""Between two looks at which stages are done."""
COLUMNS = ("s/step", "tokens/s", "peak GiB", "first s", "saving s", "× floor", "× TRL")
HEADER = f"{'shape':6} {'stage':7} {'way':5} {'side':6} {' '.join(f'{name:>9}' for name in COLUMNS)}"


def main() -> int:
    args, are_whole = parse(), list[bool]()
    rates = measured_rates("cuda" if torch.cuda.is_available() else "cpu")
    print(
        f"torch {torch.__version__}; {rates.matrix / 1e12:.0f} TFLOP/s, {rates.copy / 1e12:.2f} TB/s\n{HEADER}",
        flush=True,
    )
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as home:
            write_inputs(Path(home), args.pairs, args.tokenizer, shape, with_reward="ppo" in args.stages)
            for way in args.ways:
                cases = [case_of(args, home, shape, stage, way) for stage in stages_of(way, args.stages)]
                are_whole.append(compare(cases, rates, args.who))
            if args.journals:
                keep_journals(Path(home) / "runs", args.journals / shape)
    return int(not all(are_whole))


def case_of(args: argparse.Namespace, home: str, shape: str, stage: StageName, way: Way) -> StageCase:
    samples = stage in ("grpo", "ppo")
    return StageCase(
        home=home,
        stage=stage,
        way=way,
        shape=shape,
        batch=args.batch * (2 if samples else 1),
        steps=args.iterations if samples else args.steps,
        skipped=args.skipped_iterations if samples else args.skipped,
        max_length=args.max_length,
        micro_batch=args.trl_rows,
        base_bits=args.base_bits,
        recompute=args.recompute,
    )


def compare(cases: Sequence[StageCase], rates: Rates, who: str) -> bool:
    """All stages of a way on both sides, each side in one process: a row for each as it comes. Whether all came."""
    kedge, trl = dict[StageName, StageMeasured](), dict[StageName, StageMeasured]()
    for case, measured in kedge_side(cases) if who != "trl" else ():
        kedge[case.stage] = measured
        show(case, "Kedge", measured, measured.tokens_a_step, rates, None)
    for case, measured in trl_side([trl_case(case) for case in cases]) if who != "kedge" else ():
        trl[case.stage] = measured
        ours = kedge.get(case.stage)
        ratio = measured.step_s / ours.step_s if ours else None
        show(case, "TRL", measured, ours.tokens_a_step if ours else 0.0, rates, ratio)
    return all(len(rows) == len(cases) for rows, other in ((kedge, "trl"), (trl, "kedge")) if who != other)


def trl_case(case: StageCase) -> StageCase:
    """TRL's steps are alike from the second on, and those that sample take seconds: a few of them are enough."""
    samples = case.stage in ("grpo", "ppo")
    steps = min(case.steps, 3 if samples else 9)
    return replace(case, steps=steps, skipped=min(case.skipped, 1 if samples else 3))


def show(case: StageCase, side: str, found: StageMeasured, tokens: float, rates: Rates, ratio: float | None) -> None:
    least = floor_s(case, tokens, rates)
    numbers = (
        f"{found.step_s:.3f}",
        f"{tokens / found.step_s:,.0f}",
        f"{found.peak_gib:.1f}",
        f"{found.first_step_s:.1f}",
        "" if found.saving_s is None else f"{found.saving_s:.1f}",
        f"{found.step_s / least:.1f}" if least else "",
        f"{ratio:.1f}" if ratio else "",
    )
    print(f"{case.shape:6} {case.stage:7} {case.way:5} {side:6} {' '.join(f'{x:>9}' for x in numbers)}", flush=True)


def floor_s(case: StageCase, tokens: float, rates: Rates) -> float:
    """Operations of the layers for the real tokens of a step: 2 a weight and token forward, and backward 4, or 2 where
    the base is frozen. Generation is left out, so there is none for GRPO and PPO (benchmarks/ppo_vs_trl.py has it)."""
    if case.stage in ("grpo", "ppo"):
        return 0.0
    sizes = SHAPES[case.shape]
    width, inner, layers = (sizes[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    weights = layers * (2.5 * width * width + 3 * width * inner)
    return (6 if case.way == "full" else 4) * weights * tokens / rates.matrix


def kedge_side(cases: Sequence[StageCase]) -> Iterator[tuple[StageCase, StageMeasured]]:
    """`kedge run` on a recipe of all stages; their journals say how long the steps took.

    A stage is told as soon as it is done, and its weights are deleted: no other stage begins from them, and those of
    five stages of 1.5B fill a disk of 64 GB.
    """
    recipe, name = write_recipe(cases), cases[0].way
    runs = recipe.parent / "runs"
    command = [sys.executable, "-m", "kedge.cli", "run", str(recipe), "--runs", str(runs), "--no-check"]
    waiting = {case: runs / name / case.stage for case in cases}
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(command, stdout=said, stderr=said) as child:
        is_over = False
        while waiting and not is_over:
            is_over = child.poll() is not None
            for case in [case for case, folder in waiting.items() if _is_done(folder)]:
                folder = waiting.pop(case)
                yield case, _measured(case, folder)
                for weights in ("checkpoints", "model", "adapter"):
                    shutil.rmtree(folder / weights, ignore_errors=True)
            time.sleep(_LOOK_S)
        if child.wait():
            said.seek(0)
            print(f"kedge failed on {name}:\n{said.read()[-3000:]}", flush=True)


def write_recipe(cases: Sequence[StageCase]) -> Path:
    """One recipe of all the stages, beside their data."""
    recipe = Path(cases[0].file("recipe.json"))
    stages = {case.stage: stage_of(case) for case in cases}
    values = {"kedge": 1, "name": cases[0].way, "model": cases[0].file("policy"), "stages": stages}
    recipe.write_text(json.dumps(values))
    return recipe


def keep_journals(runs: Path, target: Path) -> None:
    """What Kedge wrote down of its stages, without models and checkpoints."""
    for path in runs.glob("*/*/*.json*"):
        place = target / path.relative_to(runs)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)


def _is_done(folder: Path) -> bool:
    record = folder / "run.json"
    return record.exists() and json.loads(record.read_text())["status"] == "done"


def _measured(case: StageCase, folder: Path) -> StageMeasured:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "time/step" in record]
    counted = steps[case.skipped :]
    manifest = json.loads((folder / "run.json").read_text())
    created, finished = (datetime.fromisoformat(manifest[name]).timestamp() for name in ("created", "finished"))
    return StageMeasured(
        step_s=median([record["time/step"] for record in counted]),
        first_step_s=steps[0]["at"] - created,
        peak_gib=peak_of(folder / "events.jsonl"),
        saving_s=finished - steps[-1]["at"],
        tokens_a_step=sum(r.get("tokens/per_second", 0) * r["time/step"] for r in counted) / len(counted),
    )


def peak_of(events: Path) -> float:
    records = [json.loads(line) for line in events.read_text().splitlines()]
    peaks = [record["evidence"]["memory/peak_gib"] for record in records if record["code"] == "run.memory"]
    return peaks[-1] if peaks else 0.0


def stage_of(case: StageCase) -> Mapping[str, Any]:
    lora = {"rank": RANK, "alpha": ALPHA, "base_bits": case.base_bits}
    with_lora = {"lora": lora} if case.way == "lora" else {}
    fixed = {
        **{"batch": case.batch, "max_steps": case.steps, "max_length": case.max_length, "epochs": 100},
        **with_lora,
        "memory": _memory(case),
    }
    match case.stage:
        case "sft":
            return {"kind": "sft", "data": case.file("demonstrations.jsonl"), "samples": 0, **fixed}
        case "reward":
            return {"kind": "reward", "data": case.file("pairs.jsonl"), "if_unfit": "go_on", **fixed}
        case "dpo":
            return {"kind": "preference", "method": "dpo", "data": case.file("pairs.jsonl"), "samples": 0, **fixed}
        case "grpo":
            return {
                "kind": "group",
                "method": "grpo",
                "prompts": case.file("prompts.jsonl"),
                "reward": {"kind": "function", "path": f"{case.file('rules.py')}:length"},
                "batch": max(1, case.batch // GROUP),
                "answers": GROUP,
                **_rl(case, lora),
            }
        case "ppo":
            policy = {"epochs": 2, "minibatches": 4, "batch": case.batch}
            return {
                "kind": "ppo",
                "prompts": case.file("prompts.jsonl"),
                "reward": case.file("reward"),
                **policy,
                **_rl(case, lora),
            }


def _rl(case: StageCase, lora: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "roles": "separate" if case.way == "full" else case.way,
        "memory": _memory(case) | ({"lora": lora} if case.way == "lora" else {}),
        "iterations": case.steps,
        "max_prompt_tokens": case.max_length,
        "too_long": "drop",
        "sampling": {"max_new_tokens": case.new_tokens},
    }


def _memory(case: StageCase) -> dict[str, Any]:
    """What is saved at the end of a stage is not measured: 7B in float32 would be 30 GB."""
    return {"recompute": case.recompute, "save_dtype": "bfloat16" if case.shape == "7b" else "float32"}


def trl_side(cases: Sequence[StageCase]) -> Iterator[tuple[StageCase, StageMeasured]]:
    """Each stage with the first micro-batch that fits, from the largest on."""
    here = str(Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, "-m", "peers.stage_trl", json.dumps([asdict(case) for case in cases])]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as child,
    ):
        waiting = list(cases)
        for line in child.stdout or ():
            if line.startswith(RESULT):
                yield waiting.pop(0), StageMeasured(**json.loads(line.removeprefix(RESULT)))
        if child.wait():
            errors.seek(0)
            print(f"TRL failed on {waiting[0].stage} {waiting[0].way}: {errors.read()[-1500:]}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, required=True, help="a file of preferences")
    parser.add_argument("--tokenizer", required=True, help="the folder of a tokenizer with a chat template")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["135m", "0.5b", "1.5b"])
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--ways", nargs="+", choices=["full", "lora", "trunk"], default=["full", "lora"])
    parser.add_argument("--who", choices=["both", "kedge", "trl"], default="both")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--skipped", type=int, default=8, help="steps at the beginning that do not count")
    parser.add_argument("--iterations", type=int, default=8, help="steps of GRPO and PPO")
    parser.add_argument("--skipped-iterations", type=int, default=3)
    parser.add_argument("--max-length", type=int, default=768)
    parser.add_argument("--trl-rows", type=int, default=64, help="micro-batch of TRL, halved where it does not fit")
    parser.add_argument("--base-bits", type=int, choices=[16, 8, 4], default=16, help="of Kedge's base, with lora")
    parser.add_argument("--journals", type=Path, help="a folder for the journals of Kedge's stages")
    parser.add_argument("--recompute", action="store_true", help="activations, on Kedge's side")
    args = parser.parse_args()
    if "trunk" in args.ways and (args.who != "kedge" or "ppo" not in args.stages):
        parser.error("a trunk is Kedge's, and for PPO: --ways trunk --stages ppo --who kedge")
    for skipped, of in ((args.skipped, args.steps), (args.skipped_iterations, args.iterations)):
        if skipped >= of:
            parser.error(f"{skipped} steps are skipped: of {of} none would count")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
