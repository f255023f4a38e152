"""Runs as pipelines leave them, made of numbers: models, exams, evaluations and a sealed verdict."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "gate"))

from gate_files import rows_of, write_exam, write_rules

from kedge.exams.rows import ItemRow
from kedge.gate.decide import decide
from kedge.gate.evidence import Source, read_evidence
from kedge.gate.verdict import GatedModel, seal_verdict
from kedge.runs.folder import Run
from kedge.runs.manifest import Artefact, new_manifest

RULES = "keep: {mmlu: 0.1, safety: 0.1}\nimprove: {win_rate: {judge: gold, at_equal_length: false, over: 0.5}}\n"


def hashes(name: str) -> tuple[str, str]:
    """Content and weights of a made-up model."""
    return f"{name}-content", f"{name}-weights"


def stage(run: Path, name: str, kind: str, *, models: Sequence[str] = (), makes: str = "", **settings: Any) -> Path:
    """A stage that has ended; `models` are asked by it, `makes` is the model that it made."""
    if not (run / "run.json").is_file():
        Run.create(run, manifest=new_manifest(name=run.name, kind="pipeline", seed=0, settings={})).close()
    inputs = [Artefact(name="models", kind="model", path="/models", hash=hashes(model)[0]) for model in models]
    manifest = new_manifest(
        name=run.name, kind=kind, seed=0, stage=name, settings={"models": list(models), **settings}, inputs=inputs
    )
    outputs = [Artefact(name="model", kind="model", path="model", hash=hashes(makes)[0])] if makes else []
    with Run.create(run / name, manifest=manifest) as made:
        made.finish("done", outputs=outputs)
    return run / name


def mixed(both: int, gained: int, lost: int, neither: int) -> tuple[list[float], list[float]]:
    """Scores of a baseline and of a model, item by item."""
    baseline = [1.0] * both + [0.0] * gained + [1.0] * lost + [0.0] * neither
    return baseline, [1.0] * both + [1.0] * gained + [0.0] * lost + [0.0] * neither


def fill_exam(folder: Path, rows: Sequence[ItemRow], texts: Mapping[str, str] | None = None, **how: Any) -> Path:
    """`exam.json`, items and an answer to each item; `texts` may replace prompts and answers by "kind model item"."""
    write_exam(folder, rows, **how)
    about = json.loads((folder / "exam.json").read_text())
    about["weights"] = {model: hashes(model)[1] for model in about["models"]}
    (folder / "exam.json").write_text(json.dumps(about))
    lines: list[dict[str, Any]] = []
    for row in rows:
        right = "right" if row.score else "wrong"
        text = (texts or {}).get(f"answer {row.model} {row.item}", f"{right} answer of {row.model} to {row.item}")
        prompt = (texts or {}).get(f"prompt {row.item}", f"question {row.item}?")
        lines.append(
            {
                "id": f"{row.model}-{row.exam}-{len(lines)}",
                "exam": row.exam,
                "model": row.model,
                "item": row.item,
                "number": 0,
                "prompt": [{"role": "user", "content": prompt}],
                "answer": text,
            }
        )
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def fill_evaluation(folder: Path, scores: Mapping[str, Mapping[str, Sequence[float]]], baseline: str) -> Path:
    """`scores` are by source, then by model, one a prompt."""
    first = next(iter(scores.values()))
    lines = [
        {
            "id": f"{model}-{prompt}-0",
            "model": model,
            "prompt": [{"role": "user", "content": f"heldout {prompt}"}],
            "answer": "an answer",
            "scores": {source: by_model[model][prompt] for source, by_model in scores.items()},
            "kl": None if model == baseline else 1.0,
            "length": 10 + prompt % 7,
            "finished": True,
            "seed": 0,
            "origin": "prompts.jsonl:1",
        }
        for model, own in first.items()
        for prompt in range(len(own))
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    models = {
        model: {
            "answers": len(own),
            "scores": {source: {"mean": _mean(by_model[model]), "unscored": 0} for source, by_model in scores.items()},
        }
        for model, own in first.items()
    }
    about = {"baseline": baseline, "prompts": len(lines), "models": models, "comparisons": {}}
    (folder / "evaluation.json").write_text(json.dumps(about))
    return folder


def _mean(values: Sequence[float]) -> dict[str, float]:
    mean = sum(values) / len(values)
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "prompts": len(values)}


def seal(file: Path, candidate: str, baseline: str, sources: Sequence[Path], rules: str = RULES) -> Path:
    """A verdict that follows from these folders."""
    read = write_rules(file.parent / "rules", rules)
    asked = [Source(folder=source, names={"candidate": candidate, "baseline": baseline}) for source in sources]
    evidence = read_evidence(asked)
    seal_verdict(
        file,
        candidate=gated(candidate),
        baseline=gated(baseline),
        results=decide(read, evidence),
        rules={"file": "gate.yaml", "hash": read.hash, "content": read.as_dict()},
        part="all",
        exams={"mmlu": {"items_hash": "abc", "looks": 21}},
        evidence=evidence.files,
        about={
            "sources": [{"folder": str(one.folder), "names": dict(one.names), "tie": one.tie} for one in asked],
            "judge": {},
            "badcases": {"results": [{"id": "case-1", "verdict": "fail"}]},
        },
    )
    return file


def gated(name: str) -> GatedModel:
    content, weights = hashes(name)
    return GatedModel(name=name, path=f"runs/{name}/model", weights=weights, content=content)


def make_runs(folder: Path, texts: Mapping[str, str] | None = None) -> list[Path]:
    """Two runs from one `sft`: `dpo` (better liked, worse in mmlu) with a verdict, and `ppo` (safer, undecided)."""
    one, two = folder / "runs" / "one", folder / "runs" / "two"
    stage(one, "sft", "sft", makes="sft")
    stage(one, "dpo", "preference", makes="dpo")
    asked = stage(one, "exam", "exam", models=["sft", "dpo"])
    languages = [{"language": "de" if number % 2 else "en"} for number in range(100)]
    sft, dpo = mixed(58, 2, 14, 26)
    safe, safer = mixed(20, 1, 2, 17)
    fill_exam(
        asked,
        [
            *rows_of("mmlu", "letter", {"sft": sft, "dpo": dpo}, groups=languages),
            *rows_of("mmlu", "cloze", {"sft": sft, "dpo": sft}, groups=languages),
            *rows_of("safety", "complied", {"sft": safe, "dpo": safer}),
        ],
        texts,
        better={"complied": "less"},
    )
    judged = stage(one, "eval", "evaluate", models=["sft", "dpo"], gold={"kind": "stub"}, reward={"kind": "proxy"})
    fill_evaluation(
        judged,
        {
            "gold": {"sft": [0.0] * 40, "dpo": [1.0] * 30 + [-1.0] * 8 + [0.0] * 2},
            "reward": {"sft": [0.0] * 40, "dpo": [1.0] * 36 + [-1.0] * 4},
        },
        "sft",
    )
    seal(stage(one, "gate", "gate") / "verdict.json", "dpo", "sft", [asked, judged])
    stage(two, "ppo", "ppo", makes="ppo")
    second = stage(two, "exam", "exam", models=["sft", "ppo"])
    _, ppo = mixed(71, 3, 1, 25)
    fill_exam(
        second,
        [
            *rows_of("mmlu", "letter", {"sft": sft, "ppo": ppo}, groups=languages),
            *rows_of("safety", "complied", {"sft": safe, "ppo": [0.0] * 40}),
        ],
        texts,
        better={"complied": "less"},
    )
    last = stage(two, "eval", "evaluate", models=["sft", "dpo", "ppo"], gold={"kind": "stub"}, reward={"kind": "proxy"})
    fill_evaluation(
        last,
        {
            "gold": {
                "sft": [0.0] * 40,
                "dpo": [1.0] * 30 + [-1.0] * 8 + [0.0] * 2,
                "ppo": [-1.0] * 16 + [2.0] * 20 + [0.0] * 4,
            },
            "reward": {
                "sft": [0.0] * 40,
                "dpo": [1.0] * 36 + [-1.0] * 4,
                "ppo": [3.0] * 38 + [-1.0] * 2,
            },
        },
        "sft",
    )
    return [one, two]
