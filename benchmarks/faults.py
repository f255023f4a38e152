"""Real small runs with planted faults, and healthy ones: the alarms of the detectors, and the diagnosis of the doctor.

    python benchmarks/faults.py [FOLDER] [--seeds 9 10] [--only TEXT] [--again]    about half an hour on one core

The shop of `kedge demo`: one SFT and one reward model a seed, then one short run a case: faults that the rules were set
by and those that outside trials planted (`planted_faults.py`), and fifteen that no rule was set by
(`unseen_faults.py`), each with its own rate. Runs stay in FOLDER and are not made twice; `--again` only diagnoses them.
Exit code 1 when a fault that the rules know is missed or diagnosed as another one, or there is more than one false
warning in ten healthy runs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any, cast

import torch

from kedge.commands.doctor import history_of
from kedge.core.errors import KedgeError
from kedge.core.stats import wilson
from kedge.demo.recipe import HEAD, PREPARE, REWARD, SFT, write_demo
from kedge.monitor.doctor import diagnose
from kedge.monitor.doctor.ppo import replay_detectors
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.runs.folder import status_of
from kedge.runs.manifest import MANIFEST_NAME
from planted_faults import FAULTS, HEALTHY, REWARDS, TRIED, Case, planted
from unseen_faults import UNSEEN

STAGE: dict[str, Any] = {
    "kind": "ppo",
    "gold": {"kind": "function", "path": "gold.py:score"},
    "prompts": "data/prompts.jsonl",
    "roles": "separate",
    "memory": {"dtype": "float32"},
    "iterations": 30,
    "batch": 32,
    "minibatches": 2,
    "micro_batch": 32,
    "max_prompt_tokens": 48,
    "sampling": {"max_new_tokens": 60},
    "kl": {"start": 0.5},
    "loss": {"value": {"clip": None}},
    "actor": {"lr": 4e-4, "schedule": "constant", "warmup": 0, "eps": 1e-5},
    "critic": {"lr": 1e-3, "schedule": "constant", "warmup": 0, "eps": 1e-5},
    "logging": {"every": 10},
    "checkpoints": {"every": 1000},
}
"""A healthy run, which the cases change."""
RANDOM_LABELS: dict[str, Any] = {
    "data": "data/coins-train.jsonl",
    "heldout": "data/coins-heldout.jsonl",
    "batch": 16,
    "micro_batch": 16,
    "max_length": 128,
    "if_unfit": "go_on",
    "eval": {"every": 1000},
    "checkpoints": {"every": 1000},
    "optimiser": {"lr": 1e-3, "beta2": 0.98},
}
"""A reward model on labels at random."""


MOST_CODES = 3
"""Warnings of a run that the table shows; the first ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The alarms and the diagnosis of one run."""

    case: Case
    seed: int
    alarms: Mapping[str, int]
    """Warnings by code, each with its first step."""
    named: str
    """The doctor's first cause; empty where the run is healthy by its diagnosis."""
    second: str = ""
    """The cause after it; empty where there is none."""

    @property
    def is_right(self) -> bool:
        return self.named == self.case.cause


def make_base(folder: Path, seed: int) -> Path:
    """The world of one seed with its SFT and reward model, made once; gives the folder that its recipes stand in."""
    home = folder / f"seed-{seed}"
    recipe = home / "base.yaml"
    if not recipe.exists():
        write_demo(home, seed)
        (home / "rewards.py").write_text(REWARDS)
        recipe.write_text(HEAD.format(seed=seed, name="base") + "\n".join((PREPARE, SFT, REWARD)))
    runs = home / "runs"
    run_recipe(load_recipe(recipe), runs, is_resumed=(runs / "base").exists(), say=_quietly)
    for part in ("train", "heldout"):
        pairs = runs / f"base/prepare/data/{part}.jsonl"
        (home / f"data/coins-{part}.jsonl").write_text(with_random_labels(pairs, seed))
    return home


def stage_folder(home: Path, case: Case) -> Path:
    """The folder of the case's one stage."""
    return home / "runs" / re.sub(r"\W+", "-", case.name.lower()) / "improve"


def has_ended(stage: Path) -> bool:
    return (stage / MANIFEST_NAME).exists() and status_of(stage) in ("done", "failed", "stopped")


def make_run(home: Path, case: Case, seed: int) -> None:
    """Run the case, or resume it where it was interrupted. A run that fails is diagnosed like any other."""
    name = stage_folder(home, case).parent.name
    settings = settings_of(home, case)
    recipe = home / f"{name}.yaml"
    head = {"kedge": 1, "name": name, "seed": seed, "model": "./model", "device": "cpu"}
    recipe.write_text(json.dumps(head | {"stages": {"improve": settings}}))
    with planted(case):
        try:
            is_begun = (home / "runs" / name / MANIFEST_NAME).exists()
            run_recipe(load_recipe(recipe), home / "runs", is_resumed=is_begun, say=_quietly)
        except KedgeError as error:
            print(f"  {case.name}: {error}")


def settings_of(home: Path, case: Case) -> dict[str, Any]:
    base = {"from": str(home / "runs/base/sft/model")}
    if case.settings.get("kind") == "reward":
        return merged(base | RANDOM_LABELS, case.settings)
    settings = merged(STAGE | base | {"reward": str(home / "runs/base/reward/model")}, case.settings)
    only_ppo = ("critic", "loss") if settings["kind"] == "group" else ()
    return {key: value for key, value in settings.items() if key not in only_ppo}


def with_random_labels(pairs: Path, seed: int) -> str:
    """The same pairs with labels at random."""
    rng, rows = Random(seed), [json.loads(line) for line in pairs.read_text().splitlines()]
    for row in rows:
        if rng.random() < 0.5:
            row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    return "".join(json.dumps(row) + "\n" for row in rows)


