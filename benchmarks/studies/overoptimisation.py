"""Study: overoptimisation, measured (Gao et al. 2022; Coste et al. 2023).

    python benchmarks/studies/overoptimisation.py --seed N [--data DIR] [--work DIR] [--only PART …]

A gold reward model labels the policy's own answers; proxies learn from 100 to 3,000 such labels, of which a quarter is
wrong; best-of-N up to 1,024 and PPO without a KL price go as far as they can on each proxy, and gold watches.

- gold: SFT to short answers, and the gold ensemble, once for all seeds (in `overoptimisation-shared` beside --work)
- labels: two answers of the policy to each prompt, the better one by gold
- proxies: one reward model, and an ensemble, for each number of labels
- best_of_n: answers to held-out prompts, scored by gold and every proxy; KL = ln n − (n − 1)/n, every n without bias
- ppo: a run without a price for each proxy, and for each way to combine an ensemble
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import overoptimisation_data as data
from common import Clock, Options, Record, SeedFile, parse, stage_cost
from kedge.api.run import Run
from kedge.commands.sample import asked_prompts, sample_answers
from kedge.commands.score import load_judge, read_answers, score_answers
from kedge.core.errors import KedgeError
from kedge.core.files import write_json
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from overoptimisation_curves import COMBINES, Floats, Scale, best_of_n_results, ppo_curve
from overoptimisation_page import merge
from overoptimisation_plan import FULL, QUIET, SMALL, Plan

STUDY = "overoptimisation"
PARTS = ("gold", "labels", "proxies", "best_of_n", "ppo")
NOISE = 0.25
"""Share of the labels that are wrong, as in Coste et al. 2023."""
GOLD_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One seed of the study: where things are, and what is said and written down on the way."""

    options: Options
    plan: Plan
    say: Clock
    results: SeedFile

    @property
    def shared(self) -> Path:
        """What all seeds have in common."""
        return self.options.work.parent / f"{STUDY}-shared"

    @property
    def files(self) -> data.Files:
        return data.Files(folder=self.shared / "data")

    @property
    def policy(self) -> Path:
        return self.shared / "sft" / "sft" / "model"

    @property
    def gold(self) -> Path:
        return self.shared / "gold" / "gold" / "model"

    def proxy(self, name: str) -> Path:
        return self.options.work / name / "proxy" / "model"

    @property
    def proxies(self) -> list[tuple[str, int, int]]:
        """Name, number of labels and members of each proxy."""
        plan = self.plan
        singles = [(f"single-{labels}", labels, 1) for labels in plan.labels]
        return singles + [(f"ensemble-{labels}", labels, plan.members) for labels in plan.ensembles]


Job = tuple[str, Path, Record]
"""A recipe of one stage: its name, the folder of the run's folder, and the stage by its name."""


def run_jobs(study: Study, jobs: Sequence[Job], *, seed: int) -> Record:
    """Every job as `kedge run` runs it, each resumed where it was: seconds and memory of each that ended well. Where
    some may run side by side, each has a process of its own. Nothing is lost of the others where one fails."""

    def run(job: Job) -> tuple[str, Record | None]:
        name, folder, stages = job
        place = folder / name
        if not (place.is_dir() and Run(place).status == "done"):
            folder.mkdir(parents=True, exist_ok=True)
            recipe = {"kedge": 1, "name": name, "seed": seed, "model": study.plan.model, "device": study.plan.device}
            write_json(folder / f"{name}.yaml", recipe | {"stages": stages})
            try:
                (run_here if study.plan.at_once == 1 else run_apart)(folder, name, at_once=study.plan.at_once)
            except (RuntimeError, KedgeError) as error:
                study.say(f"{name} failed: {error}")
                return name, None
        cost = stage_cost(place, next(iter(stages)))
        study.say(f"{name}: {cost['seconds']:.0f} s")
        return name, cost

    with ThreadPoolExecutor(study.plan.at_once) as pool:
        costs = {name: cost for name, cost in pool.map(run, jobs) if cost is not None}
    if not costs:
        raise RuntimeError(f"all of {', '.join(name for name, _, _ in jobs)} failed; the logs are beside their folders")
    return costs


