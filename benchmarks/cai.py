"""Constitutional AI end to end in the demo's world, where the truth is known: do rude replies fall?

    python benchmarks/cai.py [--seeds 1 2 3] [--small] [--folder DIR]

A shop's staff are rude in 28 % of their replies. Each seed: `sft` imitates them; `revise` lets a simulated AI (skill
0.85, `simulated_ai.py`) criticise and rewrite the model's own replies by four principles of
recipes/rules/constitution.yaml; `sl-cai` imitates the revisions. Then RL-CAI: `tasks` draws pairs of new replies,
`label` asks the AI which is better by one principle each, `reward` learns from these pairs and from those of `revise`,
`ppo` improves on it. Nobody is told the truth. Rude replies to held-out messages are counted by it, with Wilson's 95 %
interval a seed, and changes with Student's over seeds.

Exit code 1 where the share of rude replies has not fallen, by the interval over seeds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any

from kedge.core.stats import student_interval, wilson
from kedge.demo.recipe import write_demo
from kedge.demo.truth import read_reply, true_preference
from kedge.demo.world import Sizes
from kedge.feedback.constitution import Principle, read_constitution
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from seeded import run_seeds
from simulated_ai import SimulatedAI, serving

CONSTITUTION = Path(__file__).parents[1] / "recipes/rules/constitution.yaml"
PRINCIPLES = ("rude", "facts", "answers-it", "plain")
"""Of the shipped ones: those that have something to say of a shop's replies."""
SKILL = 0.85
MODELS = ("sft", "sl-cai", "rl-cai")
TITLES = {"sft": "before", "sl-cai": "after SL-CAI", "rl-cai": "after RL-CAI"}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Rows of each kind."""

    demonstrations: int = 8000
    revised: int = 600
    compared: int = 1000
    heldout: int = 400
    iterations: int = 15


SMALL = Scale(demonstrations=3000, revised=200, compared=200, heldout=200, iterations=4)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of one model: rude replies of all, and the mean true preference."""

    rude: int
    replies: int
    truth: float

    @property
    def share(self) -> float:
        return self.rude / self.replies


def main() -> int:
    results = run_seeds(
        "Constitutional AI end to end, in the demo's world.", run_seed, table, whole=Scale(), small=SMALL
    )
    return 0 if len(results) < 2 or all(high < 0 for _, _, high in changes(results).values()) else 1


def run_seed(seed: int, folder: Path, scale: Scale) -> dict[str, Measured]:
    """The whole pipeline with one seed."""
    principles = [one for one in read_constitution(CONSTITUTION) if one.id in PRINCIPLES]
    with serving(SimulatedAI(principles=principles, skill=SKILL, seed=seed).reply) as served:
        recipe = write_recipe(folder, seed, scale, principles, served.url)
        log = StringIO()
        with redirect_stdout(log):
            home = run_recipe(load_recipe(recipe), folder / "runs", is_resumed=False, say=print)
        (folder / "log.txt").write_text(log.getvalue())
        print(f"[{seed}] {revise_line(home)}; {served.calls:,} calls answered", flush=True)
    return measured(home)


def write_recipe(folder: Path, seed: int, scale: Scale, principles: Sequence[Principle], url: str) -> Path:
    """Data, model, constitution and recipe as plain files."""
    prompts = scale.revised + scale.compared
    write_demo(
        folder, seed, Sizes(demonstrations=scale.demonstrations, pairs=50, prompts=prompts, heldout=scale.heldout)
    )
    rows = (folder / "data/prompts.jsonl").read_text().splitlines(keepends=True)
    (folder / "data/revised.jsonl").write_text("".join(rows[: scale.revised]))
    (folder / "data/compared.jsonl").write_text("".join(rows[scale.revised :]))
    (folder / "constitution.yaml").write_text(json.dumps({"principles": [asdict(one) for one in principles]}))
    file = folder / "cai.yaml"
    recipe = {"kedge": 1, "name": "cai", "seed": seed, "model": "./model", "device": "cpu"}
    file.write_text(json.dumps({**recipe, "stages": stages(scale, url)}, indent=1))
    return file


