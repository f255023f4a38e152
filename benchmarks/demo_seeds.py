"""The demo for several seeds: win rate of PPO over SFT by the truth, KL against its limit, reward model, seconds.

Seconds are of the processor, on one thread, so that other work on the machine does not count. A seed fails where the
win rate is below 0.70, an iteration's KL above the limit (the run went back then), the reward model more than 3
points from the best possible accuracy, or an event fatal; with --overoptimise, where no event says that truth falls.

    python benchmarks/demo_seeds.py [--seeds 1 2 3 4 5] [--overoptimise] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kedge.commands.demo import run_demo
from kedge.demo.world import best_accuracy

LEAST_WINS, MOST_POINTS = 0.70, 0.03


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as scratch:
        rows = [run_seed(seed, (args.folder or Path(scratch)) / str(seed), args.overoptimise) for seed in args.seeds]
    titles = list(rows[0])
    print("  ".join(f"{title:>14}" for title in titles))
    for row in rows:
        print("  ".join(f"{row[title]:>14}" for title in titles))
    sys.exit(any(row["verdict"] != "ok" for row in rows))


def run_seed(seed: int, folder: Path, is_overoptimised: bool) -> dict[str, Any]:
    """Run the demo with one seed; the row of the table."""
    start = time.process_time()
    home = run_demo(
        folder,
        seed,
        tell=lambda text, _: print(f"[{seed}] {text}", flush=True),
        version="overoptimised" if is_overoptimised else "plain",
    )
    seconds = time.process_time() - start
    evaluation = json.loads((home / "eval" / "evaluation.json").read_text())
    metrics = read_rows(home / "ppo" / "metrics.jsonl")
    events = [event for stage in ("sft", "reward", "ppo", "eval") for event in read_rows(home / stage / "events.jsonl")]
    settings = json.loads((home / "ppo" / "run.json").read_text())["settings"]
    wins = evaluation["comparisons"]["ppo"]["gold"]["win_rate"]
    points = best_possible(home) - json.loads((home / "reward" / "reward-report.json").read_text())["accuracy"]["value"]
    most_kl, limit = max(row["kl/mean"] for row in metrics), settings["kl"]["limit"]
    fatal = sum(event["level"] == "fatal" for event in events)
    rollbacks = sum(event["code"] == "kl.rollback" for event in events)
    falls = [event["step"] for event in events if event["code"] == "reward.gold_falls"]
    gold = [row["gold/mean"] for row in metrics]
    is_good = (
        bool(falls)
        if is_overoptimised
        else wins["rate"] >= LEAST_WINS and most_kl <= limit and not rollbacks and points <= MOST_POINTS and not fatal
    )
    return {
        "seed": seed,
        "win rate": f"{wins['rate']:.3f}",
        "interval": f"[{wins['low']:.2f}, {wins['high']:.2f}]",
        "truth SFT": f"{evaluation['models']['sft']['scores']['gold']['mean']['mean']:.2f}",
        "truth PPO": f"{evaluation['models']['ppo']['scores']['gold']['mean']['mean']:.2f}",
        "best, last": f"{max(gold):.2f}, {gold[-1]:.2f}",
        "most KL": f"{most_kl:.2f}" + (f" of {limit:g}" if limit else ""),
        "rollbacks": rollbacks,
        "reward, points": f"{100 * points:.1f}",
        "fatal": fatal,
        "gold falls at": falls[0] if falls else "–",
        "CPU s": f"{seconds:.0f}",
        "verdict": "ok" if is_good else "FAILS",
    }


def best_possible(home: Path) -> float:
    """The accuracy of a perfect reward model on the held-out labels."""
    heldout = read_rows(home / "prepare" / "data" / "heldout.jsonl")
    return best_accuracy([{side: turns[-1]["content"] for side, turns in row.items()} for row in heldout])


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--overoptimise", action="store_true")
    parser.add_argument("--folder", type=Path, help="keep the runs there; else they are thrown away")
    return parser.parse_args()


if __name__ == "__main__":
    main()