def run_here(folder: Path, name: str, *, at_once: int) -> None:
    with (folder / f"{name}.log").open("w") as log:
        recipe = load_recipe(folder / f"{name}.yaml")
        run_recipe(recipe, folder, is_resumed=(folder / name).is_dir(), say=partial(print, file=log))


def run_apart(folder: Path, name: str, *, at_once: int) -> None:
    command = [sys.executable, "-m", "kedge.cli", "run", str(folder / f"{name}.yaml"), "--runs", str(folder)]
    resume = ["--resume"] if (folder / name).is_dir() else []
    # Side by side, more threads in all than cores would only wait for each other.
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // at_once))}
    log = folder / f"{name}.log"
    with log.open("w") as out:
        done = subprocess.run(
            [*command, "--no-check", *resume], stdout=out, stderr=out, env={**os.environ, **threads}, check=False
        )
    if done.returncode:
        tail = log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{name} ended with exit code {done.returncode}:\n{tail}")


def part_gold(study: Study) -> Record:
    """The start of the policy and the gold ensemble; made once, read by every seed."""
    plan, files = study.plan, study.files
    if not files.demonstrations.is_file():
        if study.options.size == "small":
            data.write_small(files, plan.counts)
        else:
            data.write_full(files, study.options.data, plan.counts)
    jobs = gold_jobs(study)
    costs = run_jobs(study, jobs, seed=GOLD_SEED)
    if len(costs) < len(jobs):
        raise RuntimeError("there is no study without its start and its gold: mend what failed, and run it again")
    report = _report(study.shared / "gold" / "gold")
    return {"gold": report, "setup": setup(study), "cost": costs}


def gold_jobs(study: Study) -> list[Job]:
    plan, files = study.plan, study.files
    sft = {"kind": "sft", "data": str(files.demonstrations.resolve()), "samples": 0, **plan.sft}
    gold = {
        "kind": "reward",
        "data": str(files.pairs.resolve()),
        "members": plan.gold_members,
        "groups": ["source"],
        "if_unfit": "go_on",
        **QUIET,
        **plan.gold,
    }
    return [
        ("sft", study.shared, {"sft": sft | {"checkpoints": {"every": 100000}}}),
        ("gold", study.shared, {"gold": gold}),
    ]


def setup(study: Study) -> Record:
    """How much of everything, for the page."""
    plan, files = study.plan, study.files
    sources = Counter(row["source"] for row in data.read_rows(files.pairs))
    return {
        "policy": f"{plan.model}, SFT on {len(data.read_rows(files.demonstrations)):,} short answers",
        "gold": f"{plan.gold_members} members, in full, on "
        + ", ".join(f"{count:,} pairs of {source}" for source, count in sorted(sources.items())),
        "labels": f"{', '.join(f'{labels:,}' for labels in plan.labels)}; {NOISE:.0%} of them wrong; "
        f"{plan.heldout} right ones held out",
        "ensembles": f"{plan.members} members from {', '.join(f'{labels:,}' for labels in plan.ensembles)} labels, "
        "each without its own part of the prompts",
        "answers": f"at most {plan.tokens} tokens, temperature 1",
        "best-of-N": f"n up to {plan.most:,}, from {plan.answers:,} answers to each of {plan.counts.best_of_n} "
        "held-out prompts",
        "PPO": f"{plan.iterations} iterations of one answer to each of {plan.counts.ppo} other prompts, no KL price, "
        f"roles {plan.ppo['roles']}, learning rate {plan.ppo['actor']['lr']:g}",
        "one prompt in": f"{data.ONE_IN_HARMFUL} is of HH and asks for harm",
    }


