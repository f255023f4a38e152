"""Verifiable instructions (RLVR): SmolLM2-135M learns to follow instructions that a rule can check, by five methods.

GRPO as in recipes/instructions.yaml; RLOO, DAPO, PPO and rejection sampling with as many sampled answers. 16 of
IFEval's 25 kinds of instructions are trained, in wordings and with requests of our own; 9 never are. Before and after:
our held-out prompts of trained and of untrained kinds, and IFEval's 541 prompts through the stage `exam` (the likeliest
token each time, at most 512 of them), each with its gain over the start, paired by prompt; KL, length and distinct-2
of sampled answers; seconds and peak memory.

    python benchmarks/studies/verifiable.py --seed 1 --data DATA      one seed, about five minutes of one H200
    python benchmarks/studies/verifiable.py --seed 1 --data DATA --only grpo
    python benchmarks/studies/verifiable.py --merge                   page and figure from the seeds that are there
    python benchmarks/studies/verifiable.py --size small --to DIR     the same code on a tiny model

Parts: start, grpo, rloo, dapo, ppo, rejection; `start` comes first wherever it has not been run. What WORK has is not
run again, and what was broken off goes on where it was. `--set iterations=40` and the like change the settings of every
method.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from traceback import print_exc
from typing import Any

import torch
from ruamel.yaml import YAML

from common import Clock, Options, Record, SeedFile, by_cluster, keep_report, parse, read_seeds, stage_cost
from kedge.api.run import StageRun
from kedge.core.instructions.languages import require_langdetect
from kedge.data.instructions.generate import generate
from kedge.data.instructions.wordings import TRAINED, UNTRAINED
from kedge.data.sources import rows as read_source
from kedge.recipe.runner import run_in
from kedge.recipe.schema import load_recipe
from verifiable_page import REPORTS, write_results

METHODS = ("grpo", "rloo", "dapo", "ppo", "rejection")
PARTS = ("start", *METHODS)
RECIPE = Path(__file__).parents[2] / "recipes" / "instructions.yaml"
IFEVAL = Path("eval") / "capability" / "ifeval.jsonl.gz"
GRAM = 8
"""A training prompt that shares so many words in a row with a prompt of IFEval is left out."""
CURVES = {"reward": "reward/mean", "kl": "kl/mean", "length": "length/mean"}
EXAMS = ("ifeval", "trained", "untrained")
METRICS = ("prompt_strict", "prompt_loose", "instruction_strict", "instruction_loose")
Key = tuple[str, str, str]
"""Exam, metric, item."""

FULL: Record = {
    "train": 3000,
    "heldout": 200,
    "model": "smollm2-135m",
    "tokens": 512,
    "shown": 4,
    "sets": {},
    "imitate": {"above": 0.4},
}
SMALL: Record = {
    "train": 40,
    "heldout": 9,
    "model": "tiny",
    "tokens": 16,
    "shown": 2,
    "sets": {
        "iterations": 2,
        "batch": 2,
        "answers": 2,
        "max_prompt_tokens": 2048,
        "sampling.max_new_tokens": 12,
        "actor.lr": 1e-3,
        "reward": {"kind": "instructions", "min_words": 0, "max_repetition": 1.0, "relevant": False},
    },
    "imitate": {"finished": False},
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse("verifiable", PARTS, __doc__ or "", arguments)
    failed = [] if options.is_merge else run_seed(options)
    write_results(options, read_seeds(options.seeds))
    return len(failed)


def run_seed(options: Options) -> list[str]:
    """Run the parts one after the other; gives those that failed."""
    require_langdetect("the study of verifiable instructions")
    clock, file = Clock(), SeedFile(options)
    size = SMALL if options.size == "small" else FULL
    overlap = prepare(options, size)
    clock(f"prompts written: {overlap}")
    parts = list(options.only)
    if not (options.work / "start.json").is_file() and "start" not in parts:
        parts.insert(0, "start")
    failed: list[str] = []
    for part in parts:
        began = clock.seconds
        try:
            values = measured(part, train(part, options, size, clock), options, size)
        except Exception:  # the other parts are worth their minutes without this one
            print_exc()
            failed.append(part)
            continue
        if part == "start":
            values["overlap"] = overlap
        seconds = file.seconds(part, clock.seconds - began, values["cost"].values(), key="wall_seconds")
        file.put(part, values | {"wall_seconds": seconds})
        if part in REPORTS:
            keep_report(options, part, options.work / "runs" / part)
        clock(f"{part}: {said(values)}")
    return failed


def said(values: Record) -> str:
    """One line about a part, for the screen."""
    found = {name: round(values["exams"]["ifeval"][name]["value"], 3) for name in ("prompt_strict", "prompt_loose")}
    gain = values.get("gains", {}).get("ifeval", {})
    found |= {f"gain {name}": round(gain[name]["value"], 3) for name in ("prompt_strict", "untrained") if name in gain}
    return ", ".join(f"{name} {value}" for name, value in found.items())


def prepare(options: Options, size: Record) -> Record:
    """Write prompts and exams to the work folder; gives what was left out because IFEval has it."""
    data = options.work / "data"
    data.mkdir(parents=True, exist_ok=True)
    rows, ifeval = generate(size["train"], seed=options.seed), ifeval_rows(options)
    write_rows(data / "ifeval.jsonl", ifeval)
    clean, shared = decontaminated(rows, [str(row["prompt"]) for row in ifeval])
    write_rows(data / "train.jsonl", clean)
    write_rows(data / "rejection.jsonl", clean[: rejection_prompts(settings_of(options, size))])
    for name, kinds in (("trained", TRAINED), ("untrained", UNTRAINED)):
        # The same prompts for every seed, so that seeds differ by training alone.
        write_rows(data / f"{name}.jsonl", generate(size["heldout"], seed=1, kinds=list(kinds), part="heldout"))
    for name in EXAMS:
        write_exam(data / f"{name}.yaml", name, size["tokens"])
    return {"prompts": len(rows), "gram": GRAM, "left_out": len(rows) - len(clean), "longest_shared_words": shared}


def ifeval_rows(options: Options) -> list[Record]:
    """IFEval's prompts; of the small size some short ones, or prompts of ours where they are not there."""
    file = options.data / IFEVAL
    if options.size == "full":
        return read_rows(file)
    if not file.is_file():
        return generate(30, seed=99, kinds=[*TRAINED, *UNTRAINED], part="heldout")
    return [row for row in read_rows(file) if len(row["prompt"]) < 200][:30]


