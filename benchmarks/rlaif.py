"""RLAIF two ways from one recipe, where the truth is known: a reward model distilled from a judge, or the judge itself.

    python benchmarks/rlaif.py [--seeds 1 2 3] [--small] [--folder DIR]

recipes/rlaif.yaml in the demo's world: `sft` imitates a shop's staff, good and bad. A simulated judge of known skill
(`simulated_ai.SimulatedJudge`, 0.85) stands behind OpenAI's protocol on this machine. `distilled` is PPO against a
reward model that learnt from the judge's comparisons, `direct` is PPO against its grades (d-RLAIF, Lee et al. 2023).
Nobody is told the truth; by it, a reply to a held-out message is good where its true preference is at least 3 of 5.
Printed: the share of good replies with Wilson's 95 % interval a seed, changes with Student's over seeds, the true
preference, KL from `sft`, wins over it by the judge, and what each way was paid, at 0.15 and 0.60 USD for a million
tokens (words, here).

Exit code 1 where one of the two ways has not made replies better, by the interval over seeds, or where the server
answered other calls than were paid.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any

from kedge.commands.compare import compare_runs
from kedge.core.stats import student_interval, wilson
from kedge.demo.recipe import write_demo
from kedge.demo.truth import true_preference
from kedge.demo.world import Sizes
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from seeded import run_seeds
from simulated_ai import SimulatedJudge, serving

RECIPE = Path(__file__).parents[1] / "recipes/rlaif.yaml"
MODELS = ("sft", "distilled", "direct")
SKILL = 0.85
GOOD = 3.0
PRICES = "{usd: 100, input: 0.15, output: 0.6}"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Rows of each kind, and iterations of PPO."""

    demonstrations: int = 8000
    prompts: int = 500
    heldout: int = 300
    iterations: int = 14


SMALL = Scale(demonstrations=3000, prompts=120, heldout=60, iterations=5)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One model of one seed."""

    good: int
    replies: int
    truth: float
    kl: float
    wins: float | None
    calls: int
    usd: float

    @property
    def share(self) -> float:
        return self.good / self.replies


@dataclass(frozen=True, kw_only=True)
class SeedResult:
    models: Mapping[str, Measured]
    right: float
    """The share of the judge's labels that the truth agrees with."""
    answered: int
    paid: int
    """Calls that the server answered, and that the run's ledgers have as paid, those of the evaluation included."""


def main() -> int:
    results = run_seeds("RLAIF two ways, in the demo's world.", run_seed, table, whole=Scale(), small=SMALL)
    is_better = len(results) < 2 or all(low > 0 for _, low, _ in changes(results).values())
    return 0 if is_better and all(result.answered == result.paid for result in results) else 1


def run_seed(seed: int, folder: Path, scale: Scale) -> SeedResult:
    """The whole recipe with one seed."""
    os.environ["KEDGE_CACHE"] = str(folder / "cache")  # nothing is paid by an earlier run
    sizes = Sizes(demonstrations=scale.demonstrations, pairs=50, prompts=scale.prompts, heldout=scale.heldout)
    write_demo(folder, seed, sizes)
    recipe = Path(shutil.copy(RECIPE, folder))
    log = StringIO()
    with serving(SimulatedJudge(skill=SKILL, seed=seed).reply) as served, redirect_stdout(log):
        settings = load_recipe(recipe, changed(seed, scale, served.url))
        home = run_recipe(settings, folder / "runs", is_resumed=False, say=print)
    (folder / "log.txt").write_text(log.getvalue())
    result = measured(home, answered=served.calls)
    print(
        f"[{seed}] {result.right:.1%} of the judge's labels are right by the truth; "
        f"{result.answered:,} calls answered, {result.paid:,} paid",
        flush=True,
    )
    return result


def changed(seed: int, scale: Scale, url: str) -> list[str]:
    """What of the recipe is other than shipped: the world, its sizes and rates, and the judge's address."""
    judges = ("ai.by", "direct.reward", "eval.judge")
    sampled = ("distilled.sampling", "direct.sampling", "tasks", "eval")
    gold = "{kind: function, path: gold.py:score}"
    stages = {
        **{f"{judge}.{name}": value for judge in judges for name, value in (("url", url), ("key_variable", "null"))},
        **{f"{judge}.budget": PRICES for judge in judges},
        **{f"{place}.temperature": 0.8 for place in sampled},
        **{f"{place}.max_new_tokens": 60 for place in sampled},
        **{f"{ppo}.iterations": scale.iterations for ppo in MODELS[1:]},
        **{f"{ppo}.actor.lr": 5e-4 for ppo in MODELS[1:]},
        **{f"{ppo}.critic.lr": 1e-3 for ppo in MODELS[1:]},
        **{f"{stage}.gold": gold for stage in (*MODELS[1:], "eval")},
        "sft.epochs": 1,
        "sft.samples": 0,
        "sft.optimiser.lr": 5e-3,
        "sft.optimiser.beta2": 0.98,
    }
    return [
        f"seed={seed}",
        "model=./model",
        "device=cpu",
        *(f"stages.{name}={value}" for name, value in stages.items()),
    ]


