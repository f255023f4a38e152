"""May these judges be trusted? Stored verdicts of real judges, and judges whose biases are planted, measured as
`kedge judge trust` does.

    python benchmarks/judge_truth.py --data DATA_FOLDER     about a minute on one core

DATA_FOLDER holds eval/agreement/pandalm.jsonl.gz (999 comparisons, three people, two judges), eval/judge/auto-j-pairs
and eval/judge/judgebench. First the reports on PandaLM's judges; then one line a figure: what is accepted, what was
found, ok or MISS; a line without an accepted value is there to be read. Exit code 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from figures import Figure, Record, at_least, equal, print_figures, read, same, told
from kedge.commands.judge.table import text_lines
from kedge.commands.judge.trust import trust_asked, trust_stored
from kedge.evaluate import mcnemar, tango
from kedge.evaluate.agreement import agreement
from kedge.feedback.alt_test import Choice
from kedge.feedback.canaries import CANARIES
from kedge.feedback.judge_figures import JudgedItem, Replies, majority_of, measure
from kedge.feedback.trust import Trust
from kedge.testing.stub_judge import StubJudge, by_worth

_CHOICE: Mapping[int | None, Choice | None] = {1: "first", 2: "second", 0: "tie", None: None}
_SIDES: Mapping[str, Choice] = {"A>B": "first", "B>A": "second", "A=B": "tie"}
_OTHER: Mapping[Choice, Choice] = {"first": "second", "second": "first", "tie": "tie"}
_GOOD = {canary.good for canary in CANARIES}


def pandalm_files(rows: Sequence[Record], folder: Path) -> tuple[Path, dict[str, Path]]:
    """People's verdicts and each judge's, as files of `kedge judge trust`."""
    people = [
        {
            "id": row["id"],
            "prompt": row["prompt"],
            "first": str(row["answers"][0]),
            "second": str(row["answers"][1]),
            "models": row["models"],
            "verdicts": {f"person {number + 1}": _CHOICE[label] for number, label in enumerate(row["labels"])},
        }
        for row in rows
    ]
    stored = {
        name: [{"id": row["id"], "verdict": _CHOICE[row["judges"][name]]} for row in rows] for name in rows[0]["judges"]
    }
    return _written(folder / "human.jsonl", people), {
        name: _written(folder / f"{name}.jsonl", own) for name, own in stored.items()
    }


def judges_of_pandalm(rows: Sequence[Record], trusts: Mapping[str, Trust]) -> Iterator[Figure]:
    """Both judges are refused: people agree with each other far more than with them."""
    accepted = {
        "gpt-3.5-turbo": {"readable": 974 / 999, "accuracy": 0.6977, "kappa": 0.4755, "agreement": 0.689},
        "pandalm-7b": {"readable": 1.0, "accuracy": 0.6677, "kappa": 0.4354, "agreement": 0.660},
    }
    majority = [_majority(row) for row in rows]
    for name, trust in trusts.items():
        for figure, value in accepted[name].items():
            places = 3 if figure == "agreement" else 4
            yield equal(f"PandaLM: {name}, {figure}", value, trust.figures[figure]["value"], places=places)
        yield equal(f"PandaLM: {name}, people with each other", 0.920, _value(trust, "human_agreement"), places=3)
        yield equal(f"PandaLM: {name}, κ of people", 0.8642, _value(trust, "human_kappa"))
        yield equal(f"PandaLM: {name}, ω of the alt-test", 0.0, trust.figures["alt_test"]["omega"])
        yield same(f"PandaLM: {name}, trusted", "no", "yes" if trust.passed else "no")
        judged = agreement(majority, [_CHOICE[row["judges"][name]] for row in rows])
        if name == "pandalm-7b":
            yield equal(f"PandaLM: {name}, macro F1", 0.5743, judged.macro_f1)
        for figure in ("kappa", "agreement", "below_human", "longer_wins", "longer_wins_people", "length_people"):
            yield told(f"PandaLM: {name}, {figure}", _interval(trust.figures[figure]))
        yield told(f"PandaLM: {name}, length, people held fixed", _interval(trust.figures["length"]["held"]))
        advantage = ", ".join(f"{person['judge']:.3f}/{person['human']:.3f}" for person in _left_out(trust))
        yield told(f"PandaLM: {name}, alt-test, ρ of judge/person", advantage)
    right = {
        name: [_CHOICE[row["judges"][name]] == label for row, label in zip(rows, majority, strict=True)]
        for name in accepted
    }
    pairs = list(zip(right["gpt-3.5-turbo"], right["pandalm-7b"], strict=True))
    more, fewer = sum(own > other for own, other in pairs), sum(own < other for own, other in pairs)
    low, high = (round(100 * end, 1) for end in tango(more, fewer, len(rows)))
    yield equal("PandaLM: GPT-3.5 less PandaLM-7B, points", 3.0, 100 * (more - fewer) / len(rows), places=1)
    yield same("PandaLM: the same, 95 %", "[-0.2, 6.2]", f"[{low}, {high}]")
    yield equal("PandaLM: McNemar p", 0.072, mcnemar(more, fewer), places=3)


def length_of_auto_j(rows: Sequence[Record]) -> Iterator[Figure]:
    """A judge that says what auto-j's people say shows their taste for length, and none beyond it."""
    items = [_item(row, {"person": row["label"]}) for row in rows]
    verdicts: list[Choice | None] = [_CHOICE[row["label"]] for row in rows]
    counts = "/".join(str(verdicts.count(choice)) for choice in ("first", "second", "tie"))
    figures = measure(items, Replies(as_a=verdicts))
    yield same("auto-j: first/second/tie", "520/499/373", counts)
    yield equal("auto-j: the longer wins, %", 71.8, 100 * figures["longer_wins"]["value"], places=1)
    yield equal("auto-j: the longer wins by people, %", 71.8, 100 * figures["longer_wins_people"]["value"], places=1)
    yield told("auto-j: the longer wins, decided between unequal lengths", _interval(figures["longer_wins"]))
    yield told("auto-j: length alone, log-odds a sd", _interval(figures["length"]["alone"]))
    longest: list[Choice | None] = [_longer(item) for item in items]
    figures = measure(items, Replies(as_a=longest, as_b=longest))
    yield equal("auto-j: a judge that takes the longer, the longer wins", 1.0, figures["longer_wins"]["value"])
    yield at_least("auto-j: the same, log-odds a sd with people held fixed, low", 1.0, figures["length"]["held"]["low"])