def stages(scale: Scale, url: str) -> dict[str, Any]:
    ai = {"url": url, "model": "simulated", "workers": 4}
    learning = {"batch": 16, "micro_batch": 16, "max_length": 128, "eval": {"every": 1000}, "samples": 0}
    learning |= {"checkpoints": {"every": 1000}}
    sampling = {"max_new_tokens": 60, "temperature": 0.8}
    return {
        "sft": {
            **learning,
            "kind": "sft",
            "data": "data/demonstrations.jsonl",
            "optimiser": {"lr": 5e-3, "beta2": 0.98},
        },
        "revise": {
            **sampling,
            "kind": "revise",
            "from": "sft",
            "by": ai,
            "prompts": "data/revised.jsonl",
            "constitution": "constitution.yaml",
            "times": 4,
            "safe": True,
        },
        "sl-cai": {
            **learning,
            "kind": "sft",
            "from": "sft",
            "data": "revise",
            "epochs": 3,
            "optimiser": {"lr": 1e-3, "beta2": 0.98},
        },
        "tasks": {
            **sampling,
            "kind": "tasks",
            "models": ["sft", "sl-cai"],
            "prompts": "data/compared.jsonl",
            "answers": 2,
            "heldout": 0.0,
        },
        "label": {
            "kind": "label",
            "data": "tasks",
            "by": {
                **ai,
                "kind": "judge",
                "constitution": "constitution.yaml",
                "trust": {"without": "simulated, with a known skill"},
            },
        },
        "prepare": {"kind": "data", "files": ["label", "revise.pairs"], "heldout": 0.15},
        "reward": {
            **{name: value for name, value in learning.items() if name != "samples"},
            "kind": "reward",
            "from": "sl-cai",
            "data": "prepare.train",
            "heldout": "prepare.heldout",
            "epochs": 3,
            "loss": {"length_control": "balance"},
            "optimiser": {"lr": 1e-3, "beta2": 0.98},
            "if_unfit": "go_on",  # a hundred held-out pairs are too few for a verdict; the truth will tell
        },
        "rl-cai": {
            "kind": "ppo",
            "from": "sl-cai",
            "reward": "reward",
            "prompts": "data/compared.jsonl",
            "roles": "separate",
            "iterations": scale.iterations,
            "batch": 64,
            "micro_batch": 64,
            "minibatches": 4,
            "max_prompt_tokens": 48,
            "sampling": sampling,
            "loss": {"policy": {"stop_at_kl": 0.03}, "value": {"clip": None}},
            "actor": {"lr": 5e-4, "schedule": "linear", "warmup": 0, "eps": 1e-5},
            "critic": {"lr": 1e-3, "schedule": "constant", "warmup": 0, "eps": 1e-5},
            "kl": {"start": 0.5, "target": 3.0, "horizon": 2000, "limit": 6.0, "on_limit": "rollback"},
        },
        "eval": {
            **sampling,
            "kind": "evaluate",
            "models": list(MODELS),
            "prompts": "data/heldout-prompts.jsonl",
        },
    }


def revise_line(home: Path) -> str:
    numbers = json.loads((home / "revise/revisions.json").read_text())
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in numbers["left_out"].items())
    return f"{numbers['kept']:,} of {numbers['prompts']:,} revisions kept ({left_out} left out)"


def measured(home: Path) -> dict[str, Measured]:
    rows = [json.loads(line) for line in (home / "eval/answers.jsonl").read_text().splitlines()]
    results: dict[str, Measured] = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [(_message(row), row["answer"]) for row in rows if row["model"] == model]
        rude = sum(read_reply(message, text).counts["rudeness"] > 0 for message, text in own)
        truth = fmean(true_preference(message, text) for message, text in own)
        results[model] = Measured(rude=rude, replies=len(own), truth=truth)
    return results


def _message(row: Mapping[str, Any]) -> str:
    prompt = row["prompt"]
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def changes(results: Sequence[Mapping[str, Measured]]) -> dict[str, tuple[float, float, float]]:
    """By model, the change of the share of rude replies since `sft`: mean over seeds, and Student's interval."""
    return {
        model: student_interval([own[model].share - own["sft"].share for own in results])
        for model in list(results[0])[1:]
    }


def table(seeds: Sequence[int], results: Sequence[Mapping[str, Measured]]) -> str:
    lines = [
        f"{'rude replies, by the truth':<28}" + "".join(f"{f'seed {seed}':>24}" for seed in seeds) + f"{'mean':>9}"
    ]
    for model in results[0]:
        cells = []
        for own in results:
            low, high = wilson(own[model].rude, own[model].replies)
            cells.append(f"{own[model].share:>8.1%} [{low:5.1%}, {high:5.1%}]")
        mean = fmean(own[model].share for own in results)
        lines.append(f"{TITLES[model]:<28}" + "".join(f"{cell:>24}" for cell in cells) + f"{mean:>9.1%}")
    lines.append(f"{'true preference, of 5':<28}")
    for model in results[0]:
        cells = "".join(f"{own[model].truth:>24.2f}" for own in results)
        lines.append(f"{TITLES[model]:<28}{cells}{fmean(own[model].truth for own in results):>9.2f}")
    for model, (mean, low, high) in changes(results).items():
        interval = f" [{100 * low:+.1f}, {100 * high:+.1f}] over seeds" if len(results) > 1 else ""
        lines.append(f"change {TITLES[model]}: {100 * mean:+.1f} points{interval}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
