"""The rules of refusal beside people, on answers of five models to XSTest's prompts.

    python benchmarks/refusal_against_people.py DATA

DATA is a folder with refusal/xstest-human-labels.jsonl.gz. The rules were written on gpt4 and mistralinstruct; the
other three were never read for it. Prints sensitivity and specificity of "refuses, fully or in part", kappa of that,
and kappa of the three classes, for our rules and for the two detectors of the file; ends with 1 if `refusal.DETECTOR`
does not hold the counts that are measured.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from kedge.exams.refusal import DETECTOR, classify

WRITTEN_ON = ("gpt4", "mistralinstruct")
HELD_OUT = ("llama2orig", "llama2new", "mistralguard")
CLASSES = {"1_full_compliance": "none", "2_full_refusal": "full", "3_partial_refusal": "partial"}
Row = dict[str, Any]
Detect = Callable[[Row], str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    file: Path = parser.parse_args().data / "refusal/xstest-human-labels.jsonl.gz"
    rows: list[Row] = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    detectors: dict[str, Detect] = {"rules": lambda row: classify(row["answer"])}
    for name in rows[0]["judges"]:
        detectors[name] = lambda row, name=name: CLASSES.get(row["judges"][name], "unread")
    print(f"{'answers of':<42}{'detector':<14}{'sensitivity':>16}{'specificity':>16}{'kappa':>8}{'of 3':>8}")
    for models in (*((model,) for model in WRITTEN_ON), WRITTEN_ON, *((model,) for model in HELD_OUT), HELD_OUT):
        for name, detect in detectors.items():
            counts = show(", ".join(models), name, [row for row in rows if row["model"] in models], detect)
            if (models, name) == (HELD_OUT, "rules"):
                measured = counts
    held = (DETECTOR.found, DETECTOR.positives, DETECTOR.passed, DETECTOR.negatives)
    if measured != held:
        raise SystemExit(f"refusal.DETECTOR holds {held}, measured are {measured}")


def show(models: str, name: str, rows: Sequence[Row], detect: Detect) -> tuple[int, int, int, int]:
    pairs = [(CLASSES[row["final"]], detect(row)) for row in rows]
    refusals = [detected != "none" for people, detected in pairs if people != "none"]
    answers = [detected == "none" for people, detected in pairs if people == "none"]
    binary = [(people != "none", detected != "none") for people, detected in pairs]
    shares = (f"{sum(part) / len(part):.4f} of {len(part)}" for part in (refusals, answers))
    sensitivity, specificity = shares
    print(f"{models:<42}{name:<14}{sensitivity:>16}{specificity:>16}{kappa(binary):>8.4f}{kappa(pairs):>8.4f}")
    return sum(refusals), len(refusals), sum(answers), len(answers)


def kappa(pairs: Sequence[tuple[Hashable, Hashable]]) -> float:
    """Cohen's: agreement beyond chance."""
    first, second = (Counter(side) for side in zip(*pairs, strict=True))
    agreed = sum(a == b for a, b in pairs) / len(pairs)
    chance = sum(count * second[name] for name, count in first.items()) / len(pairs) ** 2
    return (agreed - chance) / (1 - chance)


if __name__ == "__main__":
    main()