def decontaminated(rows: Sequence[Record], evaluation: Iterable[str], gram: int = GRAM) -> tuple[list[Record], int]:
    """The rows that share no `gram` words in a row with an evaluation prompt, and the longest run that any shares."""
    texts = [text.lower().split() for text in evaluation]
    lengths = range(1, 4 * gram)
    known = {length: {words for text in texts for words in grams(text, length)} for length in lengths}
    clean: list[Record] = []
    longest = 0
    for row in rows:
        words = row["prompt"].lower().split()
        shared = max((n for n in lengths if not known[n].isdisjoint(grams(words, n))), default=0)
        longest = max(longest, shared)
        if shared < gram:
            clean.append(row)
    return clean, longest


def grams(words: Sequence[str], n: int) -> set[tuple[str, ...]]:
    return {tuple(words[start : start + n]) for start in range(len(words) - n + 1)}


def read_rows(file: Path) -> list[Record]:
    return [dict(row.fields or {}) for row in read_source(str(file))]


def write_rows(file: Path, rows: Iterable[Record]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_exam(file: Path, name: str, tokens: int) -> None:
    lines = ["kedge_exam: 1", f"name: {name}", "kind: instructions", f"items: {name}.jsonl"]
    file.write_text("\n".join([*lines, f"max_new_tokens: {tokens}"]) + "\n", encoding="utf-8")


def settings_of(options: Options, size: Record) -> Record:
    """The stage `grpo` of recipes/instructions.yaml, with what this size and the command line say otherwise."""
    settings: Record = YAML(typ="safe").load(RECIPE.read_text(encoding="utf-8"))["stages"]["grpo"]
    given = dict(pair.split("=", 1) for pair in options.sets)
    for key, value in {**size["sets"], **{key: json.loads(value) for key, value in given.items()}}.items():
        *path, last = key.split(".")
        section = settings
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return settings | {"prompts": "data/train.jsonl"}


def stage_of(method: str, grpo: Record, imitate: Record) -> Record:
    """The settings of a method; as many answers are sampled by each."""
    lr = grpo["actor"]["lr"]
    common = {name: grpo[name] for name in ("reward", "prompts", "max_prompt_tokens", "sampling", "checkpoints")}
    match method:
        case "grpo":
            return grpo
        case "rloo":  # no ratio in its loss: one step on each batch
            return grpo | {"method": "rloo", "minibatches": 1}
        case "dapo":  # groups of equal scores are left out and not replaced, and long answers cost nothing
            return grpo | {
                "method": "dapo",
                "max_rounds": 1,
                "kl": {"start": 0.0},
                "scores": {"overlong_penalty": 0.0},
            }
        case "ppo":  # one answer to a prompt, and a critic instead of a group
            return common | {
                "kind": "ppo",
                "roles": grpo["roles"],
                "iterations": grpo["iterations"],
                "batch": grpo["batch"] * grpo["answers"],
                "epochs": 1,
                "minibatches": grpo["minibatches"],
                "kl": {"start": 0.02},
                "loss": {"credit": {"lam": 1.0}},
                "critic_warmup": 2,
                "actor": grpo["actor"],
                "critic": {"lr": 2 * lr, "schedule": "linear", "warmup": 0.0, "eps": 1e-8},
            }
        case _:  # rejection: the best of 8 is imitated, in three rounds
            return common | {
                "kind": "best_of_n",
                "prompts": "data/rejection.jsonl",
                "n": grpo["answers"],
                "method": {"kind": "rejection", "rounds": ROUNDS, "epochs": 2} | imitate,
                "batch": min(32, rejection_prompts(grpo)),
                "optimiser": {"lr": 3 * lr, "schedule": "linear", "warmup": 0.05},
            }


ROUNDS = 3


def rejection_prompts(grpo: Record) -> int:
    """Prompts of which rejection sampling draws as many answers in its rounds as the others in their iterations."""
    return max(1, grpo["iterations"] * grpo["batch"] // ROUNDS)


def train(part: str, options: Options, size: Record, clock: Clock) -> Path:
    """Train by a method, sit the exams, sample answers: one recipe, run as `kedge run` does; gives its folder."""
    model = size["model"]
    grpo = settings_of(options, size)
    models = [model] if part == "start" else [part]
    stages: Record = {} if part == "start" else {part: stage_of(part, grpo, size["imitate"])}
    stages["exam"] = {
        "kind": "exam",
        "models": models,
        "exams": [f"data/{name}.yaml" for name in EXAMS],
    }
    stages["answers"] = {
        "kind": "evaluate",
        "models": [model, *(models if part != "start" else [])],
        "prompts": "data/trained.jsonl",
        "reward": {"kind": "instructions", "give": "all"},
        "max_new_tokens": grpo["sampling"]["max_new_tokens"],
        "temperature": grpo["sampling"]["temperature"],
    }
    recipe = {"kedge": 1, "name": part, "seed": options.seed, "model": model, "stages": stages}
    file = options.work / f"{part}.yaml"
    YAML(typ="safe").dump(recipe, file)
    home = options.work / "runs" / part
    run_in(home, load_recipe(file), is_resumed=(home / "run.json").is_file(), say=clock)
    return home


def measured(part: str, run: Path, options: Options, size: Record) -> Record:
    """All numbers of a part; those of the start are kept beside the runs, for the gains of the others."""
    kinds = kinds_by_item(read_rows(options.work / "data" / "ifeval.jsonl"))
    scores = exam_scores(run / "exam" / "items.jsonl")
    start_file = options.work / "start.json"
    values: Record = {"exams": summaries(scores, kinds), "cost": {"exam": stage_cost(run, "exam")}}
    if part == "start":
        start_file.write_text(json.dumps([[*key, *value] for key, value in scores.items()]))
    else:
        before: Scores = {tuple(row[:3]): tuple(row[3:]) for row in json.loads(start_file.read_text())}
        changes = {key: (value[0] - before[key][0], *value[1:]) for key, value in scores.items()}
        values["gains"] = summaries(changes, kinds)
        values["cost"][part] = stage_cost(run, part)
        values["curves"] = curves(run / part)
    values["answers"] = answer_numbers(run / "answers" / "evaluation.json", size["model"] if part == "start" else part)
    values["samples"] = samples(run / "answers" / "answers.jsonl", size["shown"])
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return values


def kinds_by_item(rows: Iterable[Record]) -> dict[str, set[str]]:
    """The kinds of instructions of each item, by the name that scores call it; IFEval's own keys are numbers."""
    return {str(row["key"]): set(row["instruction_id_list"]) for row in rows}


Scores = dict[Key, tuple[float, str, str]]
"""Of each item: the score, its cluster (the prompt), and its kind of instruction, empty for prompts."""


def exam_scores(file: Path) -> Scores:
    rows = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    return {
        (row["exam"], row["metric"], row["item"]): (
            row["score"],
            row.get("cluster") or row["item"],
            (row.get("groups") or {}).get("kind", ""),
        )
        for row in rows
    }


def summaries(scores: Scores, kinds_of: Mapping[str, set[str]]) -> Record:
    """Means with intervals by exam and metric; of IFEval also by trained and untrained kinds, and every kind's mean."""
    found: Record = {}
    for exam in EXAMS:
        each = {metric: [value for key, value in scores.items() if key[:2] == (exam, metric)] for metric in METRICS}
        found[exam] = {metric: mean_of(values) for metric, values in each.items()}
    strict = [value for key, value in scores.items() if key[:2] == ("ifeval", "instruction_strict")]
    prompts = [value for key, value in scores.items() if key[:2] == ("ifeval", "prompt_strict")]
    found["ifeval"] |= {
        "trained": mean_of([value for value in strict if value[2] in TRAINED]),
        "untrained": mean_of([value for value in strict if value[2] in UNTRAINED]),
        "prompts_trained": mean_of([value for value in prompts if kinds_of[str(value[1])] <= set(TRAINED)]),
        "prompts_untrained": mean_of([value for value in prompts if not kinds_of[str(value[1])] <= set(TRAINED)]),
    }
    found["kinds"] = {
        kind: mean_of(of_kind) for kind in (*TRAINED, *UNTRAINED) if (of_kind := [v for v in strict if v[2] == kind])
    }
    return found


def mean_of(values: Sequence[tuple[float, str, str]]) -> Record | None:
    if not values:
        return None
    return by_cluster([score for score, _, _ in values], [cluster for _, cluster, _ in values]).json()


def curves(stage: Path) -> Record:
    """Reward, KL and length by step, where the stage measured them."""
    rows = list(StageRun(stage).metrics())
    return {
        name: [[row["step"], round(row[metric], 4)] for row in rows if row.get(metric) is not None]
        for name, metric in CURVES.items()
    }


def answer_numbers(file: Path, model: str) -> Record:
    """Of answers sampled to the held-out prompts as in training: KL to the start, tokens, distinct-2, …"""
    found: Record = json.loads(file.read_text(encoding="utf-8"))["models"][model]
    about = {name: found[name] for name in ("finished", "repetition", "distinct")}
    for name in ("kl", "length"):
        estimate: Any = found[name]
        if estimate is not None:
            about[name] = {"value": estimate["mean"], "low": estimate["low"], "high": estimate["high"], "count": 1}
    return about


def samples(file: Path, count: int) -> list[Record]:
    """What the models answered to the first held-out prompts, all of them of our own writing."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    prompts = list(dict.fromkeys(row["prompt"][-1]["content"] for row in rows))[:count]
    return [
        {"prompt": prompt, "answers": {row["model"]: row["answer"] for row in rows if asked(row) == prompt}}
        for prompt in prompts
    ]


def asked(row: Record) -> str:
    return str(row["prompt"][-1]["content"])


if __name__ == "__main__":
    sys.exit(main())