def part_labels(study: Study) -> Record:
    """Two answers to each prompt, and files of the first so many pairs."""
    plan, seed = study.plan, study.options.seed
    prompts = asked_prompts((), str(study.files.prompts("labels")))
    answers = sampled(study, str(study.files.prompts("labels")), answers=2)
    gold_N = scored(study, "labels", answers, [study.gold])[0].mean(axis=0)
    noisy = data.label_pairs(answers, gold_N.tolist(), noise=NOISE, seed=seed)
    clean = data.label_pairs(answers, gold_N.tolist(), noise=0.0, seed=seed)
    wanted = max(plan.labels) + plan.heldout
    if len(noisy) < wanted:
        raise RuntimeError(f"{len(noisy)} of {len(prompts)} prompts have two answers to compare; {wanted} are needed")
    data.write_rows(_labels(study, "heldout"), clean[-plan.heldout :])
    for labels in plan.labels:
        data.write_rows(_labels(study, str(labels)), noisy[:labels])
    wrong = sum(a["chosen"] != b["chosen"] for a, b in zip(noisy, clean, strict=True)) / len(noisy)
    finished = sum(row["finished"] for row in answers) / len(answers)
    length = sum(row["length"] for row in answers) / len(answers)
    return {
        "pairs": len(noisy),
        "wrong": wrong,
        "finished": finished,
        "length": length,
        "gold_std": float(np.nanstd(gold_N)),
    }


def part_proxies(study: Study) -> Record:
    """A reward model from each number of labels, and ensembles; accuracy is agreement with gold, without noise."""
    jobs = proxy_jobs(study)
    costs = run_jobs(study, jobs, seed=study.options.seed)
    if len(costs) < len(jobs):
        raise RuntimeError("without all proxies there is nothing to compare: mend what failed, and run it again")
    reports = {name: _report(study.options.work / name / "proxy") for name, _, _ in study.proxies}
    return {"proxies": reports, "cost": costs}


def proxy_jobs(study: Study) -> list[Job]:
    jobs: list[Job] = []
    for name, labels, members in study.proxies:
        proxy = {
            "kind": "reward",
            "from": str(study.policy.resolve()),
            "data": str(_labels(study, str(labels)).resolve()),
            "heldout": str(_labels(study, "heldout").resolve()),
            "members": members,
            "epochs": study.plan.epochs(labels),
            "if_unfit": "go_on",
            **QUIET,
            **study.plan.proxy,
        }
        jobs.append((name, study.options.work, {"proxy": proxy}))
    return jobs[::-1]  # the longest first


def part_best_of_n(study: Study) -> Record:
    """Gold and every proxy of many answers to held-out prompts, and the curves of best-of-N by each of them."""
    answers = sampled(study, str(study.files.prompts("best_of_n")), answers=study.plan.answers)
    places = {"gold": study.gold} | {name: study.proxy(name) for name, _, _ in study.proxies}
    by_judge = scored(study, "best-of-n", answers, list(places.values()))
    shape = (study.plan.counts.best_of_n, study.plan.answers)
    members = {name: scores_MN.reshape(-1, *shape) for name, scores_MN in zip(places, by_judge, strict=True)}
    np.savez_compressed(study.options.work / "best-of-n.npz", **members)  # pyright: ignore[reportArgumentType]
    return best_of_n_results(members, study.plan.ensembles, most=study.plan.most, seed=study.options.seed)


def part_ppo(study: Study) -> Record:
    """PPO without a price on each proxy. Gold and proxy are in the units of best-of-N, so that part comes first."""
    if not study.results.has("best_of_n"):
        raise RuntimeError("part ppo needs the scales of part best_of_n: run it first (--only best_of_n ppo)")
    scales = {name: Scale(**values) for name, values in study.results.values["parts"]["best_of_n"]["scales"].items()}
    jobs = ppo_jobs(study)
    costs = run_jobs(study, jobs, seed=study.options.seed)
    curves: Record = {}
    for job in costs:
        name = job.removeprefix("ppo-")
        metrics = list(Run(study.options.work / job).metrics("ppo"))
        curves[name] = ppo_curve(metrics, scales["gold"], scales[name])
    return {"curves": curves, "cost": costs}


