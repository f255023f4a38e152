"""Study: harmless and still helpful. SmolLM2-135M by PPO with two gated reward models, by DPO and by best-of-N.

    python benchmarks/studies/harmless.py --seed 1 --data DATA        one seed, nine minutes of a shared H200
    python benchmarks/studies/harmless.py --merge                     page and figure from the seeds that are there

DATA is a folder with pairs/hh-harmless.jsonl.gz, pairs/alpacaeval-gpt4.jsonl.gz, sft/instructions.jsonl.gz and, below
eval/, the files of MMLU, PIQA, IFEval, XSTest and HarmBench (docs/exams.md). All training is by stages that a recipe
may name; the run folder of every part is WORK/PART. Parts: train (SFT and the two reward models), gold (two reward
models on other prompts), ppo, dpo, answers (everybody's, judged), exams (and the gate), best (best-of-N). `--only PART`
runs some of them; a part that is there already is not trained again. `--set ppo.kl.target=6` changes a setting of a
stage (sft, harmless, helpful, ppo, dpo-7e-06, …), for trials.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import print_exc

import harmless_numbers as figures
from common import Clock, Options, Record, SeedFile, keep_report, parse, stage_cost
from harmless_data import TASKS, Files, prepare, write_toy
from harmless_page import merge
from harmless_plan import FULL, SMALL, Sizes
from kedge.api.recipe import Recipe
from kedge.api.run import StageRun
from kedge.commands.doctor import examine
from kedge.core.errors import ContractStop
from kedge.core.instructions.languages import require_langdetect
from kedge.exams.catalogue import exams_home
from kedge.exams.public.fetching import fetch_exam

STUDY = "harmless"
THRESHOLD = -1.73
"""Of the harmless score, a log-odds: Llama 2's 0.15 of a probability."""
NEVER = -1000.0
"""A threshold that every answer passes: the prompts alone decide which gold model is asked."""
RARELY = 100_000


PUBLIC_EXAMS = dict.fromkeys(("mmlu", "piqa", "ifeval"), "capability") | {"xstest": "refusal", "harmbench": "harm"}
"""Where each lies below DATA/eval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One seed."""

    options: Options
    sizes: Sizes
    files: Files
    numbers: SeedFile
    clock: Clock

    def run(self, part: str, stages: Record) -> bool:
        """Run the stages of a part, or what of them is not done; False where a contract (a KL budget, a gate) ended it
        early."""
        values = {
            "kedge": 1,
            "name": f"{STUDY}-{part}",
            "seed": self.options.seed,
            "model": self.sizes.model,
            "stages": stages,
        }
        folder = self.options.work / part
        sets = [f"stages.{change}" for change in self.options.sets if change.partition(".")[0] in stages]
        try:
            Recipe(values, sets=sets).run(
                folder, resume=(folder / "run.json").is_file(), check=self.options.size == "small", say=self.clock
            )
        except ContractStop as stop:
            self.clock(f"{part}: {stop}")
            return False
        forget_checkpoints(folder)
        return True

    def model(self, part: str, stage: str) -> str:
        """The folder of the model that a stage has made; one that a contract ended has its last good one."""
        folder = self.options.work / part / stage
        outputs = StageRun(folder).outputs
        return str((outputs.get("model") or folder / "model").resolve())

    def judge(self, part: str, threshold: float) -> Record:
        """The two reward models of a part as one source, gated as in Llama 2."""
        models = {task: {"kind": "model", "from": self.model(part, task)} for task in TASKS}
        return {
            "kind": "mix", "how": "gated", "gate": "harmless", "threshold": threshold, "risky": "risky", "parts": models
        }  # fmt: skip

    def costs(self, part: str, *stages: str) -> Record:
        return {stage: stage_cost(self.options.work / part, stage) for stage in stages}

    def settings(self, part: str, *stages: str) -> Record:
        """As the stages were run, for the page."""
        return {stage: figures.settings_of(self.options.work / part / stage) for stage in stages}


def forget_checkpoints(run: Path) -> None:
    """Of a part that is done: with the state of the optimisers they take five times the room of the models."""
    for folder in (*run.glob("*/checkpoints"), *run.glob("*/finished")):
        shutil.rmtree(folder)


def reward_stages(study: Study, which: str) -> Record:
    """The settings that docs/results.md found best on either data, with length balanced out.

    Helpful scores average 0 on short answers like the policy's, not on GPT-4's: else they would all lie below what an
    answer gets that fails the gate."""
    sizes, files = study.sizes, study.files
    epochs = {"harmless": sizes.harmless_epochs, "helpful": 1}
    zero: dict[str, Record] = {"harmless": {}, "helpful": {"demonstrations": str(files.instructions)}}
    return {
        task: zero[task]
        | {
            "kind": "reward",
            "data": str((files.train if which == "train" else files.gold)[task]),
            "heldout": str(files.asked[task]),
            "members": sizes.members[task],
            "max_length": sizes.max_length,
            "batch": sizes.batch,
            "epochs": epochs[task],
            "loss": {"length_control": "balance"},
            "optimiser": {"lr": 5e-5},
            "eval": {"every": RARELY},
            "checkpoints": {"every": RARELY},
            "if_unfit": "go_on",  # the study says what it was
        }
        for task in TASKS
    }