def measured(home: Path, *, answered: int) -> SeedResult:
    rows = _rows(home / "eval/answers.jsonl")
    compared = {row["label"]: row for row in compare_runs([home / name for name in MODELS[1:]]).as_dict()["runs"]}
    models: dict[str, Measured] = {}
    for model in MODELS:
        truths = [true_preference(_message(row), row["answer"]) for row in rows if row["model"] == model]
        numbers = compared[model]["numbers"]
        models[model] = Measured(
            good=sum(truth >= GOOD for truth in truths),
            replies=len(truths),
            truth=fmean(truths),
            kl=numbers["kl"]["value"],
            wins=numbers["wins_judge"]["value"] if "wins_judge" in numbers else None,
            calls=int(numbers.get("calls", {"value": 0})["value"]),
            usd=numbers.get("usd", {"value": 0.0})["value"],
        )
    pairs = [*_rows(home / "ai/pairs.jsonl"), *_rows(home / "ai/heldout.jsonl")]
    gaps = [_truth_of(row, "chosen") - _truth_of(row, "rejected") for row in pairs]
    ledgers = home.rglob("calls/**/*.jsonl")
    paid = sum("paid" in row for ledger in ledgers for row in _rows(ledger))
    return SeedResult(
        models=models, right=sum((gap > 0) + 0.5 * (gap == 0) for gap in gaps) / len(gaps), answered=answered, paid=paid
    )


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _message(row: Mapping[str, Any]) -> str:
    prompt = row["prompt"]
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def _truth_of(row: Mapping[str, Any], name: str) -> float:
    answer = row[name]
    return true_preference(_message(row), answer if isinstance(answer, str) else answer[-1]["content"])


def changes(results: Sequence[SeedResult]) -> dict[str, tuple[float, float, float]]:
    """By model, the change of the share of good replies since `sft`: mean over seeds, and Student's interval."""
    return {
        model: student_interval([own.models[model].share - own.models["sft"].share for own in results])
        for model in MODELS[1:]
    }


def table(seeds: Sequence[int], results: Sequence[SeedResult]) -> str:
    head = f"{'good replies, by the truth':<28}" + "".join(f"{f'seed {seed}':>24}" for seed in seeds) + f"{'mean':>9}"
    lines = [head]
    for model in MODELS:
        own = [result.models[model] for result in results]
        bounds = [wilson(one.good, one.replies) for one in own]
        cells = [f"{one.share:.1%} [{low:.1%}, {high:.1%}]" for one, (low, high) in zip(own, bounds, strict=True)]
        lines.append(f"{model:<28}" + "".join(f"{cell:>24}" for cell in cells) + f"{fmean(o.share for o in own):>9.1%}")
    lines.append(f"{'mean over seeds':<28}{'truth, of 5':>12}{'KL':>8}{'wins, judge':>13}{'calls':>8}{'USD':>9}")
    for model in MODELS:
        own = [result.models[model] for result in results]
        wins = [one.wins for one in own if one.wins is not None]
        won = f"{fmean(wins):.1%}" if wins else "–"
        numbers = f"{fmean(one.truth for one in own):>12.2f}{fmean(one.kl for one in own):>8.2f}{won:>13}"
        costs = f"{fmean(one.calls for one in own):>8,.0f}{fmean(one.usd for one in own):>9.4f}"
        lines.append(f"{model:<28}{numbers}{costs}")
    gaps = {**changes(results), "direct − distilled": student_interval(_direct_gaps(results))}
    for name, (mean, low, high) in gaps.items():
        over = f" [{100 * low:+.1f}, {100 * high:+.1f}] over seeds" if len(results) > 1 else ""
        lines.append(f"good replies, {'change of ' if name in MODELS else ''}{name}: {100 * mean:+.1f} points{over}")
    return "\n".join(lines)


def _direct_gaps(results: Sequence[SeedResult]) -> list[float]:
    return [result.models["direct"].share - result.models["distilled"].share for result in results]


if __name__ == "__main__":
    sys.exit(main())
