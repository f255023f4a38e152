"""Two rounds against one at equal labels, in the demo's world, where the true preference is known.

Both arms begin with the same SFT model, buy the same number of labels from the same simulated people, are held by the
same target of KL to SFT, and take the same number of PPO iterations in all. One round asks about answers of the SFT
model and learns from all labels at once; two rounds ask half of them about the SFT model, and the other half about the
policy that came of the first; then PPO begins again from SFT. The recipe is `recipes/rounds.yaml` with the demo's model
and data. Printed: the true reward of both final policies on 200 held-out messages, by seed, with 95 % intervals over
messages; what the answers do wrong; the mean difference with Student's interval over seeds (exit code 0 where it is
above 0); and `peak`, the best mean of five iterations that the one round had on its training prompts, where a run that
knew the truth would have stopped.

    python benchmarks/rounds.py [--seeds 1 2 3 4 5 6 7 8] [--labels 200] [--epochs 4] [--iterations 25] [--target 6]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from kedge.core.files import write_text
from kedge.core.stats import bootstrap_mean, student_interval
from kedge.demo.recipe import write_demo
from kedge.demo.truth import read_reply
from kedge.demo.world import Sizes
from kedge.recipe.runner import run_in
from kedge.recipe.schema import load_recipe
from kedge.recipe.templates import template_folder

SIZES = Sizes(demonstrations=8000, pairs=10, prompts=2000, heldout=200)
ARMS = {"one": "one round", "half": "round 1 of 2", "two": "two rounds"}
PEOPLE = '''\
"""The true preference, and a person who labels by it with noise (recipes/data/help_desk.py says more)."""

from hashlib import blake2b
from math import log

from kedge.demo.world import score


def person(answer):
    digest = blake2b(repr((answer.prompt, answer.text)).encode(), digest_size=6).digest()
    share = (int.from_bytes(digest, "big") + 0.5) / 2**48
    return score(answer) - 0.5 * log(-log(share))
'''
NO_LIMITS = (
    *("kl_previous", "kl_first", "spearman", "flips", "forgetting", "ece", "shift"),
    *("length_ratio", "refusal_rise", "distinct_ratio", "win_rate"),
)


def main() -> None:
    args = parse()
    start = time.process_time()
    print(f"{'seed':>4} {'SFT':>6} {'one round':>10} {'peak':>6} {'round 1 of 2':>13} {'two':>6}   difference   95 %")
    with tempfile.TemporaryDirectory() as scratch:
        rows = [tell(compare(seed, args, (args.folder or Path(scratch)) / str(seed))) for seed in args.seeds]
    for arm in ("one", "half", "two"):
        faults = {name: fmean(row["faults"][arm][name] for row in rows) for name in rows[0]["faults"][arm]}
        words = ", ".join(f"{name} {count:.2f}" for name, count in faults.items())
        print(f"{ARMS[arm]}, an answer has: {words}")
    mean, low, high = student_interval([row["gap"] for row in rows])
    labels = f"{2 * args.labels} labels each"
    print(f"two rounds − one, {labels}: {mean:+.2f} [{low:+.2f}, {high:+.2f}] over {len(rows)} seeds")
    print(f"{(time.process_time() - start) / 60:.1f} minutes of one core")
    sys.exit(low <= 0)


def tell(row: dict[str, Any]) -> dict[str, Any]:
    """Print a seed's line as soon as it is known."""
    low, high = row["interval"]
    print(
        f"{row['seed']:>4} {row['sft']:>6.2f} {row['one']:>10.2f} {row['peak']:>6.2f} {row['half']:>13.2f} "
        f"{row['two']:>6.2f}   {row['gap']:>+10.2f}   [{low:+.2f}, {high:+.2f}]",
        flush=True,
    )
    return row