def orders_of_judgebench(rows: Sequence[Record]) -> Iterator[Figure]:
    """Judges in both orders; the second order is told from its own side."""
    names = sorted({name for row in rows for name in row["judges"] or {}})
    for name in names:
        own = [row for row in rows if name in (row["judges"] or {})]
        replies = Replies(
            as_a=[_SIDES.get(row["judges"][name][0]) for row in own],
            as_b=[_turned(row["judges"][name][1]) for row in own],
        )
        figures = measure([_item(row, {"label": row["label"]}) for row in own], replies)
        inconsistent = 100 * (1 - figures["same_after_swap"]["value"])
        what = f"JudgeBench: {name.partition('/')[2][:34]}"
        if name.endswith("o1-mini-2024-09-12"):
            yield same(f"{what}, readable", "1.0", str(figures["readable"]["value"]))
            yield equal(f"{what}, inconsistent, %", 31.4, inconsistent, places=1)
        else:
            yield told(f"{what}, inconsistent, %", f"{inconsistent:.1f}")
        yield told(f"{what}, place P(A) − ½", _interval(figures["position"]))
        yield told(f"{what}, both orders right", _interval(figures["accuracy"]))


def planted_biases(folder: Path, *, seeds: int = 6) -> Iterator[Figure]:
    """Stub judges behind a socket: how many of so many intervals hold what was planted."""
    planted: dict[str, tuple[dict[str, Any], Any, float | None]] = {
        "place 0.2, garbage 5 %: place": ({"position": 0.2, "garbage": 0.05}, ("position",), 0.2),
        "place 0.2, garbage 5 %: readable": ({"position": 0.2, "garbage": 0.05}, ("readable",), 0.95),
        "length 0.5 for 100 characters": ({"length": 0.5, "strength": 1.5, "garbage": 0.05}, ("length", "held"), None),
        "no bias: place": ({"strength": 1.5}, ("position",), 0.0),
        "no bias: length": ({"strength": 1.5}, ("length", "held"), 0.0),
    }
    for what, (biases, path, value) in planted.items():
        within = 0
        for seed in range(seeds):
            figures = _stub_trust(folder, seed, **biases).figures
            figure: Any = figures
            for part in path:
                figure = figure[part]
            truth = 0.5 * figures["length"]["sd"] / 100 if value is None else value
            within += figure["low"] <= truth <= figure["high"]
        yield at_least(f"stub, {what}: intervals of {seeds} that hold it", seeds - 2, float(within))
    good = [_stub_trust(folder, seed, strength=4.0, repeat=1) for seed in range(seeds)]
    yield same(f"stub: good judges of {seeds} that are trusted", str(seeds), str(sum(trust.passed for trust in good)))
    obeying = [_stub_trust(folder, seed, obeys="(?i)ignore the rubric", repeat=1) for seed in range(seeds)]
    refused = sum(trust.reasons == ("canaries obeyed: 2 of 12, wanted 0",) for trust in obeying)
    yield same(f"stub: judges of {seeds} that obey and are refused for it alone", str(seeds), str(refused))


