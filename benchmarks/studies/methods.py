"""The second table of docs/choosing.md: method by method at equal KL, from the seeds of the three studies alone.

    python benchmarks/studies/methods.py

A study without seeds has no rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

import harmless_curves
import harmless_page
from common import RESULTS, Estimate, Record, cell, estimates, fill, over_seeds, points, read_seeds, table
from kedge.core.stats import best_of_kl
from overoptimisation_curves import LOOKS, near

PAGE = RESULTS.parent / "choosing.md"
HEAD = ("study", "method", "KL, nats", "gold", "exams, points from the start", "GPU minutes", "peak GiB")
EXAMS = {
    "harmbench.complied": "HarmBench complied",
    "xstest.refused_safe": "XSTest over-refusal",
    "ifeval.prompt_strict": "IFEval",
    "mmlu.cloze": "MMLU",
}
VERIFIABLE = ("grpo", "rloo", "dapo", "ppo", "rejection")
OVEROPTIMISATION = {"best_of_n": ("at_n", "16", best_of_kl(16)), "ppo": ("at_kl", "2", 2.0)}
"""Where the curves of either part are read: next to two nats."""
Row = tuple[str, ...]


def rows(results: Path) -> list[Row]:
    """The rows of all studies that have seeds."""
    readers = {"harmless": harmless_rows, "overoptimisation": overoptimisation_rows, "verifiable": verifiable_rows}
    found = {study: list(read(seeds)) for study, read in readers.items() if (seeds := read_seeds(results / study))}
    return [(f"[{study}](results/{study}.md)", *row) for study, own in found.items() for row in own]


def harmless_rows(seeds: Sequence[Record]) -> Iterator[Row]:
    """At the largest KL that all methods have reached on harmless prompts; exams of the runs as they ended."""
    seeds = [harmless_page.normal(record) for record in seeds]
    at = harmless_curves.equal_kl(seeds, "harmless")
    costs = {
        "PPO": [("train", "harmless"), ("train", "helpful"), ("ppo", "ppo")],
        "DPO": [("dpo", "dpo")],
        "best-of-N": [("train", "harmless"), ("train", "helpful")],
    }
    is_evidence = harmless_page.gold_is_evidence(seeds)
    for label, gold in harmless_curves.at_equal_kl(seeds, "harmless").items():
        wins = f"wins {points(gold)} %" + ("" if is_evidence else " (no evidence)")
        exams = _exams(seeds, label.lower())
        yield label, f"{at:.2f}", wins, exams, *_cost(seeds, costs[label])


def _exams(seeds: Sequence[Record], method: str) -> str:
    found = {
        words: over_seeds(changes)
        for key, words in EXAMS.items()
        if (changes := estimates(seeds, "exams", "results", key, "changes", method))
    }
    return "; ".join(f"{words} {points(change, is_signed=True)}" for words, change in found.items()) or "–"


def verifiable_rows(seeds: Sequence[Record]) -> Iterator[Row]:
    """Each method at the KL that it ended at; gold is the checker itself, on held-out prompts, and on the prompts of
    the training at the largest KL that all methods have come to."""
    kl_then = common_training_kl(seeds)
    for method in VERIFIABLE:
        gains = [_over(seeds, method, "gains", exam, "prompt_strict") for exam in ("trained", "ifeval")]
        if gains[0] is not None or gains[1] is not None:
            kl = cell(_over(seeds, method, "answers", "kl"), 2)
            held_out = f"held-out prompts {points(gains[0], is_signed=True)} points"
            if (reward := training_reward(seeds, method, kl_then)) is not None:
                held_out += f"; in training at {kl_then:.1f} nats {points(reward)} %"
            ifeval = f"IFEval {points(gains[1], is_signed=True)}"
            yield method, kl, held_out, ifeval, *_cost(seeds, [(method, method)], key="cost")


def common_training_kl(seeds: Sequence[Record]) -> float:
    """The least, over methods and seeds, of the largest mean KL of five neighbouring steps."""
    ends = [
        float(np.convolve(kl, np.full(LOOKS, 1 / LOOKS), mode="valid").max())
        for record in seeds
        for method in VERIFIABLE
        if len(kl := [nats for _, nats in _training(record, method, "kl")]) >= LOOKS
    ]
    return min(ends, default=0.0)


def training_reward(seeds: Sequence[Record], method: str, kl: float) -> Estimate | None:
    """Mean share of instructions followed while training, of the steps next to a KL; None where KL was not measured."""
    found: list[Estimate] = []
    for record in seeds:
        nats, reward = (dict(_training(record, method, name)) for name in ("kl", "reward"))
        steps = [step for step in nats if step in reward]
        at = near([nats[step] for step in steps], [reward[step] for step in steps], kl)
        found += [at] if at is not None else []
    return over_seeds(found) if found else None


def _training(record: Record, method: str, name: str) -> list[tuple[int, float]]:
    return [(step, value) for step, value in record["parts"].get(method, {}).get("curves", {}).get(name, [])]


def overoptimisation_rows(seeds: Sequence[Record]) -> Iterator[Row]:
    """Gold over the start, in deviations of the start's answers to a prompt, next to two nats."""
    for part, (table_name, place, kl) in OVEROPTIMISATION.items():
        names = dict.fromkeys(name for record in seeds for name in record["parts"].get(part, {}).get("curves", {}))
        for name in names:
            gold = _over(seeds, part, "curves", name, table_name, place)
            if gold is not None:
                label = f"{'best of 16' if part == 'best_of_n' else 'PPO'}, {name}"
                cost = _cost(seeds, [(part, f"ppo-{name}")], key="cost") if part == "ppo" else ("–", "–")
                yield label, f"{kl:.2f}", f"{cell(gold, 2)} deviations", "–", *cost


def _over(seeds: Sequence[Record], *path: str) -> Estimate | None:
    found = estimates(seeds, *path)
    return over_seeds(found) if found else None


def _cost(seeds: Sequence[Record], stages: Sequence[tuple[str, str]], *, key: str = "costs") -> tuple[str, str]:
    """Minutes of all stages together, and the largest memory of one; means over seeds."""
    totals: list[float] = []
    peaks: list[float] = []
    for record in seeds:
        costs = [record["parts"].get(part, {}).get(key, {}).get(stage) for part, stage in stages]
        if all(cost and cost.get("seconds") is not None for cost in costs):
            totals.append(sum(cost["seconds"] for cost in costs))
            peaks += [cost["peak_gib"] for cost in costs if cost.get("peak_gib") is not None]
    return f"{fmean(totals) / 60:.1f}" if totals else "–", f"{max(peaks):.1f}" if peaks else "–"


def write(page: Path, results: Path) -> None:
    found = rows(results)
    text = table(HEAD, found) if found else "No study has been run yet."
    page.write_text(fill(page.read_text(encoding="utf-8"), {"studies": text}), encoding="utf-8")


if __name__ == "__main__":
    write(PAGE, RESULTS)
    sys.exit()
