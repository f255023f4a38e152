"""Real small runs with planted faults, and healthy ones: what the detectors say, and what the doctor calls it.

    python benchmarks/faults.py [FOLDER] [--seeds 7 8] [--only TEXT] [--again]    about twelve minutes on one core

The shop of `kedge demo`: one SFT and one reward model a seed, then one short run a case (`planted_faults.py`).
Runs stay in FOLDER and are not made twice; `--again` only diagnoses them. Exit code 1 when a fault is missed or called
by another name, or there is more than one false warning in ten healthy runs.
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
from kedge.demo.recipe import HEAD, PREPARE, REWARD, SFT, write_demo
from kedge.monitor.doctor import diagnose
from kedge.monitor.doctor.ppo import replay_detectors
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.runs.folder import status_of
from kedge.runs.manifest import MANIFEST_NAME
from planted_faults import FAULTS, HEALTHY, REWARDS, Case, planted

STAGE: dict[str, Any] = {
    "kind": "ppo",
    "gold": {"kind": "function", "path": "gold.py:score"},
    "prompts": "data/prompts.jsonl",
    "roles": "separate",
    "hold": {"dtype": "float32"},
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
    "watch": {"every": 10},
    "checkpoints": {"every": 1000},
}
"""A healthy run, which the cases change."""
COINS: dict[str, Any] = {
    "data": "data/coins-train.jsonl",
    "heldout": "data/coins-heldout.jsonl",
    "batch": 16,
    "micro_batch": 16,
    "max_length": 128,
    "if_unfit": "go_on",
    "look": {"every": 1000},
    "checkpoints": {"every": 1000},
    "optimiser": {"lr": 1e-3, "beta2": 0.98},
}
"""A reward model of labels that say nothing."""


MOST_CODES = 3
"""Warnings of a run that the table tells; the first ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was made of one run."""

    case: Case
    seed: int
    alarms: Mapping[str, int]
    """Warnings by code, each with its first step."""
    named: str
    """The doctor's first cause; empty where it found the run healthy."""

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
        (home / f"data/coins-{part}.jsonl").write_text(at_random(pairs, seed))
    return home


def place_of(home: Path, case: Case) -> Path:
    """The folder of the case's one stage."""
    return home / "runs" / re.sub(r"\W+", "-", case.name.lower()) / "improve"


def is_made(stage: Path) -> bool:
    return (stage / MANIFEST_NAME).exists() and status_of(stage) in ("done", "failed", "stopped")


def make_run(home: Path, case: Case, seed: int) -> None:
    """One that was interrupted goes on. How it ends is for the diagnosis to say."""
    name = place_of(home, case).parent.name
    settings = settings_of(home, case)
    recipe = home / f"{name}.yaml"
    about = {"kedge": 1, "name": name, "seed": seed, "model": "./model", "device": "cpu"}
    recipe.write_text(json.dumps(about | {"stages": {"improve": settings}}))
    with planted(case):
        try:
            is_begun = (home / "runs" / name / MANIFEST_NAME).exists()
            run_recipe(load_recipe(recipe), home / "runs", is_resumed=is_begun, say=_quietly)
        except KedgeError as error:
            print(f"  {case.name}: {error}")


def settings_of(home: Path, case: Case) -> dict[str, Any]:
    base = {"from": str(home / "runs/base/sft/model")}
    if case.settings.get("kind") == "reward":
        return merged(base | COINS, case.settings)
    found = merged(STAGE | base | {"reward": str(home / "runs/base/reward/model")}, case.settings)
    only_ppo = ("critic", "loss") if found["kind"] == "group" else ()
    return {key: value for key, value in found.items() if key not in only_ppo}


def at_random(pairs: Path, seed: int) -> str:
    """The same pairs, each label by the toss of a coin."""
    rng, rows = Random(seed), [json.loads(line) for line in pairs.read_text().splitlines()]
    for row in rows:
        if rng.random() < 0.5:
            row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    return "".join(json.dumps(row) + "\n" for row in rows)


def examined(stage: Path, case: Case, seed: int) -> Seen:
    history = history_of(stage)
    alarms: dict[str, int] = {}
    for alarm in replay_detectors(history):
        if alarm.level != "info":
            alarms.setdefault(alarm.code, alarm.step)
    causes = diagnose(history).causes
    return Seen(case=case, seed=seed, alarms=alarms, named=causes[0].code if causes else "")


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Sections are merged, anything else is replaced."""
    found = dict(settings)
    for key, value in changes.items():
        old = found.get(key)
        is_section = isinstance(old, dict) and isinstance(value, Mapping)
        found[key] = merged(cast("dict[str, Any]", old), value) if is_section else value
    return found


def table(seen: Sequence[Seen]) -> Iterator[str]:
    """A row a fault, then one a healthy run."""
    seeds = sorted({one.seed for one in seen})
    for title, are_faulty in (("fault", True), ("healthy run", False)):
        rows = [one for one in seen if bool(one.case.cause) == are_faulty]
        if not rows:
            continue
        yield f"| {title} | " + " | ".join(f"seed {seed}: warnings at step, named" for seed in seeds) + " |"
        yield "|---|" + "---|" * len(seeds)
        for name in dict.fromkeys(one.case.name for one in rows):
            by_seed = {one.seed: one for one in rows if one.case.name == name}
            yield f"| {name} | " + " | ".join(_cell(by_seed.get(seed)) for seed in seeds) + " |"
        yield ""


def _cell(one: Seen | None) -> str:
    if one is None:
        return "–"
    first = sorted(one.alarms.items(), key=lambda pair: pair[1])
    warnings = [f"`{code}` {step}" for code, step in first[:MOST_CODES]]
    warnings += [f"{more} more"] if (more := len(first) - MOST_CODES) > 0 else []
    named = f"**{one.named}**" if one.named else "healthy"
    return f"{', '.join(warnings) or 'none'}; {named}" + ("" if one.is_right else " (wrong)")


def verdict(seen: Sequence[Seen]) -> tuple[str, bool]:
    faulty = [one for one in seen if one.case.cause]
    healthy = [one for one in seen if not one.case.cause]
    caught, right = sum(bool(one.named) for one in faulty), sum(one.is_right for one in faulty)
    warnings = sum(len(one.alarms) for one in healthy)
    told = f"{caught} of {len(faulty)} faults found, {right} named right"
    is_good = right == len(faulty) and 10 * warnings <= len(healthy)
    return f"{told}; {warnings} warnings in {len(healthy)} healthy runs", is_good


def _quietly(_: str) -> None:
    """Of these runs only the end counts."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="where the runs are, or will be; else a temporary one")
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8])
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--again", action="store_true", help="diagnose the runs that are there, and make none")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    folder = (asked.folder or Path(mkdtemp(prefix="faults-"))).resolve()
    seen = list[Seen]()
    for place, seed in enumerate(asked.seeds):
        home = folder / f"seed-{seed}" if asked.again else make_base(folder, seed)
        # Every fault with every seed; the healthy runs are dealt out to the seeds.
        for case in (one for one in (*FAULTS, *HEALTHY[place :: len(asked.seeds)]) if asked.only in one.name):
            began, stage = time.process_time(), place_of(home, case)
            if not is_made(stage):
                if asked.again:
                    continue
                make_run(home, case, seed)
            seen.append(examined(stage, case, seed))
            print(f"{seed} {case.name}: {time.process_time() - began:.0f} s, {_cell(seen[-1])}", flush=True)
    told, is_good = verdict(seen)
    print("\n".join(("", *table(seen), told, f"runs in {folder}")))
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
