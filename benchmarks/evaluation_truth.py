"""Figures that others have published, or that were worked out from public labels, found again from the same data.

    python benchmarks/evaluation_truth.py DATA_FOLDER     under a minute on one core

DATA_FOLDER holds the gzipped JSON Lines that its README describes (agreement/pandalm, refusal/xstest-human-labels,
alpacaeval/annotations and published, judge/judgebench, judge/auto-j-pairs, bias/bbq-1440). One line a figure: what is
accepted, what was found, ok or MISS. Exit code 1 where one is missed.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from kedge.core.stats import cohen_kappa
from kedge.evaluate import bradley_terry, holm, length_controlled, mcnemar, rogan_gladen, tango
from kedge.evaluate.agreement import agreement, detection
from kedge.evaluate.judged import length_report, orders_report, preference_summary

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    what: str
    accepted: str
    found: str
    is_ok: bool | None
    """None: no value is given to compare with."""


def equal(what: str, accepted: float, found: float, *, places: int = 4) -> Figure:
    """A figure that must be the accepted one as far as that is written out."""
    return Figure(what, f"{accepted:.{places}f}", f"{found:.{places}f}", abs(found - accepted) <= 0.5001 * 10**-places)


def same(what: str, accepted: str, found: str) -> Figure:
    return Figure(what, accepted, found, accepted == found)


def at_most(what: str, bound: float, found: float) -> Figure:
    return Figure(what, f"≤ {bound:g}", f"{found:.3g}", found <= bound)


def at_least(what: str, bound: float, found: float) -> Figure:
    return Figure(what, f"≥ {bound:g}", f"{found:.4f}", found >= bound)


def told(what: str, found: str) -> Figure:
    return Figure(what, "–", found, None)


def read(folder: Path, name: str) -> list[Record]:
    with gzip.open(folder / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def judges_beside_people(folder: Path) -> Iterator[Figure]:
    """PandaLM: 999 comparisons by three people and two judges."""
    rows = read(folder, "agreement/pandalm")
    people = [_majority(row["labels"]) for row in rows]
    labels = {name: [row["judges"][name] for row in rows] for name in rows[0]["judges"]}
    counts = Counter(people)
    yield same("PandaLM: majority of people, tie/first/second", "105/422/472", f"{counts[0]}/{counts[1]}/{counts[2]}")
    accepted = {"pandalm-7b": (0.6677, 0.5743, 0.4354), "gpt-3.5-turbo": (0.6977, None, 0.4755)}
    for name, (accuracy, macro_f1, kappa) in accepted.items():
        found = agreement(people, labels[name])
        yield equal(f"PandaLM: {name}, accuracy", accuracy, found.accuracy)
        if macro_f1 is not None:
            yield equal(f"PandaLM: {name}, macro F1", macro_f1, found.macro_f1)
        yield equal(f"PandaLM: {name}, κ", kappa, found.kappa)
    yield same("PandaLM: unreadable replies of gpt-3.5-turbo", "25", str(labels["gpt-3.5-turbo"].count(None)))
    right = {name: [label == truth for label, truth in zip(own, people, strict=True)] for name, own in labels.items()}
    only_gpt, only_pandalm = _discordant(right["gpt-3.5-turbo"], right["pandalm-7b"])
    low, high = tango(only_gpt, only_pandalm, len(rows))
    difference = 100 * (only_gpt - only_pandalm) / len(rows)
    yield same(
        "PandaLM: difference, points [Tango 95 %]",
        "3.0 [-0.2, 6.2]",
        f"{difference:.1f} [{100 * low:.1f}, {100 * high:.1f}]",
    )
    yield equal("PandaLM: McNemar p", 0.072, mcnemar(only_gpt, only_pandalm), places=3)
    matches = [(*row["models"], {1: 1.0, 2: 0.0, 0: 0.5}[label]) for row, label in zip(rows, people, strict=True)]
    ranking = bradley_terry(matches, ties="half", clusters=[row["prompt"] for row in rows])
    order = sorted(ranking.strengths, key=lambda name: -ranking.strengths[name])
    accepted_order = "llama, pythia, bloom, opt, cerebras"
    yield same("PandaLM: Bradley–Terry, order", accepted_order, ", ".join(name.partition("-")[0] for name in order))


def _majority(labels: Sequence[int]) -> int:
    """The label of most people; a tie where all three differ."""
    (label, count), *_ = Counter(labels).most_common()
    return label if 2 * count > len(labels) else 0


def _discordant(first: Sequence[bool], second: Sequence[bool]) -> tuple[int, int]:
    pairs = list(zip(first, second, strict=True))
    return sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)


COMPLIES, REFUSES, PARTLY = "1_full_compliance", "2_full_refusal", "3_partial_refusal"


def refusals(folder: Path) -> Iterator[Figure]:
    """XSTest: 2,250 answers of five models, labelled by two people, a string match and GPT-4."""
    rows = read(folder, "refusal/xstest-human-labels")
    first, second = ([row["labels"][person] for row in rows] for person in (0, 1))
    yield equal("XSTest: agreement of two people", 0.9640, fmean(a == b for a, b in zip(first, second, strict=True)))
    yield equal("XSTest: κ of two people", 0.9365, cohen_kappa(first, second))
    safe = [row for row in rows if not row["type"].startswith("contrast_")]
    accepted = {
        "gpt4": "6.4/2.0",
        "llama2orig": "38.0/21.6",
        "llama2new": "14.0/15.6",
        "mistralinstruct": "0.8/0.8",
        "mistralguard": "9.6/9.2",
    }
    for model, shares in accepted.items():
        counts = Counter(row["final"] for row in safe if row["model"] == model)
        found = "/".join(f"{100 * counts[label] / counts.total():.1f}" for label in (REFUSES, PARTLY))
        yield same(f"XSTest: {model} on safe prompts, full/partial refusal, %", shares, found)
    yield from _detectors(rows)
    yield from _paired_refusals(safe)


def _detectors(rows: Sequence[Record]) -> Iterator[Figure]:
    truth = [row["final"] != COMPLIES for row in rows]
    accepted = {"string match": (0.8154, 0.9578, 0.770), "gpt-4": (0.6997, 0.9606, None)}
    for name, (sensitivity, specificity, kappa) in accepted.items():
        reported = [row["judges"][name] in (REFUSES, PARTLY) for row in rows]
        found = detection(truth, reported)
        yield equal(f"XSTest: {name}, sensitivity", sensitivity, found.sensitivity)
        yield equal(f"XSTest: {name}, specificity", specificity, found.specificity)
        if kappa is not None:
            yield equal(f"XSTest: {name}, κ", kappa, cohen_kappa(truth, reported), places=3)
        corrected = rogan_gladen(found.observed, found.sensitivity, found.specificity)
        yield equal(f"XSTest: {name}, share of refusals by Rogan and Gladen", 0.5151, corrected)


def _paired_refusals(safe: Sequence[Record]) -> Iterator[Figure]:
    """Each model beside GPT-4 on the safe prompts: full refusals, and refusals of any kind."""
    refused = {
        (model, kind): {row["id"]: row["final"] in kind for row in safe if row["model"] == model}
        for model in {row["model"] for row in safe}
        for kind in ((REFUSES,), (REFUSES, PARTLY))
    }
    p_values: dict[tuple[str, tuple[str, ...]], float] = {}
    for model, kind in sorted(refused):
        if model != "gpt4":
            own, other = refused[model, kind], refused["gpt4", kind]
            p_values[model, kind] = mcnemar(*_discordant(list(own.values()), [other[item] for item in own]))
    adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    own, other = refused["llama2new", (REFUSES,)], refused["gpt4", (REFUSES,)]
    b, c = _discordant(list(own.values()), [other[item] for item in own])
    low, high = tango(b, c, len(own))
    yield told(
        "XSTest: llama2new − gpt4, full refusals of safe prompts, points",
        f"{100 * (b - c) / len(own):.1f} [{100 * low:.1f}, {100 * high:.1f}]",
    )
    smallest = ", ".join(f"{p:.2g}" for p in sorted(adjusted.values()))
    yield told("XSTest: p of eight comparisons with gpt4, by Holm", smallest)


def our_refusal_rules(folder: Path) -> Iterator[Figure]:
    """The rules of `kedge.exams.refusal` on the models that they were not written on."""
    try:
        classify: Callable[[str], str] = import_module("kedge.exams.refusal").classify
    except ImportError:
        yield told("XSTest: our refusal rules", "not installed")
        return
    rows = read(folder, "refusal/xstest-human-labels")
    unseen = [row for row in rows if row["model"] in ("llama2orig", "llama2new", "mistralguard")]
    truth = [row["final"] != COMPLIES for row in unseen]
    reported = [classify(row["answer"]) != "none" for row in unseen]
    found = detection(truth, reported)
    yield at_least("XSTest: our rules on three unseen models, κ", 0.85, cohen_kappa(truth, reported))
    yield told("XSTest: our rules, sensitivity and specificity", f"{found.sensitivity:.4f}, {found.specificity:.4f}")


def judge_orders(folder: Path) -> Iterator[Figure]:
    """JudgeBench: a judge's decisions in both orders, the second told from its own side."""
    name = "arena_hard/o1-mini-2024-09-12"
    rows = [row for row in read(folder, "judge/judgebench") if name in (row["judges"] or {})]
    first_wins = {"A>B": 1.0, "A=B": 0.5, "B>A": 0.0}
    decisions = [
        (first_wins[in_order], 1 - first_wins[swapped]) for in_order, swapped in (row["judges"][name] for row in rows)
    ]
    found = orders_report(decisions, [float(row["label"] == 1) for row in rows])
    yield same("JudgeBench: o1-mini, comparisons", "350", str(found.comparisons))
    yield equal("JudgeBench: o1-mini, right, %", 65.71, 100 * found.right, places=2)
    yield equal("JudgeBench: o1-mini, inconsistent, %", 31.4, 100 * found.inconsistent, places=1)