def outcome_of(stage: Path, case: Case, seed: int) -> Outcome:
    history = history_of(stage)
    alarms: dict[str, int] = {}
    for alarm in replay_detectors(history):
        if alarm.level != "info":
            alarms.setdefault(alarm.code, alarm.step)
    causes = diagnose(history).causes
    named, second = [*(cause.code for cause in causes), "", ""][:2]
    return Outcome(case=case, seed=seed, alarms=alarms, named=named, second=second)


CASES = UNSEEN
"""For programs that count what was tried and what held."""


def attempt(case: Case, *, folder: Path, seed: int = 9) -> str | None:
    """Make the run of a case below `folder` where it is not there; None where the doctor names the fault."""
    home = make_base(folder, seed)
    if not has_ended(stage := stage_folder(home, case)):
        make_run(home, case, seed)
    outcome = outcome_of(stage, case, seed)
    return None if outcome.is_right else f"{case.name} is {case.cause}, and was called {outcome.named or 'healthy'}"


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Sections are merged, anything else is replaced."""
    result = dict(settings)
    for key, value in changes.items():
        old = result.get(key)
        is_section = isinstance(old, dict) and isinstance(value, Mapping)
        result[key] = merged(cast("dict[str, Any]", old), value) if is_section else value
    return result


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A row a fault, then one a healthy run."""
    seeds = sorted({outcome.seed for outcome in outcomes})
    for title, are_faulty in (("fault", True), ("healthy run", False)):
        rows = [outcome for outcome in outcomes if bool(outcome.case.cause) == are_faulty]
        if not rows:
            continue
        yield f"| {title} | " + " | ".join(f"seed {seed}: warnings at step, named" for seed in seeds) + " |"
        yield "|---|" + "---|" * len(seeds)
        for name in dict.fromkeys(outcome.case.name for outcome in rows):
            by_seed = {outcome.seed: outcome for outcome in rows if outcome.case.name == name}
            yield f"| {name} | " + " | ".join(_cell(by_seed.get(seed)) for seed in seeds) + " |"
        yield ""


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "–"
    in_order = sorted(outcome.alarms.items(), key=lambda pair: pair[1])
    warnings = [f"`{code}` {step}" for code, step in in_order[:MOST_CODES]]
    warnings += [f"{more} more"] if (more := len(in_order) - MOST_CODES) > 0 else []
    named = f"**{outcome.named}**" if outcome.named else "healthy"
    return f"{', '.join(warnings) or 'none'}; {named}" + ("" if outcome.is_right else " (wrong)")


def verdict(outcomes: Sequence[Outcome]) -> tuple[list[str], bool]:
    """The rates, each kind of case in a line, and whether they are good enough. Unseen faults are reported, not judged:
    they would not be unseen for long."""
    unseen = {case.name for case in UNSEEN}
    faulty = [outcome for outcome in outcomes if outcome.case.cause]
    known = [outcome for outcome in faulty if outcome.case.name not in unseen]
    healthy = [outcome for outcome in outcomes if not outcome.case.cause]
    num_false = sum(bool(outcome.alarms) for outcome in healthy)
    lines = [
        rates("faults that rules were set by", [outcome for outcome in known if outcome.case not in TRIED]),
        rates("faults that trials planted", [outcome for outcome in known if outcome.case in TRIED]),
        rates("unseen faults", [outcome for outcome in faulty if outcome.case.name in unseen]),
        f"healthy runs: {share(num_false, len(healthy))} with a warning",
    ]
    return lines, all(outcome.is_right for outcome in known) and 10 * num_false <= len(healthy)


def rates(what: str, outcomes: Sequence[Outcome]) -> str:
    num_right = sum(outcome.is_right for outcome in outcomes)
    num_second = sum(outcome.second == outcome.case.cause for outcome in outcomes)
    num_missed = sum(not outcome.named for outcome in outcomes)
    num_wrong = len(outcomes) - num_right - num_second - num_missed
    return f"{what}: {share(num_right, len(outcomes))} named right, {num_second} second, {num_wrong} misnamed, " + (
        f"{num_missed} missed"
    )


def share(count: int, total: int) -> str:
    """A share with its 95 % interval (Wilson).

    >>> share(9, 10)
    '9 of 10 (60 to 98 %)'
    """
    if not total:
        return "0 of 0"
    low, high = wilson(count, total)
    return f"{count} of {total} ({100 * low:.0f} to {100 * high:.0f} %)"


def _quietly(_: str) -> None:
    """Progress of the runs is not printed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="where the runs are, or will be; else a temporary one")
    parser.add_argument("--seeds", type=int, nargs="+", default=[9, 10])
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--again", action="store_true", help="diagnose the runs that are there, and make none")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = (args.folder or Path(mkdtemp(prefix="faults-"))).resolve()
    outcomes = list[Outcome]()
    for seed in args.seeds:
        home = folder / f"seed-{seed}" if args.again else make_base(folder, seed)
        for case in (*FAULTS, *TRIED, *UNSEEN, *HEALTHY):
            start, stage = time.process_time(), stage_folder(home, case)
            if args.only not in case.name or (args.again and not has_ended(stage)):
                continue
            if not has_ended(stage):
                make_run(home, case, seed)
            outcomes.append(outcome_of(stage, case, seed))
            print(f"{seed} {case.name}: {time.process_time() - start:.0f} s, {_cell(outcomes[-1])}", flush=True)
    summary, is_good = verdict(outcomes)
    print("\n".join(("", *table(outcomes), *summary, f"runs in {folder}")))
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
