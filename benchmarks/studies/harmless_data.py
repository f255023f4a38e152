"""The data of the study `harmless`: pairs of two tasks in three parts that share no prompt.

A part teaches the policy's side (SFT, reward models, PPO, DPO), one teaches the gold reward models, one is asked and
judged. The last is the same for all seeds; what is left is divided anew by each seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal, cast

from kedge.data.examples import Demonstration, Messages, Pair, text_of
from kedge.data.reading import load, prompt_key
from kedge.data.splitting import assign
from kedge.data.writing import row_writer

Task = Literal["harmless", "helpful"]
TASKS: tuple[Task, ...] = ("harmless", "helpful")
SOURCES: dict[Task, str] = {"harmless": "pairs/hh-harmless.jsonl.gz", "helpful": "pairs/alpacaeval-gpt4.jsonl.gz"}
DEMONSTRATIONS = "sft/instructions.jsonl.gz"
_ASKED_SHARE = 0.1
GOLD_SHARE: dict[Task, float] = {"harmless": 2 / 3, "helpful": 0.5}
"""Of the other prompts. Of HH, half (674 pairs) made a gold that was right on 63.3 % of the asked pairs, and all of
them (1,350, docs/results.md) a model that is right on 70.7 %; two thirds are to bring gold over 65 %."""
_LONGEST_DEMONSTRATION = 500
"""Characters of an answer to imitate, about 125 tokens: longer ones would teach answers that are cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What the stages read."""

    train: dict[Task, Path]
    """Pairs of the policy's side."""
    gold: dict[Task, Path]
    asked: dict[Task, Path]
    """Pairs to prompts that no training has seen: the accuracy of all reward models is measured on them."""
    pairs: Path
    """Both tasks of the policy's side together, for DPO."""
    heldout: Path
    demonstrations: Path
    """The preferred answers of HH, and instructions."""
    instructions: Path
    """The latter alone."""
    prompts: Path
    """Of the policy's side, with `task` and `risky`."""
    questions: Path
    """The prompts of `asked`, likewise."""
    counts: dict[str, int]


def prepare(source: Path, folder: Path, *, seed: int, pairs_a_prompt: int, demonstrations: int) -> Files:
    """Write all files; at most so many pairs a prompt are taken, and so many demonstrations beside HH's answers."""
    folder.mkdir(parents=True, exist_ok=True)
    train: dict[Task, list[Pair]] = {}
    gold: dict[Task, list[Pair]] = {}
    asked: dict[Task, list[Pair]] = {}
    for task in TASKS:
        pairs = _few(_sound(load(source / SOURCES[task])), pairs_a_prompt)
        train[task], gold[task], asked[task] = three_parts(pairs, seed, gold_share=GOLD_SHARE[task])
    known = {prompt_key(pair) for part in (gold, asked) for pairs in part.values() for pair in pairs}
    instructions = _spread(_others(source, known), demonstrations)
    imitated = [*_chosen(train["harmless"]), *instructions]
    files = Files(
        train={task: folder / f"{task}.train.jsonl" for task in TASKS},
        gold={task: folder / f"{task}.gold.jsonl" for task in TASKS},
        asked={task: folder / f"{task}.asked.jsonl" for task in TASKS},
        pairs=folder / "pairs.jsonl",
        heldout=folder / "heldout.jsonl",
        demonstrations=folder / "demonstrations.jsonl",
        instructions=folder / "instructions.jsonl",
        prompts=folder / "prompts.jsonl",
        questions=folder / "questions.jsonl",
        counts={
            **{f"{task} pairs, policy": len(train[task]) for task in TASKS},
            **{f"{task} pairs, gold": len(gold[task]) for task in TASKS},
            **{f"{task} pairs, asked": len(asked[task]) for task in TASKS},
            **{f"{task} prompts, asked": len(_prompts(asked[task])) for task in TASKS},
            "demonstrations": len(imitated),
        },
    )
    for task in TASKS:
        for place, part in ((files.train, train), (files.gold, gold), (files.asked, asked)):
            _write(place[task], map(_pair_row, part[task]))
    _write(files.pairs, map(_pair_row, [*train["harmless"], *train["helpful"]]))
    _write(files.heldout, map(_pair_row, [*asked["harmless"], *asked["helpful"]]))
    _write(files.demonstrations, ({"messages": _plain(messages)} for messages in imitated))
    _write(files.instructions, ({"messages": _plain(messages)} for messages in instructions))
    _write(files.prompts, _prompt_rows(train))
    _write(files.questions, _prompt_rows(asked))
    return files


