"""Study: overoptimisation, measured (Gao et al. 2022; Coste et al. 2023).

    python benchmarks/studies/overoptimisation.py --seed N [--data DIR] [--work DIR] [--only PART …]

A gold reward model labels the policy's own answers; proxies learn from 100 to 3,000 such labels, of which a quarter is
wrong; best-of-N up to 1,024 and PPO without a KL price go as far as they can on each proxy, and gold watches.

- gold: SFT to short answers, and the gold ensemble, once for all seeds (in `overoptimisation-shared` beside --work)
- labels: two answers of the policy to each prompt, the better one by gold
- proxies: one reward model, and an ensemble, for each number of labels
- best_of_n: answers to held-out prompts, scored by gold and every proxy; KL = ln n − (n − 1)/n, every n without bias
- ppo: a run without a price for each proxy, and for each way to combine an ensemble

What WORK has is not made again: a study that was broken off goes on where it was.
"""

from __future__ import annotations

import fcntl
import gc
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import print_exc
from typing import Any

import numpy as np
import torch

import overoptimisation_data as data
from common import Clock, Options, Record, SeedFile, parse
from kedge.api.run import StageRun
from kedge.commands.sample import asked_prompts, sample_answers
from kedge.commands.score import load_judge, read_answers, score_answers
from kedge.core.files import write_json
from overoptimisation_curves import COMBINES, Floats, Scale, best_of_n_results, ppo_curve
from overoptimisation_jobs import STUDY, Job, Study, has_begun, is_done, run_jobs
from overoptimisation_page import merge
from overoptimisation_plan import FULL, QUIET, SMALL

PARTS = ("gold", "labels", "proxies", "best_of_n", "ppo")
NOISE = 0.25
"""Share of the labels that are wrong, as in Coste et al. 2023."""
GOLD_SEED = 0


def part_gold(study: Study) -> Record:
    """The start of the policy and the gold ensemble; made once, read by every seed."""
    plan, files = study.plan, study.files
    jobs = gold_jobs(study)
    study.shared.mkdir(parents=True, exist_ok=True)
    with (study.shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several seeds one makes it, and the others wait for it
        if not files.demonstrations.is_file():
            if study.options.size == "small":
                data.write_small(files, plan.counts)
            else:
                data.write_full(files, study.options.data, plan.counts)
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
    about = study.options.work / "labels.json"
    if about.is_file():  # proxies may have begun to learn from these
        return json.loads(about.read_text())
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
    values = {
        "pairs": len(noisy),
        "wrong": wrong,
        "finished": finished,
        "length": length,
        "gold_std": float(np.nanstd(gold_N)),
    }
    write_json(about, values)
    return values


def part_proxies(study: Study) -> Record:
    """A reward model from each number of labels, and ensembles; accuracy is agreement with gold, without noise."""
    jobs = proxy_jobs(study)
    costs = run_jobs(study, jobs, seed=study.options.seed)
    reports = {name: _report(study.options.work / name / "proxy") for name in study.trained}
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
    members = scores_of_answers(study)
    ensembles = [labels for labels in study.plan.ensembles if f"ensemble-{labels}" in members]
    return best_of_n_results(members, ensembles, most=study.plan.most, seed=study.options.seed)


def scores_of_answers(study: Study) -> dict[str, Floats]:
    """`scores_MPN` of gold and of each proxy; kept in a file, for they take minutes."""
    file, judges = study.options.work / "best-of-n.npz", ["gold", *study.trained]
    if file.is_file():
        with np.load(file) as kept:
            if set(kept.files) == set(judges):
                return {name: kept[name] for name in judges}
    answers = sampled(study, str(study.files.prompts("best_of_n")), answers=study.plan.answers)
    places = [study.gold, *map(study.proxy, study.trained)]
    shape = (study.plan.counts.best_of_n, study.plan.answers)
    tables = scored(study, "best-of-n", answers, places)
    members = {name: scores_MN.reshape(-1, *shape) for name, scores_MN in zip(judges, tables, strict=True)}
    beside = file.with_name("best-of-n.part.npz")
    np.savez_compressed(beside, **members)  # pyright: ignore[reportArgumentType]
    beside.rename(file)  # a kill in the middle leaves no half of a file
    return members


def part_ppo(study: Study) -> Record:
    """PPO without a price on each proxy. Gold and proxy are in the units of best-of-N, so that part comes first."""
    if not study.results.has("best_of_n"):
        raise RuntimeError("part ppo needs the scales of part best_of_n: run it first (--only best_of_n ppo)")
    jobs, began = ppo_jobs(study), study.say.seconds

    def keep(costs: Record) -> None:
        """All run side by side: when the first has ended, the others are nearly there, and may be broken off."""
        seconds = study.results.seconds("ppo", study.say.seconds - began)
        study.results.put("ppo", {"curves": ppo_curves(study, jobs), "cost": costs, "seconds": seconds})

    costs = run_jobs(study, jobs, seed=study.options.seed, when_done=keep)
    return {"curves": ppo_curves(study, jobs), "cost": costs}


def ppo_curves(study: Study, jobs: Sequence[Job]) -> Record:
    """Of every run, as far as it has come."""
    scales = {name: Scale(**values) for name, values in study.results.values["parts"]["best_of_n"]["scales"].items()}
    curves: Record = {}
    for job, folder, _ in jobs:
        place, name = folder / job, job.removeprefix("ppo-")
        metrics = list(StageRun(place / "ppo").metrics()) if has_begun(place / "ppo") else []
        if any("gold/mean" in row for row in metrics):
            curve = ppo_curve(metrics, scales["gold"], scales[name])
            curves[name] = curve | {"is_whole": is_done(place)}
    return curves


def ppo_jobs(study: Study) -> list[Job]:
    plan, first = study.plan, study.plan.ensembles[0]
    places = {name: str(study.proxy(name).resolve()) for name in study.trained}
    sources: dict[str, Any] = {name: place for name, place in places.items() if name.startswith("single")}
    if (place := places.get(f"ensemble-{first}")) is not None:
        for how, combine in COMBINES.items():
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


def unfinished(study: Study) -> list[str]:
    """Runs of the parts that were asked for that failed or were broken off: the next call goes on with them."""
    makers = {"proxies": proxy_jobs, "ppo": ppo_jobs}
    jobs = [job for part, make in makers.items() if part in study.options.only for job in make(study)]
    return [name for name, folder, _ in jobs if not is_done(folder / name)]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(STUDY, PARTS, __doc__ or "", arguments)
    is_whole = options.is_merge or run_parts(options)
    merge(options)
    return int(not is_whole)


def run_parts(options: Options) -> bool:
    """The parts one after the other, each from those before it: whether all of them ended well."""
    plan = FULL if options.size == "full" else SMALL
    results = SeedFile(options, of_one_work=True)
    study = Study(options=options, plan=plan, say=Clock(), results=results)
    for part in PARTS:
        if part in options.only:
            since = study.say.seconds
            try:
                values = RUNS[part](study)
            except Exception:
                print_exc()
                study.say(f"part {part} failed; what was made is kept, and the study goes on here when it is run again")
                return False
            results.put(part, values | {"seconds": round(results.seconds(part, study.say.seconds - since), 1)})
            study.say(f"part {part} is done")
            gc.collect()
            torch.cuda.empty_cache()  # runs in processes of their own need the room
    return not unfinished(study)


if __name__ == "__main__":
    sys.exit(main())