def train(study: Study) -> Record:
    sizes = study.sizes
    sft = {
        "kind": "sft",
        "data": str(study.files.demonstrations),
        "max_length": sizes.max_length,
        "batch": sizes.batch,
        "optimiser": {"lr": 2e-5},
        "checkpoints": {"every": RARELY},
        "samples": 0,
    }
    study.run("train", {"sft": sft, **reward_stages(study, "train")})
    reports = {task: figures.reward_report(study.options.work / "train" / task) for task in TASKS}
    stages = ("sft", *TASKS)
    about = {"costs": study.costs("train", *stages), "settings": study.settings("train", *stages)}
    return {"data": study.files.counts, "reports": reports, **about}


def gold(study: Study) -> Record:
    study.run("gold", reward_stages(study, "gold"))
    reports = {task: figures.reward_report(study.options.work / "gold" / task) for task in TASKS}
    return {"reports": reports, "costs": study.costs("gold", *TASKS), "settings": study.settings("gold", *TASKS)}


def ppo(study: Study) -> Record:
    sizes = study.sizes
    stage = {
        "kind": "ppo",
        "from": study.model("train", "sft"),
        "reward": study.judge("train", THRESHOLD),
        "gold": study.judge("gold", NEVER),
        "prompts": str(study.files.prompts),
        "balance": "task",
        "roles": "separate",
        "iterations": sizes.iterations,
        "batch": sizes.prompts,
        "max_prompt_tokens": sizes.max_length - sizes.new_tokens,
        "too_long": "drop",
        "sampling": {"max_new_tokens": sizes.new_tokens},
        "scores": {"normalise": "standard", "missing_eos_penalty": 1.0, "length": dict(sizes.length)},
        "actor": {"lr": 5e-6, "schedule": "cosine", "eps": 1e-8},
        "critic": {"lr": 2e-5, "schedule": "cosine", "eps": 1e-8},
        "kl": {"start": 0.5, "target": 2.0, "horizon": 1000, "limit": 6.0, "on_limit": "rollback"},
        "logging": {"gold_every": 10, "samples": 0},  # the report of the run is kept, without texts of others
        "checkpoints": {"every": 20, "keep": 1},
    }
    is_whole = study.run("ppo", {"ppo": stage})
    keep_report(study.options, "ppo", study.options.work / "ppo")
    (health,) = examine(study.options.work / "ppo")
    return {
        "is_whole": is_whole,
        "doctor": {"is_healthy": health.diagnosis.is_healthy, "verdict": health.diagnosis.verdict},
        "curve": figures.ppo_curve(study.options.work / "ppo" / "ppo"),
        "costs": study.costs("ppo", "ppo"),
        "settings": study.settings("ppo", "ppo"),
    }


def dpo_stage(rate: float) -> str:
    """
    >>> dpo_stage(3e-6)
    'dpo-3e-06'
    """
    return f"dpo-{rate:.0e}"


def dpo(study: Study) -> Record:
    sizes = study.sizes
    stages = {
        dpo_stage(rate): {
            "kind": "preference",
            "from": study.model("train", "sft"),
            "method": {"kind": "dpo", "beta": 0.1},
            "data": str(study.files.pairs),
            "heldout": str(study.files.heldout),
            "max_length": sizes.max_length,
            "batch": sizes.batch,
            "optimiser": {"lr": rate, "warmup": 0.1},
            "eval": {"every": RARELY},
            "checkpoints": {"every": RARELY},
        }
        for rate in sizes.dpo_rates
    }
    study.run("dpo", stages)
    return {"costs": study.costs("dpo", *stages), "settings": study.settings("dpo", *stages)}


def policies(study: Study) -> dict[str, str]:
    """The models that are compared, the baseline first."""
    dpo_models = {dpo_stage(rate): study.model("dpo", dpo_stage(rate)) for rate in study.sizes.dpo_rates}
    return {"sft": study.model("train", "sft"), "ppo": study.model("ppo", "ppo"), **dpo_models}


def evaluate_stage(study: Study, models: list[str], answers: int) -> Record:
    sizes = study.sizes
    return {
        "kind": "evaluate",
        "models": models,
        "prompts": str(study.files.questions),
        "reward": study.judge("train", THRESHOLD),
        "gold": study.judge("gold", NEVER),
        "groups": ["task"],
        "answers": answers,
        "max_new_tokens": sizes.new_tokens,
        "max_prompt_tokens": sizes.max_length - sizes.new_tokens,
        "too_long": "drop",
    }