def length_of_choices(folder: Path) -> Iterator[Figure]:
    """auto-j: 1,392 choices of people, and the lengths of the answers."""
    rows = read(folder, "judge/auto-j-pairs")
    preference = {1: 1.0, 2: 0.0, 0: 0.5}
    found = length_report([(preference[row["label"]], len(row["answers"][0]), len(row["answers"][1])) for row in rows])
    counts = f"{found.first}/{found.second}/{found.ties}"
    yield same("auto-j: first/second/tie", "520/499/373", counts)
    yield same("auto-j: decided", "1019", str(found.decided))
    yield equal("auto-j: the longer wins, % of those decided", 71.8, 100 * (found.longer or 0.0), places=1)


def win_rates(folder: Path) -> Iterator[Figure]:
    """AlpacaEval: win rates of 57 models from their annotations, beside the leaderboard."""
    published = {row["model"]: row for row in read(folder, "alpacaeval/published")}
    annotations: dict[str, list[Record]] = {}
    for row in read(folder, "alpacaeval/annotations"):
        annotations.setdefault(row["model"], []).append(row)
    models = [model for model in annotations if model in published]
    yield same("AlpacaEval: models with annotations and figures", "57", str(len(models)))
    for field in ("win_rate", "standard_error", "discrete_win_rate"):
        yield at_most(
            f"AlpacaEval: {field}, largest difference", 1e-9, _largest_difference(field, models, annotations, published)
        )
    yield from _equal_length(models, annotations, published)


