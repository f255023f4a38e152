"""Folders as `exam` and `evaluate` stages leave them, made of numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from kedge.exams.rows import ItemRow, write_rows
from kedge.gate.evidence import Source
from kedge.gate.rules import Rules, load_rules

Scores = Mapping[str, Sequence[float]]
"""By model, one an item."""
BOTH = {"candidate": "ppo", "baseline": "sft"}


def rows_of(
    exam: str,
    metric: str,
    scores: Scores,
    *,
    clusters: Sequence[str] | None = None,
    groups: Sequence[Mapping[str, str]] | None = None,
) -> list[ItemRow]:
    return [
        ItemRow(
            exam=exam,
            metric=metric,
            item=f"{exam}-{number}",
            cluster=clusters[number] if clusters else f"{exam}-{number}",
            model=model,
            score=score,
            answer="0" * 32,
            seed=0,
            groups=groups[number] if groups else {},
        )
        for model, own in scores.items()
        for number, score in enumerate(own)
    ]


def write_exam(
    folder: Path,
    rows: Sequence[ItemRow],
    *,
    better: Mapping[str, str] | None = None,
    items_hash: str = "abc",
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """`better` is by metric; the first metric of an exam that occurs is its main one."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "items.jsonl", rows)
    exams: dict[str, Any] = {}
    counts: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        facts = exams.setdefault(
            row.exam,
            {
                "title": row.exam,
                "licence": "ours",
                "items_hash": items_hash,
                "main": row.metric,
                "metrics": {},
                "settings": dict(settings or {}),
            },
        )
        how = (better or {}).get(row.metric, "more")
        facts["metrics"].setdefault(row.metric, {"better": how, "summary": "a share"})
        counts.setdefault((row.exam, row.metric, row.model), []).append(row.score)
    results = [
        {"exam": exam, "metric": metric, "model": model, "mean": fmean(own), "items": len(own), "group": None}
        for (exam, metric, model), own in counts.items()
    ]
    models = list(dict.fromkeys(row.model for row in rows))
    about = {"models": models, "exams": exams, "results": results, "template": {}}
    (folder / "exam.json").write_text(json.dumps(about))
    return folder


def write_evaluation(
    folder: Path,
    scores: Scores,
    *,
    lengths: Scores | None = None,
    kl: Sequence[float] | None = None,
    source: str = "gold",
) -> Path:
    """The first model is the one that KL is measured from."""
    folder.mkdir(parents=True, exist_ok=True)
    baseline = next(iter(scores))
    lines = [
        {
            "id": f"{model}-{prompt}-0",
            "model": model,
            "prompt": [{"role": "user", "content": f"question {prompt}"}],
            "answer": "an answer",
            "scores": {source: score},
            "kl": (kl[prompt] if kl else 1.0) if model != baseline else None,
            "length": lengths[model][prompt] if lengths else 10 + prompt % 7,
            "finished": True,
            "seed": 0,
            "origin": "prompts.jsonl:1",
        }
        for model, own in scores.items()
        for prompt, score in enumerate(own)
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    models = {model: {"answers": len(own)} for model, own in scores.items()}
    (folder / "evaluation.json").write_text(json.dumps({"baseline": baseline, "models": models}))
    return folder


Verdicts = Sequence[tuple[float | None, float | None, int, int]]


def write_judgements(folder: Path, verdicts: Mapping[str, Verdicts]) -> Path:
    """What judges said of `ppo` beside `sft`, into the folder of an evaluation: by judge, for each prompt the verdict
    when shown first, the verdict when shown second, and both lengths."""
    rows = [
        {
            "judge": judge,
            "id": f"ppo-{prompt}-0",
            "model": "ppo",
            "prompt": prompt,
            "as_first": as_first,
            "as_second": as_second,
            "preference": None,
            "probability": None,
            "length": length,
            "baseline_length": other,
        }
        for judge, own in verdicts.items()
        for prompt, (as_first, as_second, length, other) in enumerate(own)
    ]
    (folder / "judgements.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "evaluation.json"
    about = json.loads(file.read_text())
    rates = {judge: {"comparisons": len(own)} for judge, own in verdicts.items()}
    file.write_text(json.dumps({**about, "judges": {"ppo": rates}}))
    return folder


def source_of(folder: Path, names: Mapping[str, str] = BOTH) -> Source:
    return Source(folder=folder, names=names)  # pyright: ignore[reportArgumentType]


def write_rules(folder: Path, text: str) -> Rules:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "gate.yaml"
    file.write_text(text)
    return load_rules(file)


def binary(correct: int, items: int) -> list[float]:
    return [1.0] * correct + [0.0] * (items - correct)
