"""What the study of overoptimisation reads: preferences for gold, demonstrations, prompts; and labels made by gold."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, cast

from kedge.data.converting import to_fields
from kedge.data.examples import Demonstration, Messages, Pair, Prompt
from kedge.data.reading import read
from kedge.data.writing import row_writer
from kedge.testing import toy

Row = dict[str, Any]
PAIRS = ("hh-harmless", "polite", "alpacaeval-gpt4")
MOST_A_PROMPT = 4
"""Pairs of one prompt that gold learns from: AlpacaEval has twelve, and would outweigh the others."""
LONGEST_PROMPT, SHORTEST_ANSWER, LONGEST_ANSWER = 200, 12, 150
"""In characters: prompts of about 50 tokens and demonstrations of about 35, so that answers end by themselves."""
HARMLESS, ONE_IN_HARMFUL = "hh-harmless", 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many prompts there are of each use; each use has prompts of its own."""

    best_of_n: int
    ppo: int
    labels: int
    demonstrations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Where the rows are. All seeds read the same."""

    folder: Path

    @property
    def pairs(self) -> Path:
        return self.folder / "pairs.jsonl"

    @property
    def demonstrations(self) -> Path:
        return self.folder / "demonstrations.jsonl"

    def prompts(self, use: str) -> Path:
        return self.folder / f"prompts-{use}.jsonl"


def write_small(files: Files, counts: Counts) -> None:
    """The toy shop in the place of the data folder."""
    write_rows(files.pairs, ({**row, "source": f"shop-{at % 2}"} for at, row in enumerate(toy.pairs(48, seed=1))))
    write_rows(files.demonstrations, toy.demonstrations(counts.demonstrations, seed=2))
    prompts = iter(toy.prompts(counts.best_of_n + counts.ppo + counts.labels, seed=3))
    for use, count in uses(counts):
        write_rows(files.prompts(use), islice(prompts, count))


def write_full(files: Files, data: Path, counts: Counts) -> None:
    """Rows of the data folder; which ones are used depends on nothing but the data."""
    write_rows(files.pairs, gold_pairs(data))
    by_use = prompt_sets(data, counts)
    for use, rows in by_use.items():
        write_rows(files.prompts(use), rows)
    kept_out = {_key(row["prompt"]) for use in ("best_of_n", "ppo") for row in by_use[use]}
    write_rows(files.demonstrations, islice(demonstrations(data, kept_out), counts.demonstrations))


def uses(counts: Counts) -> list[tuple[str, int]]:
    return [("best_of_n", counts.best_of_n), ("ppo", counts.ppo), ("labels", counts.labels)]


def gold_pairs(data: Path) -> list[Row]:
    """Pairs of people and of GPT-4 with their `source`, without those whose answers are empty or the same."""
    rows: list[Row] = []
    for source in PAIRS:
        of_prompt: dict[str, int] = {}
        for example in read(str(data / "pairs" / f"{source}.jsonl.gz"), kind="pairs", max_broken=0.05):
            pair = cast(Pair, example)
            texts = [" ".join(message.content for message in side).strip() for side in (pair.chosen, pair.rejected)]
            prompt = _text(pair.prompt)
            if not all(texts) or texts[0] == texts[1] or of_prompt.get(prompt, 0) >= MOST_A_PROMPT:
                continue
            of_prompt[prompt] = of_prompt.get(prompt, 0) + 1
            rows.append({**to_fields(pair), "source": source})
    return _shuffled(rows)


def prompt_sets(data: Path, counts: Counts) -> dict[str, list[Row]]:
    """Prompts for each use, none in two, of one mix: one in `ONE_IN_HARMFUL` is of HH and asks for harm."""
    harmful: list[Row] = []
    plain: list[Row] = []
    for example in read(str(data / "prompts" / "prompts.jsonl.gz"), kind="prompts"):
        prompt = cast(Prompt, example)
        if len(_text(prompt.prompt)) <= LONGEST_PROMPT:
            source = (prompt.extra or {}).get("source")
            (harmful if source == HARMLESS else plain).append({**to_fields(prompt), "source": source})
    harmful, plain = _shuffled(_distinct(harmful)), _shuffled(_distinct(plain))
    sets: dict[str, list[Row]] = {}
    for use, count in uses(counts):
        few = min(count // ONE_IN_HARMFUL, len(harmful))
        sets[use] = _shuffled([*harmful[:few], *plain[: count - few]])
        harmful, plain = harmful[few:], plain[count - few :]
    return sets


def demonstrations(data: Path, kept_out: set[str]) -> list[Row]:
    """Short answers to short questions, and the preferred answers of HH; no prompt that is asked later."""
    rows: list[Row] = []
    for example in read(str(data / "sft" / "instructions.jsonl.gz"), kind="demonstrations"):
        messages = cast(Demonstration, example).messages
        if len(messages) == 2:
            rows.append({"prompt": _fields(messages[:1]), "completion": messages[-1].content})
    for example in read(str(data / "pairs" / f"{HARMLESS}.jsonl.gz"), kind="pairs", max_broken=0.05):
        pair = cast(Pair, example)
        rows.append({"prompt": _fields(pair.prompt), "completion": pair.chosen[-1].content})
    fitting = [
        row
        for row in rows
        if SHORTEST_ANSWER <= len(row["completion"].strip()) <= LONGEST_ANSWER
        and sum(len(message["content"]) for message in row["prompt"]) <= LONGEST_PROMPT
        and _key(row["prompt"]) not in kept_out
    ]
    return _shuffled(_distinct(fitting))


def label_pairs(answers: Sequence[Row], gold: Sequence[float], *, noise: float, seed: int) -> list[Row]:
    """Pairs of two answers to each prompt: the better one by gold is chosen, but in a share `noise` of the pairs.

    Answers come two by two. A pair of equal or empty texts, or of equal scores, says nothing and is left out. Which
    labels are wrong depends on the seed and the pair's place, not on how many are used.
    """
    rows: list[Row] = []
    for at in range(0, len(answers) - 1, 2):
        one, other = answers[at], answers[at + 1]
        texts = [one["answer"].strip(), other["answer"].strip()]
        gap = gold[at] - gold[at + 1]
        if not all(texts) or texts[0] == texts[1] or not gap or math.isnan(gap):
            continue
        is_first = gap > 0
        is_wrong = Random(f"{seed}-{at}").random() < noise
        better, worse = (one, other) if is_first != is_wrong else (other, one)
        rows.append(
            {
                "prompt": one["prompt"],
                "chosen": better["answer"],
                "rejected": worse["answer"],
                "gold_gap": abs(gap),
            }
        )
    return rows


def as_demonstrations(answers: Iterable[Row]) -> list[Row]:
    """Answers as rows that `kedge score` reads; those without a text are left out."""
    return [
        {"messages": [*row["prompt"], {"role": "assistant", "content": row["answer"]}]}
        for row in answers
        if row["answer"].strip()
    ]


def read_rows(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with row_writer(file) as write:
        for row in rows:
            write(dict(row))


def _fields(messages: Messages) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _text(messages: Messages) -> str:
    return "\n".join(message.content for message in messages)


def _key(prompt: Any) -> str:
    return json.dumps(prompt, sort_keys=True)


def _distinct(rows: Iterable[Row]) -> list[Row]:
    return list({_key(row["prompt"]): row for row in rows}.values())


def _shuffled(rows: Iterable[Row]) -> list[Row]:
    """In an order that depends on the rows alone."""
    return sorted(rows, key=lambda row: hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest())
