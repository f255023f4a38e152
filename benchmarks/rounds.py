"""Two rounds against one at equal labels, in the demo's world, where the true preference is known.

Both arms begin with the same SFT model, ask about the same messages, and share their first half of the labels: the best
against the worst of four answers of the SFT model. The other half differs, and nothing else does: one round asks about
four more answers of the SFT model, two rounds about four of the policy that came of the first half. Then a reward model
learns from all labels, and PPO begins at SFT with the same settings. The recipe is `recipes/rounds.yaml` with the
demo's model and data. The price of KL may change by a fifth in an iteration, so that both come near the same target
(`--target`); how near is printed.

Printed by seed: the true reward of the policies on 100 held-out messages, four answers each; the difference with its
95 % interval over messages; the best mean of five iterations that each arm had on its training prompts (`peak`), where
a run that knew the truth would have stopped; the KL to SFT at the end; and the accuracy of each arm's reward model on
its own policy's answers: of two answers to a message that differ in truth, how often it likes the better one. In the
end, of each arm, what its answers do wrong and what its last labels are worth: how far apart in truth the two answers
of a label are, and how often the label is right; and the mean difference with Student's interval over seeds (exit code
0 where it is above 0).

    python benchmarks/rounds.py [--seeds 1 2 3 4 5 6 7 8] [--labels 200] [--epochs 3] [--iterations 24] [--target 8]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from kedge.core.files import write_text
from kedge.core.seeds import seed_for
from kedge.core.stats import bootstrap_mean, student_interval
from kedge.demo.recipe import write_demo
from kedge.demo.truth import read_reply, true_preference
from kedge.demo.world import Sizes
from kedge.recipe.runner import run_in
from kedge.recipe.schema import load_recipe
from kedge.recipe.templates import template_folder

SIZES = Sizes(demonstrations=6000, pairs=10, prompts=2000, heldout=100)
ANSWERS = 4
"""To each held-out message, so that the answers of a policy can be held against each other."""
ARMS = {"half": "round 1 of 2", "one": "one round", "two": "two rounds"}
STAGES = {"half": "two/round-1", "one": "one", "two": "two/round-2"}
"""Where the stages of each arm are."""
ASKED = {"half": "two/round-1/ask", "one": "one/again", "two": "two/round-2/ask"}
"""Which stage made its last labels."""
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
Row = dict[str, Any]


def main() -> None:
    args = parse()
    start = time.process_time()
    print("seed    SFT    half     one     two   difference, 95 %           peak         KL       accuracy", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        rows = [tell(compare(seed, args, (args.folder or Path(scratch)) / str(seed))) for seed in args.seeds]
    for arm, words in ARMS.items():
        print(f"{words}: {', '.join(f'{name} {mean:.2f}' for name, mean in means(rows, arm).items())}")
    print(f"two rounds − one, {2 * args.labels} labels each: {over_seeds([row['gap'] for row in rows])}")
    peaks = [row["two"]["peak"] - row["one"]["peak"] for row in rows]
    print(f"the same at the peaks, for who knows the truth: {over_seeds(peaks)}")
    accuracies = [row["two"]["accuracy"] - row["one"]["accuracy"] for row in rows]
    print(f"accuracy on the final policy's answers, two − one: {over_seeds(accuracies)}")
    print(f"{(time.process_time() - start) / 60:.1f} minutes of one core")
    sys.exit(student_interval([row["gap"] for row in rows])[1] <= 0)


def over_seeds(differences: Sequence[float]) -> str:
    mean, low, high = student_interval(differences)
    ahead = sum(difference > 0 for difference in differences)
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}], above 0 on {ahead} of {len(differences)} seeds"


def means(rows: Sequence[Row], arm: str) -> dict[str, float]:
    """What the report says of an arm, each the mean over seeds."""
    return {name: fmean(row[arm][name] for row in rows) for name in rows[0][arm]}


def tell(row: Row) -> Row:
    """Print a seed's line as soon as it is known; of two figures the first is of one round."""
    low, high = row["interval"]
    half, one, two = (row[arm] for arm in ("half", "one", "two"))
    print(
        f"{row['seed']:>4} {row['sft']:>6.2f} {half['gold']:>7.2f} {one['gold']:>7.2f} {two['gold']:>7.2f} "
        f"{row['gap']:>+7.2f} [{low:+.2f}, {high:+.2f}]   {one['peak']:>5.2f} {two['peak']:>5.2f}  "
        f"{one['KL']:>5.1f} {two['KL']:>5.1f}  {one['accuracy']:>6.2f} {two['accuracy']:.2f}",
        flush=True,
    )
    return row