def _stub_trust(folder: Path, seed: int, *, repeat: int = 0, **biases: Any) -> Trust:
    """240 items of 120 prompts; three people who are right in 9 of 10, all of them in all for a fit that is exact."""
    rng = Random(seed)
    is_exact = "length" in biases or biases.get("strength") == 1.5
    rows: list[Record] = []
    for number in range(240):
        worths = rng.sample(range(1, 9), 2)
        better: Choice = "first" if worths[0] > worths[1] else "second"
        verdicts = {
            person: better if is_exact or rng.random() < 0.9 else _OTHER[better] for person in ("ann", "ben", "cat")
        }
        texts = [f"Yes (worth {worth})." + " word" * rng.randrange(80) for worth in worths]
        rows.append({"prompt": f"Question {number // 2}?", "first": texts[0], "second": texts[1], "verdicts": verdicts})
    human = _written(folder / "stub.jsonl", rows)
    with StubJudge(truth=_truth, seed=seed, **biases) as judge:
        file = folder / "judge.yaml"
        file.write_text(f"url: {judge.url}\nmodel: stub\nworkers: 16\n")
        return trust_asked(file, human, repeat=repeat, family=None, seed=seed, say=lambda line: None)


def _truth(prompt: str, a: str, b: str) -> float:
    return by_worth(prompt, a, b) or float(a in _GOOD) - float(b in _GOOD)


def _item(row: Record, labels: Mapping[str, int]) -> JudgedItem:
    people: dict[str, Choice] = {
        person: choice for person, label in labels.items() if (choice := _CHOICE[label]) is not None
    }
    lengths = (len(str(row["answers"][0])), len(str(row["answers"][1])))
    return JudgedItem(prompt=row["prompt"], people=people, lengths=lengths)


def _majority(row: Record) -> Choice:
    return majority_of(_item(row, {str(number): label for number, label in enumerate(row["labels"])}).people)


def _longer(item: JudgedItem) -> Choice:
    first, second = item.lengths
    return "tie" if first == second else "first" if first > second else "second"


def _turned(side: str | None) -> Choice | None:
    choice = None if side is None else _SIDES.get(side)
    return None if choice is None else _OTHER[choice]


def _value(trust: Trust, name: str) -> float:
    return trust.figures[name]["value"]


def _left_out(trust: Trust) -> Sequence[Mapping[str, Any]]:
    return trust.figures["alt_test"]["people"]


def _interval(figure: Mapping[str, float]) -> str:
    return f"{figure['value']:.4f} [{figure['low']:.4f}, {figure['high']:.4f}] of {figure['count']}"


def _written(file: Path, rows: Sequence[Record]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def figures(data: Path, trusts: Mapping[str, Trust], rows: Sequence[Record], folder: Path) -> Iterator[Figure]:
    yield from judges_of_pandalm(rows, trusts)
    yield from length_of_auto_j(read(data, "judge/auto-j-pairs"))
    yield from orders_of_judgebench(read(data, "judge/judgebench"))
    yield from planted_biases(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds eval/")
    data: Path = parser.parse_args().data / "eval"
    rows = read(data, "agreement/pandalm")
    with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as place:
        folder = Path(place)
        os.environ["KEDGE_CACHE"] = str(folder / "cache")
        human, stored = pandalm_files(rows, folder)
        trusts = {name: trust_stored(file, human, family=None, seed=0, say=print) for name, file in stored.items()}
        for trust in trusts.values():
            print("\n".join(text_lines(trust)), end="\n\n")
        misses = print_figures(figures(data, trusts, rows, folder))
    print(f"{misses} missed" if misses else "all ok")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
