"""Stands in for lm-eval and inspect: writes logs in their formats. Run as a program with their arguments."""

from __future__ import annotations

import json
import sys
from pathlib import Path

LM_EVAL_ROWS = [
    {
        "doc_id": number, "doc": {"query": f"Q{number}"}, "target": 0, "arguments": {}, "resps": [[["-1.0", "False"]]],
        "filtered_resps": [["-1.0", "False"]], "filter": "none", "metrics": ["acc", "bits"], "doc_hash": f"d{number}",
        "prompt_hash": "p", "target_hash": "t", "acc": float(number % 2), "bits": 2.5,
    }
    for number in range(4)
]  # fmt: skip


def after(option: str) -> str:
    return sys.argv[sys.argv.index(option) + 1]


def lm_eval() -> None:
    folder = Path(after("--output_path")) / "model__name"
    folder.mkdir()
    task = after("--tasks")
    count = int(after("--limit")) if "--limit" in sys.argv else 4
    rows = "".join(json.dumps(row) + "\n" for row in LM_EVAL_ROWS[:count])
    (folder / f"samples_{task}_2026-11-16T06-00-00.000000.jsonl").write_text(rows)
    results = {"results": {}, "higher_is_better": {task: {"acc": True, "bits": False}}}
    (folder / "results_2026-11-16T06-00-00.000000.json").write_text(json.dumps(results))


def inspect() -> None:
    values = ["C", "I", "P", 0.25]
    samples = [
        {"id": number // 2 + 1, "epoch": number % 2 + 1, "input": f"Q{number}", "target": "t",
         "output": {"completion": f"said {number}"}, "scores": {"match": {"value": value, "answer": "x"}}}
        for number, value in enumerate(values)
    ]  # fmt: skip
    log = {"version": 2, "status": "success", "eval": {"task": sys.argv[3]}, "samples": samples}
    (Path(after("--log-dir")) / "2026-11-16T06-00-00_task_abc.json").write_text(json.dumps(log))


if __name__ == "__main__":
    match sys.argv[1]:
        case "broken":
            sys.exit("Task not found: somewhere\nTraceback: boom")
        case "inspect":
            inspect()
        case _:
            lm_eval()