def compare(seed: int, args: argparse.Namespace, folder: Path) -> Row:
    """Both arms of one seed."""
    write_demo(folder, seed, SIZES)
    write_text(folder / "people.py", PEOPLE)
    runs, recipe = folder / "runs", template_folder() / "rounds.yaml"
    settings = {**in_the_demo_s_world(folder), **spending(folder, args)}
    run_in(runs / "two", load_recipe(recipe, {**settings, **rounds(seed)}), is_resumed=False, say=quiet)
    sft = str(runs / "two/round-1/sft/model")
    run_in(runs / "one", load_recipe(recipe, {**settings, **alone(seed, sft, settings)}), is_resumed=False, say=quiet)
    if labels_of(runs / "one") != labels_of(runs / "two/round-1"):
        raise AssertionError(f"seed {seed}: the arms were to share their first labels, and do not")
    return figures_of_seed(seed, runs)


def figures_of_seed(seed: int, runs: Path) -> Row:
    """What is said of a seed whose runs are done."""
    answers = {arm: read_lines(runs / stage / "eval/answers.jsonl") for arm, stage in STAGES.items()}
    gaps = truth(answers["two"], "ppo") - truth(answers["one"], "ppo")
    by_message = gaps.reshape(-1, ANSWERS).mean(axis=1)
    return {
        "seed": seed,
        "sft": truth(answers["half"], "sft").mean(),
        "gap": gaps.mean(),
        "interval": bootstrap_mean(by_message, seed=seed),
        **{arm: figures(runs, arm, answers[arm]) for arm in ARMS},
    }


def rounds(seed: int) -> dict[str, Any]:
    """Two rounds, whatever they drift: it is measured on a few prompts, for the evaluation has them all."""
    limits = {f"rounds.drift.limits.{name}": None for name in NO_LIMITS}
    stop = {"rounds.stop": {"gate": None, "drift": None}}
    return {"seed": seed, "rounds.keep.weight_halves_after": None, "rounds.drift.count": 4, **limits, **stop}