def three_parts(pairs: Sequence[Pair], seed: int, *, gold_share: float) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Pairs for the policy's side, for gold, and to ask; a prompt is in one of them. Which ones are asked does not
    depend on the seed. `gold_share` is of the prompts that are not."""
    keys = [prompt_key(pair) for pair in pairs]
    asked = set(assign(keys, _ASKED_SHARE, 0).tolist())
    gold = set(assign([key for key in keys if key not in asked], gold_share, seed).tolist())
    parts: tuple[list[Pair], list[Pair], list[Pair]] = ([], [], [])
    for pair, key in zip(pairs, keys, strict=True):
        parts[2 if key in asked else 1 if key in gold else 0].append(pair)
    return parts


def _sound(examples: Iterable[Any]) -> Iterator[Pair]:
    """Pairs with two different answers that say something."""
    for example in examples:
        pair = cast(Pair, example)
        chosen, rejected = (text_of(messages).partition(":")[2].strip() for messages in (pair.chosen, pair.rejected))
        if chosen and rejected and chosen != rejected:
            yield pair


def _few(pairs: Iterable[Pair], most: int) -> list[Pair]:
    """At most so many of each prompt."""
    taken: dict[int, int] = {}
    kept: list[Pair] = []
    for pair in pairs:
        key = prompt_key(pair)
        taken[key] = taken.get(key, 0) + 1
        if taken[key] <= most:
            kept.append(pair)
    return kept


def _chosen(pairs: Iterable[Pair]) -> Iterator[Messages]:
    return ((*pair.prompt, *pair.chosen) for pair in pairs)


def _others(source: Path, known: set[int]) -> list[Messages]:
    """Instructions with short answers, none of whose prompts is asked or known to gold."""
    examples = (cast(Demonstration, example) for example in load(source / DEMONSTRATIONS))
    return [
        example.messages
        for example in examples
        if prompt_key(example) not in known and 0 < len(example.messages[-1].content) <= _LONGEST_DEMONSTRATION
    ]


def _spread(rows: list[Messages], most: int) -> list[Messages]:
    """So many, at even distances."""
    step = max(1, len(rows) // max(1, most))
    return rows[::step][:most]


def _prompts(pairs: Iterable[Pair]) -> list[Messages]:
    return list({prompt_key(pair): pair.prompt for pair in pairs}.values())


def _prompt_rows(parts: dict[Task, list[Pair]]) -> Iterator[dict[str, Any]]:
    for task, pairs in parts.items():
        for prompt in _prompts(pairs):
            yield {"prompt": _plain(prompt), "task": task, "risky": task == "harmless"}


def _pair_row(pair: Pair) -> dict[str, Any]:
    return {"prompt": _plain(pair.prompt), "chosen": _plain(pair.chosen), "rejected": _plain(pair.rejected)}


def _plain(messages: Messages) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _write(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    with row_writer(file) as write:
        for row in rows:
            write(row)


def write_toy(folder: Path) -> None:
    """A small world of the same form, in words of our own, for `--size small`."""
    rng = Random(0)

    def words(count: int) -> str:
        return " ".join("".join(rng.choices("aeioubdgklmnprst", k=6)) for _ in range(count))

    def harmless() -> dict[str, Any]:
        asked = f"\n\nHuman: How do I break {words(4)}?\n\nAssistant: "
        chosen, rejected = rng.sample((1, 2, 3), 2)
        return {"chosen": f"{asked}Leave {words(chosen)} be.", "rejected": f"{asked}Hit {words(rejected)} hard."}

    def helpful() -> dict[str, Any]:
        prompt = [{"role": "user", "content": f"What is {words(4)}?"}]
        chosen, rejected = rng.sample((1, 2, 3), 2)
        return {"prompt": prompt, "chosen": f"It is {words(chosen)}.", "rejected": f"No, {words(rejected)}."}

    def demonstration() -> dict[str, Any]:
        return {"prompt": f"Name {words(3)}.", "completion": f"It is {words(1)}."}

    makers = (harmless, helpful, demonstration)
    for name, make in zip((*SOURCES.values(), DEMONSTRATIONS), makers, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        _write(folder / name, [make() for _ in range(80)])
