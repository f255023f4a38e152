"""The figures of labels: people's agreement found again, Dawid and Skene beside majorities, the same labels through the
store, simulated people, and how many labels a good choice of pairs saves.

    python benchmarks/label_truth.py DATA_FOLDER [PYTHON_WITH_CROWDKIT]     about two minutes on one core

DATA_FOLDER holds agreement/pandalm.jsonl.gz (999 comparisons, three people). With the interpreter of an environment
that has crowd-kit, Dawid and Skene are compared with it too (benchmarks/dawid_skene_against_crowdkit.py). One line a
figure: what is accepted, what was found, ok or MISS; a line without an accepted value is there to be read. Exit code 1
where one is missed. How the store holds under load is measured by benchmarks/label_store.py.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import active_choice
import dawid_skene_against_crowdkit
import simulated_people
from figures import Figure, Record, at_least, at_most, equal, print_figures, read, same, told
from kedge.core.stats import student_interval
from kedge.data.examples import Message
from kedge.feedback import (
    agreement_interval,
    cohen_kappa,
    dawid_skene,
    fleiss_kappa,
    krippendorff_alpha,
    majority,
    unanimous,
)
from kedge.label.accounts import add_person
from kedge.label.agreement import read_agreement
from kedge.label.database import open_store
from kedge.label.export import Settling, export_labels
from kedge.label.incoming import Draft, DraftAnswer
from kedge.label.items import add_items
from kedge.label.judging import judge
from kedge.label.projects import Settings, new_project
from kedge.label.questions import Decision
from kedge.label.work import next_task

SEEDS = 8
_LEFT_TO_RIGHT = {1: -1, 0: 0, 2: 1}
"""PandaLM's labels as steps: the first answer, a tie, the second."""


def agreement_of_people(rows: Sequence[Record]) -> Iterator[Figure]:
    """PandaLM: 999 comparisons by three people."""
    labels = [row["labels"] for row in rows]
    accepted = {(0, 1): (0.8520, 0.9129), (0, 2): (0.8789, 0.9289), (1, 2): (0.8617, 0.9179)}
    for first, second in combinations(range(3), 2):
        pair = [[row[person] for row in labels] for person in (first, second)]
        kappa, raw = accepted[first, second]
        yield equal(f"people {first + 1} and {second + 1}, κ", kappa, cohen_kappa(*pair))
        alike = np.mean([a == b for a, b in zip(*pair, strict=True)])
        yield equal(f"people {first + 1} and {second + 1}, raw agreement", raw, float(alike))
    yield equal("Fleiss' κ", 0.8642, fleiss_kappa(labels))
    yield equal("Krippendorff's α, nominal", 0.8642, krippendorff_alpha(labels))
    steps = [[_LEFT_TO_RIGHT[label] for label in row] for row in labels]
    yield equal("Krippendorff's α, ordinal", 0.8775, krippendorff_alpha(steps, level="ordinal"))
    interval = agreement_interval(steps, level="ordinal", clusters=[row["prompt"] for row in rows])
    yield told("α, ordinal, 95 % by prompt", f"{interval.low:.4f} to {interval.high:.4f}")
    yield same("all three agree", "879", str(unanimous(labels)))
    counts = Counter(0 if label is None else int(label) for label in majority(labels))
    yield same("majority, tie/first/second", "105/422/472", f"{counts[0]}/{counts[1]}/{counts[2]}")


def dawid_and_skene(rows: Sequence[Record]) -> Iterator[Figure]:
    labels = [row["labels"] for row in rows]
    fitted = dawid_skene(labels, classes=3, smoothing=0)
    votes = [0 if label is None else int(label) for label in majority(labels)]
    equal_labels = sum(own == vote for own, vote in zip(fitted.labels, votes, strict=True))
    yield same("Dawid–Skene: labels that equal the majority", "999", str(equal_labels))
    yield told("Dawid–Skene: log-likelihood", f"{fitted.log_likelihood:.4f}")
    yield told("Dawid–Skene: accuracy of each person", ", ".join(f"{share:.4f}" for share in fitted.accuracy))