def compare(seed: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both arms of one seed; one round has the labels and the iterations of both of the two rounds."""
    write_demo(folder, seed, SIZES)
    write_text(folder / "people.py", PEOPLE)
    runs = folder / "runs"
    recipe = template_folder() / "rounds.yaml"
    two = load_recipe(recipe, {**in_the_demo_s_world(folder, seed), **spending(folder, args, times=1)})
    run_in(runs / "two", two, is_resumed=False, say=quiet)
    sft = str(runs / "two/round-1/sft/model")
    alone = {
        "rounds": None,
        "stages.ask.models": [sft],
        "stages.reward.from": sft,
        "stages.ppo.from": sft,
        "stages.eval.models": [sft, "ppo"],
        # The stage stays in the recipe, and is not needed: one step of it.
        "stages.sft.max_steps": 1,
    }
    one = load_recipe(recipe, {**in_the_demo_s_world(folder, seed), **spending(folder, args, times=2), **alone})
    run_in(runs / "one", one, is_resumed=False, say=quiet)
    stages = {"half": "two/round-1/eval", "two": "two/round-2/eval", "one": "one/eval"}
    first, last, single = (truth(runs / stages[arm]) for arm in ("half", "two", "one"))
    gaps = last["ppo"] - single["ppo"]
    return {
        "seed": seed,
        "sft": first["sft"].mean(),
        "one": single["ppo"].mean(),
        "peak": peak(runs / "one/ppo/metrics.jsonl"),
        "half": first["ppo"].mean(),
        "two": last["ppo"].mean(),
        "gap": gaps.mean(),
        "interval": bootstrap_mean(gaps, seed=seed),
        "faults": {arm: faults_of(runs / stage) for arm, stage in stages.items()},
    }


def in_the_demo_s_world(folder: Path, seed: int) -> dict[str, Any]:
    """The recipe's settings for the demo's model of words, which learns in seconds what takes the tiny one minutes."""
    gold = {"kind": "function", "path": f"{folder / 'gold.py'}:score"}
    once = {"eval.every": 1000, "checkpoints.every": 1000, "batch": 16, "micro_batch": 16, "max_length": 128}
    stages: dict[str, Any] = {
        **{f"{stage}.{name}": value for stage in ("sft", "reward") for name, value in once.items()},
        "sft.data": str(folder / "data/demonstrations.jsonl"),
        "sft.epochs": 1,
        "sft.optimiser": {"lr": 5e-3, "beta2": 0.98},
        "ask.reward.path": f"{folder / 'people.py'}:person",
        "ask.max_new_tokens": 60,
        "ask.rows": 100,
        "prepare.heldout": 0.1,
        "reward.optimiser": {"lr": 1e-3, "beta2": 0.98},
        "ppo.gold": gold,
        "ppo.prompts": str(folder / "data/prompts.jsonl"),
        "ppo.batch": 64,
        "ppo.answers": 1,
        "ppo.micro_batch": 64,
        "ppo.max_prompt_tokens": 48,
        "ppo.critic_warmup": 0,
        "ppo.memory": {},
        "ppo.sampling": {"max_new_tokens": 60, "temperature": 0.8},
        "ppo.loss": {"policy": {"stop_at_kl": 0.03}, "value": {"clip": None}},
        "ppo.actor": {"lr": 5e-4, "schedule": "linear", "warmup": 0, "eps": 1e-5},
        "ppo.critic": {"lr": 1e-3, "schedule": "constant", "warmup": 0, "eps": 1e-5},
        "ppo.checkpoints.every": 1000,
        "eval.gold": gold,
        "eval.prompts": str(folder / "data/heldout-prompts.jsonl"),
        "eval.max_new_tokens": 60,
        "eval.temperature": 0.8,
        "eval.rows": 100,
    }
    top = {"seed": seed, "model": str(folder / "model"), "device": "cpu"}
    # Drift is measured on a few prompts: the evaluation has them all.
    rounds = {"rounds.keep.weight_halves_after": None, "rounds.drift.count": 20, **no_limits()}
    return {**top, **rounds, **{f"stages.{name}": value for name, value in stages.items()}}


def no_limits() -> dict[str, Any]:
    return {f"rounds.drift.limits.{name}": None for name in NO_LIMITS} | {"rounds.stop": {"gate": None, "drift": None}}


def spending(folder: Path, args: argparse.Namespace, *, times: int) -> dict[str, Any]:
    """Labels and iterations of a round that has so many rounds' share of them; all go as far from SFT."""
    return {
        "stages.reward.epochs": args.epochs,
        "stages.ask.prompts": {"file": str(folder / "data/prompts.jsonl"), "limit": times * args.labels},
        "stages.ppo.iterations": times * args.iterations,
        "stages.ppo.kl": {"start": 0.1, "target": args.target, "horizon": 200, "limit": None, "on_limit": "stop"},
    }


def truth(stage: Path) -> dict[str, Any]:
    """By model the true reward of each answer, in the order of the prompts; the first model is called `sft`."""
    rows = [json.loads(line) for line in (stage / "answers.jsonl").read_text().splitlines()]
    names = list(dict.fromkeys(row["model"] for row in rows))
    scores = {name: np.array([row["scores"]["gold"] for row in rows if row["model"] == name]) for name in names}
    return {"ppo" if name == "ppo" else "sft": own for name, own in scores.items()}


def faults_of(stage: Path) -> dict[str, float]:
    """What the policy's answers do wrong, each as a mean over answers."""
    rows = [json.loads(line) for line in (stage / "answers.jsonl").read_text().splitlines()]
    readings = [read_reply(row["prompt"][-1]["content"], row["answer"]) for row in rows if row["model"] == "ppo"]
    return {
        "facts missing": fmean(list(reading.facts.values()).count("missing") for reading in readings),
        "facts wrong": fmean(list(reading.facts.values()).count("wrong") for reading in readings),
        "sentences repeated": fmean(reading.num_repeated for reading in readings),
        "courtesies too many": fmean(max(0, reading.counts["courtesy"] - 2) for reading in readings),
        "courtesies": fmean(reading.counts["courtesy"] for reading in readings),
        "no closing": fmean(not reading.is_signed for reading in readings),
    }


def peak(file: Path) -> float:
    """The best mean of gold over five iterations."""
    gold = [json.loads(line)["gold/mean"] for line in file.read_text().splitlines()]
    return max(fmean(gold[at : at + 5]) for at in range(len(gold) - 4))


def quiet(_: str) -> None:
    """Nothing is said."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--labels", type=int, default=200, help="of each of two rounds; one round has twice as many")
    parser.add_argument("--epochs", type=float, default=4.0, help="of the reward model, over its labels")
    parser.add_argument("--iterations", type=int, default=25, help="of PPO, of each of two rounds")
    parser.add_argument("--target", type=float, default=6.0, help="steer KL to SFT towards this, in nats")
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
