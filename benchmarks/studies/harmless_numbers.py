"""The numbers of the study `harmless`, read from the folders of its stages: reports, evaluations, exams, verdicts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from common import Estimate, Record, by_cluster
from harmless_data import TASKS
from kedge.algorithms.best_of_n import best_of_weights
from kedge.api.run import StageRun
from kedge.core.stats import best_of_kl
from kedge.core.text_measures import distinct
from kedge.evaluate.bounds import ratio_bounds
from kedge.exams.changes import change_of
from kedge.exams.rows import ItemRow, read_rows

TIE = 1e-4
"""Scores that differ by less are equal, as in stage `evaluate`."""
CURVE = {"kl": "kl/mean", "reward": "reward/mean", "gold": "gold/mean", "length": "length/mean", "price": "kl/coef"}
TWO_SIDED = 0.025


ASKED_FOR = (
    "epochs", "batch", "members", "iterations", "optimiser.lr", "actor.lr", "method.beta", "loss.length_control",
    "scores.normalise", "scores.length.price", "scores.length.least", "scores.length.most",
    "kl.start", "kl.target", "kl.horizon", "kl.limit",
)  # fmt: skip
"""Settings that the page tells of."""


def settings_of(stage: Path) -> Record:
    """Those of `ASKED_FOR` that the stage has."""
    settings = StageRun(stage).settings
    found = {name: _below(settings, name.split(".")) for name in ASKED_FOR}
    return {name: value for name, value in found.items() if value is not None}


def _below(settings: Any, path: Sequence[str]) -> Any:
    for name in path:
        settings = settings.get(name) if isinstance(settings, dict) else None
    return settings


def reward_report(stage: Path) -> Record:
    """How far a reward model can be trusted, on pairs to prompts that it has not seen."""
    report = json.loads((stage / "reward-report.json").read_text())
    balanced = report["length"]["balanced"]
    folds = stage / "out-of-fold.json"
    return {
        "accuracy": _share(report["accuracy"], report["prompts"]),
        "balanced": None if balanced is None else _share(balanced, report["prompts"]),
        "longer_wins": report["length"]["rule"]["value"],
        "out_of_fold": _out_of_fold(folds) if folds.is_file() else None,
        "is_fit": report["is_fit"],
        "verdict": report["verdict"],
        "pairs": report["pairs"],
    }


def _out_of_fold(file: Path) -> Record:
    report = json.loads(file.read_text())
    return _share(report["accuracy"], report["prompts"])


def _share(values: Mapping[str, Any], count: int) -> Record:
    return Estimate(value=values["value"], low=values["low"], high=values["high"], count=count).json()


def ppo_curve(stage: Path) -> list[Record]:
    """One record an iteration; gold where it was asked."""
    steps = StageRun(stage).metrics()
    return [
        {"step": step["step"], **{name: round(step[key], 4) for name, key in CURVE.items() if key in step}}
        for step in steps
        if "kl/mean" in step and math.isfinite(step["kl/mean"])
    ]


def method_numbers(stage: Path, names: Mapping[str, str]) -> Record:
    """Every model of an evaluation beside the first; `names` has what the study calls a model by its folder."""
    evaluation = json.loads((stage / "evaluation.json").read_text())
    lengths = _lengths(stage / "answers.jsonl")
    baseline = evaluation["baseline"]
    return {
        names[place]: _method(evaluation, place)
        | {"length_ratio": _length_ratio(lengths[place], lengths[baseline])}
        | {"distinct_change": summary["distinct"] / evaluation["models"][baseline]["distinct"] - 1}
        for place, summary in evaluation["models"].items()
    }


def _method(evaluation: Record, place: str) -> Record:
    summary = evaluation["models"][place]
    return {
        "kl": _estimate(summary["kl"]),
        "length": _estimate(summary["length"]),
        **{name: summary[name] for name in ("distinct", "finished", "repetition")},
        "wins": _wins(evaluation, place),
        "tasks": {
            task: {
                "kl": _estimate(group["models"][place]["kl"]),
                "length": _estimate(group["models"][place]["length"]),
                "gold": _estimate(group["models"][place]["scores"]["gold"]["mean"]),
                **_wins(group, place),
            }
            for task, group in evaluation["groups"]["task"].items()
        },
    }


def _wins(evaluation: Record, place: str) -> Record:
    """Win rates over the baseline by either judge, as they are and at equal length."""
    by_source = evaluation["comparisons"].get(place, {})
    wins = {f"{source}_wins": _rate(comparison["win_rate"]) for source, comparison in by_source.items()}
    equal = {f"{source}_wins_equal": _estimate(found["length_controlled"]) for source, found in by_source.items()}
    return wins | equal


def _rate(rate: Record) -> Record:
    return Estimate(value=rate["rate"], low=rate["low"], high=rate["high"], count=rate["prompts"]).json()


def _estimate(found: Record | None) -> Record | None:
    if found is None:
        return None
    return Estimate(value=found["mean"], low=found["low"], high=found["high"], count=found["prompts"]).json()


def _lengths(file: Path) -> dict[str, dict[str, list[int]]]:
    """By model and prompt."""
    lengths: dict[str, dict[str, list[int]]] = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        lengths.setdefault(row["model"], {}).setdefault(row["origin"], []).append(row["length"])
    return lengths


def _length_ratio(own: Mapping[str, Sequence[int]], other: Mapping[str, Sequence[int]]) -> Record:
    means = [fmean(own[prompt]) for prompt in own], [fmean(other[prompt]) for prompt in own]
    bounds = ratio_bounds(*means, alpha=TWO_SIDED)
    return Estimate(value=bounds.value, low=bounds.low, high=bounds.high, count=bounds.items).json()


def nearest(methods: Mapping[str, Record], to: str, prefix: str) -> str:
    """The method of this prefix whose KL is nearest to that of another, by ratio.

    >>> methods = {"ppo": {"kl": {"value": 4.0}}, "dpo-a": {"kl": {"value": 1.0}}, "dpo-b": {"kl": {"value": 9.0}}}
    >>> nearest(methods, "ppo", "dpo-")
    'dpo-b'
    """
    target = max(methods[to]["kl"]["value"], 1e-3)
    names = [name for name in methods if name.startswith(prefix)]
    return min(names, key=lambda name: abs(math.log(max(methods[name]["kl"]["value"], 1e-3) / target)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRow:
    """One answer of the start, as the choice of the best reads it."""

    prompt: str
    task: str
    number: int
    reward: float
    gold: float
    length: int
    text: str


def answer_rows(stage: Path, questions: Path) -> list[AnswerRow]:
    """The answers of an evaluation of one model, with the task of their prompts."""
    tasks = [json.loads(line)["task"] for line in questions.read_text().splitlines()]
    rows: list[AnswerRow] = []
    for line in (stage / "answers.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.append(
            AnswerRow(
                prompt=row["origin"],
                task=tasks[int(row["origin"].rpartition(":")[2]) - 1],
                number=int(row["id"].rpartition("-")[2]),
                reward=row["scores"]["reward"],
                gold=row["scores"]["gold"],
                length=row["length"],
                text=row["answer"],
            )
        )
    return rows


def best_of(rows: Sequence[AnswerRow], n: int, *, baseline: int) -> Record:
    """The best of n by reward against single answers, by gold. The first answers to a prompt are what it is compared
    with, and the best is chosen among the others, so that the two are independent; every choice of n counts."""
    prompts: dict[str, list[AnswerRow]] = {}
    for row in sorted(rows, key=lambda row: row.number):
        prompts.setdefault(row.prompt, []).append(row)
    outcomes = [_best_of_prompt(own, n, baseline) for own in prompts.values()]
    tasks = [own[0].task for own in prompts.values()]
    lengths = [o["length"] for o in outcomes], [o["single_length"] for o in outcomes]
    ratio = ratio_bounds(*lengths, alpha=TWO_SIDED)
    chosen = [max(own[baseline : baseline + n], key=lambda row: row.reward).text.split() for own in prompts.values()]
    single = [own[0].text.split() for own in prompts.values()]
    return {
        "kl": best_of_kl(n),
        "wins": _of(outcomes, "wins", range(len(tasks))),
        "length_ratio": Estimate(value=ratio.value, low=ratio.low, high=ratio.high, count=ratio.items).json(),
        "distinct_change": distinct(_numbered(chosen), n=2) / distinct(_numbered(single), n=2) - 1,
        "tasks": {
            task: {"gold_wins": _of(outcomes, "wins", places), "gold": _of(outcomes, "gold", places)}
            for task in TASKS
            if (places := [place for place, own in enumerate(tasks) if own == task])
        },
    }


def _best_of_prompt(rows: Sequence[AnswerRow], n: int, baseline: int) -> dict[str, float]:
    singles, others = rows[:baseline], rows[baseline:]
    weights = best_of_weights(torch.tensor([[row.reward for row in others]]), n=n)[0].tolist()
    wins = [fmean(_outcome(row.gold, single.gold) for single in singles) for row in others]
    return {
        "wins": sum(weight * win for weight, win in zip(weights, wins, strict=True)),
        "gold": sum(weight * row.gold for weight, row in zip(weights, others, strict=True)),
        "length": sum(weight * row.length for weight, row in zip(weights, others, strict=True)),
        "single_length": fmean(single.length for single in singles),
    }


def _outcome(own: float, other: float) -> float:
    return 0.5 if abs(own - other) <= TIE else float(own > other)


def _of(outcomes: Sequence[Mapping[str, float]], name: str, places: Sequence[int]) -> Record:
    return by_cluster([outcomes[place][name] for place in places], list(places)).json()


def _numbered(texts: Sequence[Sequence[str]]) -> list[list[int]]:
    """Words as numbers, equal for equal words."""
    ids: dict[str, int] = {}
    return [[ids.setdefault(word, len(ids)) for word in text] for text in texts]


def exam_numbers(folders: Sequence[Path], names: Mapping[str, str], *, baseline: str) -> Record:
    """By exam and metric: every model's mean, and its difference to the baseline on the same items."""
    results: dict[str, Record] = {}
    for folder in folders:
        about = json.loads((folder / "exam.json").read_text())
        rows = list(read_rows(folder / "items.jsonl"))
        for found in about["results"]:
            if found.get("group") is None:
                key = f"{found['exam']}.{found['metric']}"
                entry = results.setdefault(key, {"better": _better(about, found), "models": {}, "changes": {}})
                mean = Estimate(value=found["mean"], low=found["low"], high=found["high"], count=found["clusters"])
                entry["models"][names[found["model"]]] = mean.json()
        _add_changes(results, rows, names, baseline)
    return {"results": results}


def _better(about: Record, found: Record) -> str:
    return str(about["exams"][found["exam"]]["metrics"].get(found["metric"], {}).get("better", "more"))


def _add_changes(results: dict[str, Record], rows: Sequence[ItemRow], names: Mapping[str, str], baseline: str) -> None:
    by_key: dict[tuple[str, str], dict[str, ItemRow]] = {}
    for row in rows:
        by_key.setdefault((f"{row.exam}.{row.metric}", names[row.model]), {})[row.item] = row
    for (key, model), own in by_key.items():
        start = by_key.get((key, baseline), {})
        pairs = [(start[item], row) for item, row in own.items() if item in start]
        if model != baseline and pairs and key in results:
            change = change_of(pairs)
            results[key]["changes"][model] = Estimate(
                value=change.difference, low=change.low, high=change.high, count=change.items
            ).json()


def gate_numbers(stage: Path) -> Record:
    """The verdict of a gate, rule by rule."""
    verdict = json.loads((stage / "verdict.json").read_text())
    fields = ("section", "metric", "verdict", "value", "low", "high", "threshold", "items", "needed", "note")
    return {
        "verdict": verdict["verdict"],
        "rules": [{name: rule.get(name) for name in fields} for rule in verdict["results"]],
    }