def through_the_store(rows: Sequence[Record]) -> Iterator[Figure]:
    """The same labels as judgments of three people, sides drawn for each, and out again."""
    with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        store = open_store(f"{folder}/labels.db", create=True)
        settings = Settings(wanted=3, overlap_share=0, gold_share=0, repeat_share=0)
        project = new_project(store, "pandalm", ["pair"], "As they did.", settings)
        # The same two answers in either order are one item of the store: the first labels that they have stand.
        first = {frozenset(_key(row)): row for row in reversed(rows) if len(set(_key(row)[1:])) == 2}
        steps = {_key(row): [_LEFT_TO_RIGHT[label] for label in row["labels"]] for row in first.values()}
        yield told("through the store: items (equal answers and repeated pairs apart)", str(len(steps)))
        add_items(store, project, map(_draft, first.values()))
        for number in range(3):
            person = add_person(store, None)
            while (task := next_task(store, project, person)) is not None:
                left, right = (answer[0].content for answer in task.answers)
                key = (task.prompt[0].content, left, right)
                step = steps[key][number] if key in steps else -steps[key[0], right, left][number]
                judge(store, project, person, task.assignment, Decision(verdict="step", outcome=step))
        found = store.read(lambda connection: read_agreement(connection, project))["pair"]
        alpha = krippendorff_alpha(list(steps.values()), level="ordinal")
        yield equal("through the store: α, ordinal, as without it", alpha, found.alpha)
        for settle in ("majority", "dawid_skene"):
            out = Path(folder) / f"{settle}.jsonl"
            exported = export_labels(store, project, out, settling=Settling(settle=settle))
            ties = exported.left_out.get("ties", 0)
            yield told(f"through the store: {settle}, pairs and ties", f"{exported.rows} and {ties}")
        store.close()


def _key(row: Record) -> tuple[str, str, str]:
    return str(row["prompt"]), *map(str, row["answers"])


def _draft(row: Record) -> Draft:
    prompt, first, second = _key(row)
    answers = tuple(DraftAnswer(text=(Message("assistant", text),)) for text in (first, second))
    return Draft(prompt=(Message("user", prompt),), answers=answers)


def people_who_are_simulated() -> Iterator[Figure]:
    """benchmarks/simulated_people.py prints the whole table."""
    outcomes = [simulated_people.simulate(seed) for seed in range(SEEDS)]
    found = sum(outcome.is_spammer_found for outcome in outcomes)
    yield same("simulated: seeds in which the spammer and who says left are found", str(SEEDS), str(found))
    gain, low, _ = student_interval([outcome.soft - outcome.majority for outcome in outcomes])
    yield at_least("simulated: gain of soft labels, low end of 95 %", 0.0, low)
    yield told("simulated: gain of soft labels over majorities", f"{gain:+.4f}")


def labels_saved() -> Iterator[Figure]:
    """benchmarks/active_choice.py prints the whole table."""
    accuracy = {
        way: np.mean([active_choice.accuracies(way, seed) for seed in range(SEEDS)], axis=0)
        for way in ("random", "d_optimal")
    }
    whole = active_choice.BATCH * active_choice.ROUNDS
    needed = active_choice.labels_needed(accuracy["d_optimal"], float(accuracy["random"][-1]))
    share = float("inf") if needed is None else needed / whole
    yield at_most("D-optimal: share of random's labels", active_choice.WANTED, share)


def figures(folder: Path) -> Iterator[Figure]:
    rows = read(folder, "agreement/pandalm")
    parts: list[Callable[[], Iterator[Figure]]] = [
        lambda: agreement_of_people(rows),
        lambda: dawid_and_skene(rows),
        lambda: through_the_store(rows),
        people_who_are_simulated,
        labels_saved,
    ]
    for part in parts:
        yield from part()


def main(arguments: Sequence[str]) -> int:
    if not 1 <= len(arguments) <= 2 or not Path(arguments[0]).is_dir():
        print(__doc__)
        return 2
    misses = print_figures(figures(Path(arguments[0])))
    print(f"\nsimulated people, {SEEDS} seeds")
    misses += simulated_people.main(SEEDS) != 0
    if len(arguments) == 1:
        print(
            "\nDawid–Skene beside crowd-kit: benchmarks/dawid_skene_against_crowdkit.py, in an environment of its own"
        )
    else:
        print()
        pandalm = str(Path(arguments[0]) / "agreement/pandalm.jsonl.gz")
        misses += dawid_skene_against_crowdkit.main(arguments[1], pandalm) != 0
    print(f"{misses} missed" if misses else "all ok")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