def alone(seed: int, sft: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One round by the seed of round 1, which gives its labels again; `again` asks for as many more."""
    again = {
        "kind": "evaluate",
        "models": [sft],
        "answers": 4,
        "prompts": settings["stages.ask.prompts"],
        "reward": {"kind": "function", "path": settings["stages.ask.reward.path"]},
        "max_new_tokens": settings["stages.ask.max_new_tokens"],
        "rows": settings["stages.ask.rows"],
    }
    return {
        "rounds": None,
        "seed": seed_for(seed, "round", 1),
        "stages.ask.models": [sft],
        "stages.again": again,
        "stages.prepare.files": ["ask.pairs", "again.pairs"],
        "stages.reward.from": sft,
        "stages.ppo.from": sft,
        "stages.eval.models": [sft, "ppo"],
        # The stage stays in the recipe, and is not needed: one step of it.
        "stages.sft.max_steps": 1,
        "stages.sft.data": {"file": settings["stages.sft.data"], "limit": 32},
    }


def in_the_demo_s_world(folder: Path) -> dict[str, Any]:
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
        "ppo.epochs": 1,
        "ppo.micro_batch": 64,
        "ppo.max_prompt_tokens": 48,
        "ppo.critic_warmup": 0,
        "ppo.memory": {},
        "ppo.sampling": {"max_new_tokens": 60},
        "ppo.loss": {"policy": {"stop_at_kl": 0.1}, "value": {"clip": None}},
        "ppo.actor": {"lr": 8e-4, "schedule": "linear", "warmup": 0, "eps": 1e-5},
        "ppo.critic": {"lr": 1.5e-3, "schedule": "constant", "warmup": 0, "eps": 1e-5},
        "ppo.checkpoints.every": 1000,
        "eval.models": ["sft", "ppo"],
        "eval.gold": gold,
        "eval.prompts": str(folder / "data/heldout-prompts.jsonl"),
        "eval.answers": ANSWERS,
        "eval.max_new_tokens": 60,
        "eval.rows": 100,
    }
    top = {"model": str(folder / "model"), "device": "cpu"}
    return {**top, **{f"stages.{name}": value for name, value in stages.items()}}


def spending(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Labels of a round, and how far PPO goes with them."""
    return {
        "stages.reward.epochs": args.epochs,
        "stages.ask.prompts": {"file": str(folder / "data/prompts.jsonl"), "limit": args.labels},
        "stages.ppo.iterations": args.iterations,
        # The price follows the target closely: both arms are to be as far from SFT, whatever the scale of their scores.
        "stages.ppo.kl": {"start": args.start, "target": args.target, "horizon": 64, "limit": None, "on_limit": "stop"},
    }


def labels_of(run: Path) -> list[tuple[str, str]]:
    """Both answers of each label that the stage `ask` made."""
    rows = read_lines(run / "ask/pairs.jsonl")
    return [(row["chosen"][-1]["content"], row["rejected"][-1]["content"]) for row in rows]


def read_lines(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def truth(answers: Sequence[Row], name: str) -> Any:
    """The true reward of each answer of the policy (`ppo`), or of the other model, in the order of the prompts."""
    return np.array([row["scores"]["gold"] for row in answers if (row["model"] == "ppo") == (name == "ppo")])


def figures(runs: Path, arm: str, answers: Sequence[Row]) -> dict[str, float]:
    """What is said of an arm."""
    metrics = read_lines(runs / STAGES[arm] / "ppo/metrics.jsonl")
    return {
        "gold": truth(answers, "ppo").mean(),
        "peak": peak([row["gold/mean"] for row in metrics]),
        "KL": fmean(row["kl/mean"] for row in metrics[-3:]),
        "accuracy": accuracy(answers),
        **faults(answers),
        **worth(read_lines(runs / ASKED[arm] / "pairs.jsonl")),
    }


def worth(pairs: Sequence[Row]) -> dict[str, float]:
    """How far apart in truth the two answers of a label are, and the share of the labels that are right: the better
    one was preferred. The others were mistaken, or the two are equally good."""
    gaps = [
        true_preference(pair["prompt"][-1]["content"], pair["chosen"][-1]["content"])
        - true_preference(pair["prompt"][-1]["content"], pair["rejected"][-1]["content"])
        for pair in pairs
    ]
    return {"labels apart": fmean(map(abs, gaps)), "labels right": fmean(gap > 0 for gap in gaps)}


def accuracy(answers: Sequence[Row]) -> float:
    """Of two answers of the policy to one message that differ in truth, how often the reward model likes the better
    one; 0.5 where no two differ."""
    scores: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in answers:
        if row["model"] == "ppo":
            scores[row["origin"]].append((row["scores"]["gold"], row["scores"]["reward"]))
    pairs = [pair for own in scores.values() for pair in combinations(own, 2) if pair[0][0] != pair[1][0]]
    return fmean((a[0] > b[0]) == (a[1] > b[1]) for a, b in pairs) if pairs else 0.5


def faults(answers: Sequence[Row], policy: str = "ppo") -> dict[str, float]:
    """What the policy's answers do wrong, each as a mean over answers."""
    readings = [read_reply(row["prompt"][-1]["content"], row["answer"]) for row in answers if row["model"] == policy]
    return {
        "facts missing": fmean(list(reading.facts.values()).count("missing") for reading in readings),
        "facts wrong": fmean(list(reading.facts.values()).count("wrong") for reading in readings),
        "nonsense": fmean(reading.counts["nonsense"] for reading in readings),
        "repeated": fmean(reading.num_repeated for reading in readings),
        "courtesies": fmean(reading.counts["courtesy"] for reading in readings),
        "no closing": fmean(not reading.is_signed for reading in readings),
    }


def peak(gold: Sequence[float]) -> float:
    """The best mean of five in a row."""
    return max(fmean(gold[at : at + 5]) for at in range(len(gold) - 4))


def quiet(_: str) -> None:
    """Nothing is said."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--labels", type=int, default=200, help="of each half; both arms have two halves")
    parser.add_argument("--epochs", type=float, default=3.0, help="of the reward model, over its labels")
    parser.add_argument("--iterations", type=int, default=24, help="of PPO, each time")
    parser.add_argument("--start", type=float, default=0.1, help="the price of KL at first")
    parser.add_argument("--target", type=float, default=8.0, help="steer KL to SFT towards this, in nats")
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
