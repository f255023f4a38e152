"""The demo's data: demonstrations, labelled pairs and prompts, deterministic for a seed and disjoint by prompt.

`score` is the true preference as a reward function (`{kind: function, path: world.py:score}`), which runs log as gold
and never train on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from kedge.core.answers import Answer
from kedge.core.errors import DataError
from kedge.core.files import write_text
from kedge.core.seeds import seed_for
from kedge.demo.truth import true_preference
from kedge.demo.writers import edited, messages, reply, staff_style, wording

LABEL_NOISE = 0.1
"""Share of the labels that are flipped at random: no judge is right on more than 90 % of such pairs."""
LEAST_GAP = 0.5
"""Replies nearer than this in true preference are not compared: people would not agree on them."""
EDITS = 0.7
"""Share of the pairs that are a draft and its edit; the others are two independent replies."""
FAWNING = 0.04
"""Share of the demonstrations with three or four courtesies. No labelled pair has them, so nobody tells the reward
model that more is too much. This is the second weak spot; the first is `kedge.demo.writers.WRONG_FACTS`."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Rows of each file."""

    demonstrations: int = 12_000
    pairs: int = 4800
    prompts: int = 2000
    heldout: int = 200


FULL_SIZES = Sizes()
"""What the demo trains on."""


def make(seed: int, sizes: Sizes = FULL_SIZES) -> dict[str, list[Row]]:
    """The rows of every file; no prompt stands in two of them."""
    texts = messages(Random(seed_for(seed, "demo/messages")))
    return {
        "demonstrations": demonstrations(list(islice(texts, sizes.demonstrations)), seed),
        "pairs": pairs(list(islice(texts, sizes.pairs)), seed),
        "prompts": [{"prompt": text} for text in islice(texts, sizes.prompts)],
        "heldout-prompts": [{"prompt": text} for text in islice(texts, sizes.heldout)],
    }


def demonstrations(prompts: Sequence[str], seed: int) -> list[Row]:
    """Replies of the shop's staff, good and bad: a model that imitates them is mediocre."""
    rng = Random(seed_for(seed, "demo/demonstrations"))
    answers = [reply(prompt, staff_style(rng, fawning=FAWNING), wording(prompt, rng)) for prompt in prompts]
    return [
        {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def pairs(prompts: Sequence[str], seed: int) -> list[Row]:
    """Two replies each, the better one by the true preference chosen, except that a tenth of the labels is flipped."""
    rng = Random(seed_for(seed, "demo/pairs"))
    flips = Random(seed_for(seed, "demo/flips"))
    rows: list[Row] = []
    for prompt in prompts:
        chosen, rejected = _two_replies(prompt, rng)
        if flips.random() < LABEL_NOISE:
            chosen, rejected = rejected, chosen
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return rows


def _two_replies(prompt: str, rng: Random) -> tuple[str, str]:
    """The better one first. Most pairs are a draft and its edit, which differ in one field of their style."""
    while True:
        style, words = staff_style(rng), wording(prompt, rng)
        if rng.random() < EDITS:
            other, other_words = edited(style, rng), words
        else:
            other, other_words = staff_style(rng), wording(prompt, rng)
        first, second = reply(prompt, style, words), reply(prompt, other, other_words)
        gap = true_preference(prompt, first) - true_preference(prompt, second)
        if abs(gap) >= LEAST_GAP:
            return (first, second) if gap > 0 else (second, first)


def best_accuracy(rows: Sequence[Mapping[str, Any]]) -> float:
    """The share of these pairs whose label follows the true preference: the accuracy of a perfect reward model."""
    if not rows:
        raise DataError("no pairs: the best possible accuracy of nothing is not known")
    is_right = (
        true_preference(row["prompt"], row["chosen"]) > true_preference(row["prompt"], row["rejected"]) for row in rows
    )
    return sum(is_right) / len(rows)


def score(answer: Answer) -> float:
    """The true preference of one answer, as a reward function reads it."""
    messages_of_user = [content for role, content in answer.prompt if role == "user"]
    return true_preference(messages_of_user[-1] if messages_of_user else "", answer.text)


def write(folder: Path, seed: int, sizes: Sizes = FULL_SIZES) -> dict[str, Path]:
    """Write every file as JSON Lines; gives the paths by name."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.jsonl" for name in ("demonstrations", "pairs", "prompts", "heldout-prompts")}
    for name, rows in make(seed, sizes).items():
        write_text(paths[name], "".join(json.dumps(row) + "\n" for row in rows))
    return paths