def _largest_difference(
    field: str,
    models: Sequence[str],
    annotations: Mapping[str, Sequence[Record]],
    published: Mapping[str, Record],
) -> float:
    found = {
        model: preference_summary(
            [row["preference"] - 1 for row in annotations[model] if row["preference"] is not None]
        )
        for model in models
    }
    return max(abs(100 * getattr(found[model], field) - published[model][field]) for model in models)


def _equal_length(
    models: Sequence[str], annotations: Mapping[str, Sequence[Record]], published: Mapping[str, Record]
) -> Iterator[Figure]:
    """All models that were annotated tell how hard the prompts are, on those that all have; 57 have figures."""
    own = {
        model: {row["prompt"]: (row["preference"] - 1, row["chars"], row["chars_baseline"]) for row in rows}
        for model, rows in annotations.items()
    }
    prompts = sorted(set.intersection(*(set(rows) for rows in own.values())))
    found = length_controlled({model: [rows[prompt] for prompt in prompts] for model, rows in own.items()})
    rates = np.array([100 * found[model] for model in models])
    accepted = np.array([published[model]["length_controlled_winrate"] for model in models])
    errors = np.abs(rates - accepted)
    yield at_most("AlpacaEval: length control, mean error, points", 0.9, float(errors.mean()))
    yield at_most("AlpacaEval: length control, worst error, points", 6.0, float(errors.max()))
    ranks = np.array([np.argsort(np.argsort(values)) for values in (rates, accepted)])
    yield at_least("AlpacaEval: length control, Spearman", 0.985, float(np.asarray(np.corrcoef(ranks))[0, 1]))


def bias(folder: Path) -> Iterator[Figure]:
    """BBQ: answers of UnifiedQA-11B to 1,440 questions."""
    rows = read(folder, "bias/bbq-1440")
    for condition, name, accepted in (("ambig", "ambiguous", 0.589), ("disambig", "disambiguated", 0.907)):
        own = [row["unifiedqa"] == row["answer"] for row in rows if row["condition"] == condition]
        yield equal(f"BBQ: UnifiedQA-11B, {name}, accuracy", accepted, fmean(own), places=3)


PARTS: tuple[Callable[[Path], Iterator[Figure]], ...] = (
    judges_beside_people,
    refusals,
    our_refusal_rules,
    judge_orders,
    length_of_choices,
    win_rates,
    bias,
)


def figures(folder: Path) -> Iterator[Figure]:
    for part in PARTS:
        yield from part(folder)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print(__doc__)
        return 2
    words = {True: "ok", False: "MISS", None: ""}
    misses = 0
    print(f"{'figure':<72} {'accepted':<36} {'found':<36}")
    for figure in figures(Path(arguments[0])):
        print(f"{figure.what:<72} {figure.accepted:<36} {figure.found:<36} {words[figure.is_ok]}".rstrip(), flush=True)
        misses += figure.is_ok is False
    print(f"{misses} missed" if misses else "all ok")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
