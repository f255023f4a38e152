"""Our Dawid–Skene beside that of crowd-kit, on labels of people (PandaLM) and on simulated ones.

crowd-kit brings many packages, so that it lives in an environment of its own:

    python -m venv .venv-crowdkit && .venv-crowdkit/bin/pip install crowd-kit
    python benchmarks/dawid_skene_against_crowdkit.py .venv-crowdkit/bin/python [DATA_FOLDER/agreement/pandalm.jsonl.gz]

Exit code 1 where a label or an accuracy differs by more than crowd-kit's own stopping rule explains.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import numpy as np

from kedge.feedback import dawid_skene

THEIRS = """
import json, sys
import pandas as pd
from crowdkit.aggregation import DawidSkene
ratings, classes = json.load(sys.stdin)
rows = [(i, j, l) for i, row in enumerate(ratings) for j, l in enumerate(row) if l is not None]
fitted = DawidSkene(n_iter=5000, tol=1e-14).fit(pd.DataFrame(rows, columns=["task", "worker", "label"]))
prior = fitted.priors_
people = sorted({j for _, j, _ in rows})
accuracy = [float(sum(prior[k] * fitted.errors_.loc[(j, k), k] for k in range(classes))) for j in people]
labels = [int(fitted.labels_[i]) for i in range(len(ratings))]
json.dump([labels, accuracy], sys.stdout)
"""
CLOSE = 1e-4


def simulated(seed: int, classes: int) -> list[list[int | None]]:
    """500 items, five people who are right with 0.6 to 0.95, a fifth of the labels missing but never all."""
    rng = np.random.default_rng(seed)
    ratings: list[list[int | None]] = []
    for truth in rng.integers(classes, size=500):
        says = [int(truth if rng.random() < skill else rng.integers(classes)) for skill in (0.95, 0.9, 0.8, 0.7, 0.6)]
        ratings.append([None if place and rng.random() < 0.2 else label for place, label in enumerate(says)])
    return ratings


def main(python: str, pandalm: str | None = None) -> int:
    cases = {f"simulated, {k} classes, seed {seed}": (simulated(seed, k), k) for k in (2, 3) for seed in range(3)}
    if pandalm is not None:
        with gzip.open(pandalm) as file:
            cases["PandaLM"] = ([json.loads(line)["labels"] for line in file], 3)
    is_equal = True
    print(f"{'labels of':<30}{'items':>7}{'other labels':>14}{'accuracy differs by':>21}")
    for name, (ratings, classes) in cases.items():
        asked = json.dumps([ratings, classes])
        reply = subprocess.run([python, "-c", THEIRS], input=asked, capture_output=True, text=True, check=True)
        labels, accuracy = json.loads(reply.stdout)
        ours = dawid_skene(ratings, classes=classes, smoothing=0)
        other = sum(own != their for own, their in zip(ours.labels, labels, strict=True))
        apart = float(np.abs(ours.accuracy - accuracy).max())
        is_equal &= other == 0 and apart < CLOSE
        print(f"{name:<30}{len(ratings):>7}{other:>14}{apart:>21.1e}")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
