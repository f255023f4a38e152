"""Every training stage of Kedge beside TRL 1.12.0's on the same preferences: seconds a step, memory, time to a start.

Random weights of real shapes with a real tokenizer, real lengths, the same batch, longest length and precision, one
process a run. Kedge runs as its users run it (`kedge run` on a recipe); TRL's trainers get the largest micro-batch that
fits and what is fastest without flash-attn. The floor is the operations of the real tokens over the rate of a large
matrix product on this card. Needs: pip install 'trl==1.12.0'; a file of preferences; a tokenizer's folder.

    python benchmarks/stages_vs_trl.py --pairs hh.jsonl.gz --tokenizer FOLDER                       # the whole table
    python benchmarks/stages_vs_trl.py --pairs … --tokenizer … --shapes 135m --stages sft reward --ways lora
    python benchmarks/stages_vs_trl.py --pairs … --tokenizer … --shapes tiny --steps 4 --batch 4    # anywhere
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from peers.floor import Rates, measured_rates
from peers.stage_case import (
    ALPHA,
    GROUP,
    NEW_TOKENS,
    RANK,
    SHAPES,
    STAGES,
    StageCase,
    StageMeasured,
    StageOutOfMemory,
    median,
    write_inputs,
)

COLUMNS = ("s/step", "tokens/s", "peak GiB", "first s", "× floor", "× TRL")
HEADER = f"{'shape':6} {'stage':7} {'way':5} {'side':6} {' '.join(f'{name:>9}' for name in COLUMNS)}"


def main() -> None:
    args = parse()
    rates = measured_rates("cuda" if torch.cuda.is_available() else "cpu")
    print(
        f"torch {torch.__version__}; {rates.matrix / 1e12:.0f} TFLOP/s, {rates.copy / 1e12:.2f} TB/s\n{HEADER}",
        flush=True,
    )
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as home:
            write_inputs(Path(home), args.pairs, args.tokenizer, shape, with_reward="ppo" in args.stages)
            for stage in args.stages:
                for way in args.ways:
                    case = StageCase(
                        home=home,
                        stage=stage,
                        way=way,
                        shape=shape,
                        batch=args.batch * (2 if stage in ("grpo", "ppo") else 1),
                        steps=args.steps,
                        skipped=args.skipped,
                        max_length=args.max_length,
                        micro_batch=args.trl_rows,
                    )
                    compare(case, rates, args.who)


def compare(case: StageCase, rates: Rates, who: str) -> None:
    kedge = kedge_side(case) if who != "trl" else None
    if kedge:
        show(case, "Kedge", kedge, kedge.tokens_a_step, rates, None)
    trl = trl_side(case) if who != "kedge" else None
    if trl:
        tokens = kedge.tokens_a_step if kedge else 0.0
        show(case, "TRL", trl, tokens, rates, trl.step_s / kedge.step_s if kedge else None)


def show(case: StageCase, side: str, found: StageMeasured, tokens: float, rates: Rates, ratio: float | None) -> None:
    least = floor_s(case, tokens, rates)
    numbers = (
        f"{found.step_s:.3f}",
        f"{tokens / found.step_s:,.0f}",
        f"{found.peak_gib:.1f}",
        f"{found.first_step_s:.1f}",
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


def kedge_side(case: StageCase) -> StageMeasured:
    """`kedge run` on a recipe of one stage; its journal says how long the steps took."""
    runs = Path(case.home) / "runs"
    recipe = Path(case.home) / "recipe.json"
    name = f"{case.stage}-{case.way}"
    recipe.write_text(
        json.dumps({"kedge": 1, "name": name, "model": case.file("policy"), "stages": {"it": stage_of(case)}})
    )
    metrics = runs / name / "it" / "metrics.jsonl"
    command = [sys.executable, "-m", "kedge.cli", "run", str(recipe), "--runs", str(runs), "--no-check"]
    started = time.time()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    first_step_s = 0.0
    while child.poll() is None and not first_step_s:
        if metrics.is_file() and metrics.stat().st_size:
            first_step_s = time.time() - started
        time.sleep(0.02)
    output, _ = child.communicate()
    if child.returncode:
        raise SystemExit(f"kedge failed on {name}:\n{output[-3000:]}")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [record for record in records if "time/step" in record]
    counted = steps[case.skipped :]
    return StageMeasured(
        step_s=median([record["time/step"] for record in counted]),
        first_step_s=first_step_s,
        peak_gib=peak_of(runs / name / "it" / "events.jsonl"),
        tokens_a_step=sum(r.get("tokens/per_second", 0) * r["time/step"] for r in counted) / len(counted),
    )


def peak_of(events: Path) -> float:
    records = [json.loads(line) for line in events.read_text().splitlines()]
    peaks = [record["evidence"]["memory/peak_gib"] for record in records if record["code"] == "run.memory"]
    return peaks[-1] if peaks else 0.0


def stage_of(case: StageCase) -> Mapping[str, Any]:
    lora = {"rank": RANK, "alpha": ALPHA}
    with_lora = {"lora": lora} if case.way == "lora" else {}
    fixed = {"batch": case.batch, "max_steps": case.steps, "max_length": case.max_length, "epochs": 100, **with_lora}
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
                "reward": {"kind": "length", "target": NEW_TOKENS},
                "batch": case.batch // GROUP,
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
        "roles": "lora" if case.way == "lora" else "separate",
        "memory": {"lora": lora} if case.way == "lora" else {},
        "iterations": case.steps,
        "max_prompt_tokens": case.max_length,
        "too_long": "drop",
        "sampling": {"max_new_tokens": NEW_TOKENS},
    }


def trl_side(case: StageCase) -> StageMeasured | None:
    """With the first micro-batch that fits, from the largest on."""
    here = str(Path(__file__).parent)
    paths = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    while case.micro_batch:
        environment = os.environ | {"PYTHONPATH": paths, "STARTED_AT": str(time.time())}
        command = [sys.executable, "-m", "peers.stage_trl", json.dumps(asdict(case))]
        child = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if child.returncode:
            print(f"TRL failed on {case.stage} {case.way}: {child.stderr[-1500:]}", flush=True)
            return None
        fields = json.loads(child.stdout.splitlines()[-1])
        if "rows" not in fields:
            return StageMeasured(**fields)
        out_of_memory = StageOutOfMemory(**fields)
        case = replace(case, micro_batch=out_of_memory.rows // 2)
    return None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, required=True, help="a file of preferences")
    parser.add_argument("--tokenizer", required=True, help="the folder of a tokenizer with a chat template")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["135m", "0.5b", "1.5b"])
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--ways", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--who", choices=["both", "kedge", "trl"], default="both")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--skipped", type=int, default=8, help="steps at the beginning that do not count")
    parser.add_argument("--max-length", type=int, default=768)
    parser.add_argument("--trl-rows", type=int, default=64, help="micro-batch of TRL, halved where it does not fit")
    args = parser.parse_args()
    if args.skipped >= args.steps:
        parser.error(f"--skipped {args.skipped}: of {args.steps} steps none would count")
    return args


if __name__ == "__main__":
    main()
