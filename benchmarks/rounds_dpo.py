"""Two rounds of DPO against one at equal labels, in the demo's world, where the true preference is known.

Both arms begin with the same SFT model, ask about the same messages, and share their first half of the labels: the best
against the worst of four answers of the SFT model. One round asks about four more answers of the SFT model, and learns
from both halves at once; two rounds learn from the first half, ask about four answers of the policy that came of it,
and go on from there. Labels, passes over them, optimiser steps and settings are the same. The recipe is
`recipes/rounds-dpo.yaml` with the demo's model and data.

Printed by seed: the true reward of the policies on 100 held-out messages, four answers each; the difference with its
95 % interval over messages; the KL to SFT. In the end, of each arm, what its answers do wrong and what its last labels
are worth (benchmarks/rounds.py says how), and the mean difference with Student's interval over seeds (exit code 0 where
it is above 0).

    python benchmarks/rounds_dpo.py [--seeds 1 2 3 4 5 6 7 8] [--labels 200] [--epochs 6] [--rate 6e-4] [--imitate 0.5]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

import rounds as by_ppo
from kedge.core.files import write_text
from kedge.core.stats import bootstrap_mean, student_interval
from kedge.demo.recipe import write_demo
from kedge.recipe.runner import run_in
from kedge.recipe.schema import load_recipe
from kedge.recipe.templates import template_folder
from rounds import ANSWERS, ARMS, ASKED, PEOPLE, SIZES, STAGES, Row, labels_of, means, over_seeds, quiet, read_lines


def main() -> None:
    args = parse()
    start = time.process_time()
    print("seed    SFT    half     one     two   difference, 95 %           KL", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        rows = [tell(compare(seed, args, (args.folder or Path(scratch)) / str(seed))) for seed in args.seeds]
    for arm, words in ARMS.items():
        print(f"{words}: {', '.join(f'{name} {mean:.2f}' for name, mean in means(rows, arm).items())}")
    print(f"two rounds − one, {2 * args.labels} labels each: {over_seeds([row['gap'] for row in rows])}")
    print(f"{(time.process_time() - start) / 60:.1f} minutes of one core")
    sys.exit(student_interval([row["gap"] for row in rows])[1] <= 0)


def tell(row: Row) -> Row:
    """Print a seed's line as soon as it is known; of two figures the first is of one round."""
    low, high = row["interval"]
    half, one, two = (row[arm] for arm in ("half", "one", "two"))
    print(
        f"{row['seed']:>4} {row['sft']:>6.2f} {half['gold']:>7.2f} {one['gold']:>7.2f} {two['gold']:>7.2f} "
        f"{row['gap']:>+7.2f} [{low:+.2f}, {high:+.2f}]   {one['KL']:>5.1f} {two['KL']:>5.1f}",
        flush=True,
    )
    return row


def compare(seed: int, args: argparse.Namespace, folder: Path) -> Row:
    """Both arms of one seed."""
    write_demo(folder, seed, SIZES)
    write_text(folder / "people.py", PEOPLE)
    runs, recipe = folder / "runs", template_folder() / "rounds-dpo.yaml"
    settings = {**in_the_demo_s_world(folder), **spending(folder, args)}
    run_in(runs / "two", load_recipe(recipe, {**settings, **rounds(seed)}), is_resumed=False, say=quiet)
    sft = str(runs / "two/round-1/sft/model")
    run_in(runs / "one", load_recipe(recipe, {**settings, **alone(seed, sft, settings)}), is_resumed=False, say=quiet)
    if labels_of(runs / "one") != labels_of(runs / "two/round-1"):
        raise AssertionError(f"seed {seed}: the arms were to share their first labels, and do not")
    answers = {arm: read_lines(runs / stage / "eval/answers.jsonl") for arm, stage in STAGES.items()}
    gaps = np.array(truth(answers["two"])) - np.array(truth(answers["one"]))
    return {
        "seed": seed,
        "sft": fmean(truth(answers["half"], is_policy=False)),
        "gap": gaps.mean(),
        "interval": bootstrap_mean(gaps.reshape(-1, ANSWERS).mean(axis=1), seed=seed),
        **{arm: figures(runs, arm, answers[arm]) for arm in ARMS},
    }


def rounds(seed: int) -> dict[str, Any]:
    """Two rounds, whatever they drift."""
    return without_ppo(by_ppo.rounds(seed))


def alone(seed: int, sft: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One round by the seed of round 1, which gives its labels again; `again` asks for as many more."""
    return {
        **without_ppo(by_ppo.alone(seed, sft, settings)),
        "stages.dpo.from": sft,
        "stages.eval.models": [sft, "dpo"],
    }


def in_the_demo_s_world(folder: Path) -> dict[str, Any]:
    """As for PPO, with the stage `dpo` in the place of `reward` and `ppo`."""
    return {
        **without_ppo(by_ppo.in_the_demo_s_world(folder)),
        "stages.dpo.eval.every": 1000,
        "stages.dpo.checkpoints.every": 1000,
        "stages.dpo.micro_batch": 16,
        "stages.dpo.max_length": 128,
        "stages.dpo.samples": 0,
        "stages.eval.models": ["sft", "dpo"],
    }


def without_ppo(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that both recipes have."""
    others = ("stages.reward", "stages.ppo", "rounds.keep")
    return {name: value for name, value in settings.items() if not name.startswith(others)}


def spending(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Labels of a round, and how much is made of them."""
    return {
        "stages.ask.prompts": {"file": str(folder / "data/prompts.jsonl"), "limit": args.labels},
        "stages.dpo.epochs": args.epochs,
        "stages.dpo.method": {"kind": "dpo", "beta": 0.1, "sft_weight": args.imitate},
        "stages.dpo.optimiser": {"lr": args.rate, "beta2": 0.98, "warmup": 0.1},
    }


def truth(answers: list[Row], *, is_policy: bool = True) -> list[float]:
    """The true reward of each answer of the policy, or of the SFT model, in the order of the prompts."""
    return [row["scores"]["gold"] for row in answers if (row["model"] == "dpo") == is_policy]


def figures(runs: Path, arm: str, answers: list[Row]) -> dict[str, float]:
    """What is said of an arm."""
    return {
        "gold": fmean(truth(answers)),
        "KL": fmean(row["kl"] for row in answers if row["model"] == "dpo"),
        **by_ppo.faults(answers, policy="dpo"),
        **by_ppo.worth(read_lines(runs / ASKED[arm] / "pairs.jsonl")),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--labels", type=int, default=200, help="of each half; both arms have two halves")
    parser.add_argument("--epochs", type=float, default=6.0, help="over the labels of a round")
    parser.add_argument("--rate", type=float, default=6e-4, help="the learning rate")
    parser.add_argument("--imitate", type=float, default=0.5, help="weight of the likelihood of chosen answers")
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
