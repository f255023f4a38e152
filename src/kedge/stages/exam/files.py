"""What exams leave in a folder: `items.jsonl`, `answers.jsonl` and `exam.json`; and the table for the screen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson

from kedge.core.files import atomic_open, write_json
from kedge.exams.rows import write_rows
from kedge.exams.summary import Result
from kedge.stages.exam.take import Taken


def write_exams(folder: Path, taken: Taken) -> Path:
    """All files; returns the one with the numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "items.jsonl", taken.rows)
    with atomic_open(folder / "answers.jsonl") as out:
        for answer in taken.answers:
            out.write(orjson.dumps(answer) + b"\n")
    write_json(folder / "exam.json", taken.as_dict())
    return folder / "exam.json"


def table_lines(taken: Taken, *, groups: bool = False) -> Iterator[str]:
    """One line a result; with `groups`, those of the main metrics below it."""
    names = max(len(f"{result.exam}.{result.metric}") for result in taken.results)
    models = max(map(len, taken.models))
    for result in taken.results:
        is_main = taken.exams[result.exam]["main"] == result.metric
        if result.group is None:
            yield f"{f'{result.exam}.{result.metric}':{names}}  {result.model:{models}}  {_numbers(result)}"
        elif groups and is_main:
            field, value = next(iter(result.group.items()))
            yield f"{'':{names}}  {'':{models}}  {_numbers(result)}  {field}: {value}"
    for effect in taken.effects:
        other = "plain" if taken.template == "chat" else "chat"
        yield (
            f"{effect.exam}.{effect.metric} of {effect.model} on {effect.items:,} items: {effect.mean:.3f} with "
            f"template {taken.template}, {effect.other_mean:.3f} with {other}, a difference of "
            f"{effect.difference:+.3f} [{effect.low:+.3f}, {effect.high:+.3f}]"
        )


def _numbers(result: Result) -> str:
    clusters = "" if result.clusters == result.items else f" in {result.clusters:,} clusters"
    ece = "" if result.ece is None else f", ECE {result.ece:.3f}"
    interval = f"[{result.low:6.3f}, {result.high:6.3f}]"
    return f"{result.mean:6.3f} {interval}  {result.items:,} items{clusters}{ece}{_corrected(result)}"


def _corrected(result: Result) -> str:
    if (corrected := result.corrected) is None:
        return ""
    return f", {corrected.share:.3f} [{corrected.low:.3f}, {corrected.high:.3f}] corrected for the detector's errors"
