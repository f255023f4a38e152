"""What the judges of an evaluation said of each pair of answers, as the gate reads it: `judgements.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from kedge.core.errors import DataError
from kedge.evaluate.judged import MAJORITY, Judged, majority

JUDGEMENTS = "judgements.jsonl"
Judgements = Mapping[str, Mapping[str, Sequence[Judged]]]
"""Comparisons with the first model of the evaluation, by judge and then by model; of several judges `majority` too."""


def read_judgements(file: Path, rates: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Judgements:
    """`rates` are the win rates that `evaluation.json` tells of them, by model and judge: a file that has other rows
    than were counted is an error."""
    judged: dict[str, dict[str, list[Judged]]] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            row = orjson.loads(line)
            judged.setdefault(row["judge"], {}).setdefault(row["model"], []).append(_comparison(row))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{file}:{number}: not a comparison of an evaluate stage ({error!r})") from error
    if len(judged) > 1:
        models = next(iter(judged.values()))
        panel = judged.values()
        try:
            together = {model: majority([by_model[model] for by_model in panel]) for model in models}
        except (KeyError, ValueError) as error:
            raise DataError(f"{file}: the judges were not asked the same; run the stage again") from error
        judged = {**judged, MAJORITY: together}
    for model, by_judge in rates.items():
        for judge, rate in by_judge.items():
            count = len(judged.get(judge, {}).get(model, ()))
            if count != rate["comparisons"]:
                raise DataError(
                    f"{file}: {count:,} comparisons of {model} by {judge}, and evaluation.json beside it counts "
                    f"{rate['comparisons']:,}; run the stage again"
                )
    return judged


def _comparison(row: Mapping[str, Any]) -> Judged:
    verdicts = row["as_first"], row["as_second"]
    if any(verdict not in (None, 0, 0.5, 1) for verdict in verdicts):
        raise ValueError(f"verdicts are 1, 0.5, 0 or null: found {verdicts}")
    return Judged(
        prompt=int(row["prompt"]),
        as_first=verdicts[0],
        as_second=verdicts[1],
        length=int(row["length"]),
        baseline_length=int(row["baseline_length"]),
    )