def ppo_jobs(study: Study) -> list[Job]:
    plan, first = study.plan, study.plan.ensembles[0]
    sources: dict[str, Any] = {
        f"single-{labels}": str(study.proxy(f"single-{labels}").resolve()) for labels in plan.labels
    }
    for how, combine in COMBINES.items():
        place = str(study.proxy(f"ensemble-{first}").resolve())
        sources[f"{how}-{first}"] = {"kind": "model", "from": place, "combine": combine.model_dump()}
    jobs: list[Job] = []
    for name, reward in sources.items():
        ppo = {
            "kind": "ppo",
            "from": str(study.policy.resolve()),
            "reward": reward,
            "gold": str(study.gold.resolve()),
            "prompts": str(study.files.prompts("ppo").resolve()),
            "iterations": plan.iterations,
            "kl": {"start": 0.0},
            "sampling": {"max_new_tokens": plan.tokens},
            "checkpoints": {"every": 100000},
            "logging": {"every": 20, "samples": 2},
            **plan.ppo,
        }
        jobs.append((f"ppo-{name}", study.options.work, {"ppo": ppo}))
    return jobs


def sampled(study: Study, prompts: str, *, answers: int) -> list[data.Row]:
    """Answers of the policy at temperature 1, those to a prompt side by side."""
    rows = sample_answers(
        str(study.policy),
        asked_prompts((), prompts),
        {"max_new_tokens": study.plan.tokens},
        answers=answers,
        judge=None,
        seed=study.options.seed,
        chat_template=None,
        device=study.plan.device,
        dtype="auto",
        progress=lambda done: study.say(f"{done:,} answers sampled"),
    )
    return [dict(row) for row in rows]


def scored(study: Study, name: str, answers: Sequence[data.Row], judges: Sequence[Path]) -> list[Floats]:
    """`scores_MN` of the answers by each judge, as `kedge score` gives them; NaN where an answer has no text."""
    file = study.options.work / f"{name}.jsonl"
    data.write_rows(file, data.as_demonstrations(answers))
    with_text = [at for at, row in enumerate(answers) if row["answer"].strip()]
    encoded, tables = None, list[Floats]()
    for place in judges:
        judge = load_judge(str(place), device=study.plan.device)
        # All judges have the policy's tokenizer and template: the texts are cut into tokens once.
        encoded = encoded or read_answers(str(file), "demonstrations", judge, beside=file)
        scores_MNK = score_answers(judge, encoded, is_raw=False)
        table_MN = np.full((len(scores_MNK), len(answers)), np.nan)
        # By the line of each answer: one that cannot be read as a conversation has no score.
        lines = [with_text[example.origin.line - 1] for example in encoded.examples]
        table_MN[:, lines] = scores_MNK[:, :, 0].double().numpy()
        tables.append(table_MN)
        study.say(f"{len(lines):,} of {len(answers):,} answers scored by {place.parents[1].name}")
    return tables


def _labels(study: Study, name: str) -> Path:
    return study.options.work / "labels" / f"{name}.jsonl"


def _report(stage: Path) -> Record:
    """Held-out accuracy of a reward stage, its parts, and what its report says."""
    report = json.loads((stage / "reward-report.json").read_text())
    return {
        "accuracy": report["accuracy"],
        "by_group": report["by_group"],
        "balanced": report["length"]["balanced"],
        "longer_wins": report["length"]["rule"],
        "train_accuracy": report["train_accuracy"],
        "verdict": report["verdict"],
    }


RUNS: dict[str, Callable[[Study], Record]] = {
    "gold": part_gold,
    "labels": part_labels,
    "proxies": part_proxies,
    "best_of_n": part_best_of_n,
    "ppo": part_ppo,
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(STUDY, PARTS, __doc__ or "", arguments)
    if not options.is_merge:
        plan = FULL if options.size == "full" else SMALL
        options.work.mkdir(parents=True, exist_ok=True)
        study = Study(options=options, plan=plan, say=Clock(), results=SeedFile(options))
        for part in PARTS:
            if part in options.only:
                since = study.say.seconds
                values = RUNS[part](study)
                study.results.put(part, values | {"seconds": round(study.say.seconds - since, 1)})
                study.say(f"part {part} is done")
                gc.collect()
                torch.cuda.empty_cache()  # runs in processes of their own need the room
    merge(options)


if __name__ == "__main__":
    main()