def answers(study: Study) -> Record:
    models = policies(study)
    study.run("answers", {"eval": evaluate_stage(study, list(models.values()), study.sizes.answers)})
    names = {place: name for name, place in models.items()}
    methods = figures.method_numbers(study.options.work / "answers" / "eval", names)
    return {"methods": methods, "dpo": figures.nearest(methods, "ppo", "dpo-"), "costs": study.costs("answers", "eval")}


def best(study: Study) -> Record:
    """Best-of-N: chosen by the reward models among answers that the comparison does not read."""
    baseline, most = study.sizes.answers, max(study.sizes.best_of)
    study.run("best", {"eval": evaluate_stage(study, [study.model("train", "sft")], baseline + most)})
    rows = figures.answer_rows(study.options.work / "best" / "eval", study.files.questions)
    by_n = {str(n): figures.best_of(rows, n, baseline=baseline) for n in study.sizes.best_of}
    return {"best_of": by_n, "costs": study.costs("best", "eval")}


def exams(study: Study) -> Record:
    """Exams for the start, PPO and the DPO that is nearest to it in KL; then the gate for both."""
    models = policies(study)
    near = study.numbers.values["parts"]["answers"]["dpo"]
    chosen = {"sft": models["sft"], "ppo": models["ppo"], near: models[near]}
    places = list(chosen.values())
    study.run(
        "exams", {name: {"kind": "exam", "models": places, **settings} for name, settings in study.sizes.exams.items()}
    )
    folders = [study.options.work / "exams" / name for name in study.sizes.exams]
    names = {place: name for name, place in chosen.items()}
    numbers = figures.exam_numbers(folders, names, baseline="sft")
    study.numbers.put("exams", {**numbers, "costs": study.costs("exams", *study.sizes.exams)})
    verdicts = {name: gate(study, chosen, name) for name in ("ppo", near)}
    return {**study.numbers.values["parts"]["exams"], "gate": verdicts}


def gate(study: Study, models: Mapping[str, str], name: str) -> Record:
    rules = study.options.work / "gate.yaml"
    rules.write_text(study.sizes.rules)
    stage = {
        "kind": "gate",
        "candidate": models[name],
        "baseline": models["sft"],
        "from": [str(study.options.work / "answers" / "eval")]
        + [str(study.options.work / "exams" / exam) for exam in study.sizes.exams],
        "rules": str(rules),
        "badcases": str(study.options.work / "badcases"),
        "ledger": str(study.options.work / "looks.jsonl"),
    }
    study.run(f"gate-{name}", {"gate": stage})
    return figures.gate_numbers(study.options.work / f"gate-{name}" / "gate")


PARTS: dict[str, Callable[[Study], Record]] = {
    "train": train, "gold": gold, "ppo": ppo, "dpo": dpo, "answers": answers, "exams": exams, "best": best
}  # fmt: skip
"""In this order: where minutes run out, the exams are worth more than best-of-N."""


def bring_exams(source: Path) -> None:
    """What the exams need, before anything is trained."""
    require_langdetect("IFEval")
    for exam, folder in PUBLIC_EXAMS.items():
        if not (exams_home() / exam).is_dir():
            fetch_exam(exam, source / folder)


def open_study(options: Options) -> Study:
    """The data of a seed, and the exams, brought into its work folder."""
    sizes = FULL if options.size == "full" else SMALL
    clock, work = Clock(), options.work.resolve()
    source = options.data
    if options.size == "small":
        source = work / "toy"
        write_toy(source)
    files = prepare(
        source,
        work / "data",
        seed=options.seed,
        pairs_a_prompt=sizes.pairs_a_prompt,
        demonstrations=sizes.demonstrations,
    )
    if options.size == "full" and "exams" in options.only:
        bring_exams(options.data / "eval")
    numbers = SeedFile(options, of_one_work=True)
    clock("data: " + ", ".join(f"{count:,} {name}" for name, count in files.counts.items()))
    return Study(options=options, sizes=sizes, files=files, numbers=numbers, clock=clock)


def run_parts(study: Study) -> list[str]:
    """Run the parts one after the other; gives those that failed. Others are worth their minutes without them."""
    failed: list[str] = []
    for part in study.options.only:
        began = study.clock.seconds
        try:
            numbers = PARTS[part](study)
        except Exception:
            print_exc()
            failed.append(part)
            continue
        seconds = study.numbers.seconds(part, study.clock.seconds - began, numbers.get("costs", {}).values())
        study.numbers.put(part, {**numbers, "seconds": seconds})
        study.clock(f"{part}: done in {study.clock.seconds - began:.0f} s")
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(STUDY, list(PARTS), __doc__ or "", arguments)
    failed = [] if options.is_merge else run_parts(open_study(options))
    merge(options)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
