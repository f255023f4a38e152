"""How long the rows of a stage are, in tokens, from its data; and the steps that they make.

A file is read up to `MOST_READ` examples: enough for means and for the longest step, and quick. Where it is read to its
end, the steps are those of the run itself, in its own order. Rows that another stage has yet to make are taken to be
like those of the file that it makes them from, or half as long as they may be, and a note says so.
Left out: what an audit or a gate leaves out, weights of several files, dropped duplicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import ceil
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from kedge.core.errors import DataError
from kedge.core.seeds import item_at, seed_for
from kedge.core.stage import DATA_KINDS
from kedge.recipe.data_inputs import read_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kedge.data.examples import Example, Kind, Messages
    from kedge.recipe.schema import Recipe
    from kedge.recipe.wiring import Link
    from kedge.recipe.wiring import Plan as Wiring

MOST_READ: Final = 4_096
MOST_STEPS: Final = 128
"""Steps that are looked at, for the longest and the mean."""
MOST_ITEMS: Final = 2**16
"""Of all steps that are looked at; one step at least, however large it is."""
ASSUMED: Final = 1_000
"""Rows that another stage has yet to make."""
_FATE: Final = {"drop": "left out", "cut": "cut", "refuse": "the run refuses them"}


class Row(NamedTuple):
    """One sequence: its tokens, and those that are predicted for a loss."""

    tokens: int
    counted: int


Item = tuple[Row, ...]
"""What is learnt together: a conversation, both answers of a pair, all of a ranking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """The examples of a stage."""

    items: Sequence[Item]
    count: int
    """Of them in all, as far as it is known."""
    keys: Sequence[int] = ()
    """Of their prompts, by which some are held out."""
    is_whole: bool = True
    """Whether all were read."""
    notes: tuple[str, ...] = ()

    @property
    def longest(self) -> int:
        return max((row.tokens for item in self.items for row in item), default=1)

    def without(self, share: float, seed: int) -> Items:
        """Those that are left to learn from where this share of the prompts is held out."""
        from kedge.data.splitting import assign

        kept = round(self.count * (1 - share))
        if not self.is_whole or len(set(self.keys)) < 2:
            return Items(items=self.items, count=kept, is_whole=False, notes=self.notes)
        out = set(assign(self.keys, share, seed).tolist())
        items = [item for item, key in zip(self.items, self.keys, strict=True) if key not in out]
        return Items(items=items, count=len(items), notes=self.notes)

    def steps(self, batch: int, *, count: int, seed: int) -> list[list[Item]]:
        """The items of each of the first steps of `batch` of them: the run's own where all examples are known."""
        most = max(1, min(count, MOST_STEPS, MOST_ITEMS // batch))
        return [
            [self.items[item_at(step * batch + index, len(self.items), seed)] for index in range(batch)]
            for step in range(most)
        ]


def num_steps(items: int, *, epochs: float, batch: int, max_steps: int | None) -> int:
    """
    >>> num_steps(100, epochs=1.5, batch=32, max_steps=None), num_steps(100, epochs=1.5, batch=32, max_steps=3)
    (5, 3)
    """
    steps = ceil(max(round(items * epochs), min(items, 1)) / batch)
    return steps if max_steps is None else min(steps, max_steps)


@dataclass(slots=True, kw_only=True)
class DataReader:
    """The data of a recipe, a file read once for each kind and limit that it is wanted with."""

    recipe: Recipe
    wiring: Wiring
    model_of: Callable[[str], str]
    """The model behind a stage, whose tokenizer reads its data."""
    _read: dict[tuple[Any, ...], Items] = field(default_factory=dict[Any, Items])
    _tokenizers: dict[str, PreTrainedTokenizerBase] = field(default_factory=dict[str, Any])

    def seed(self, stage: str) -> int:
        """That of a stage, from which its order comes."""
        return seed_for(self.recipe.settings.seed, stage)

    def items(self, stage: str, where: str, *, longest: int, too_long: str) -> Items:
        """The examples of an input of a stage; of a pair or a ranking the tokens of the answers are counted."""
        links = [link for link in self.wiring.links[stage] if link.field == where]
        model = self.model_of(stage)
        parts = [self._of_link(link, model, longest, too_long) for link in links]
        known = [part for part in parts if part.items]
        if not known:
            return _assumed(longest, f"{stage}.{where}")
        return Items(
            items=[item for part in known for item in part.items],
            count=sum(part.count for part in parts),
            keys=[key for part in known for key in part.keys],
            is_whole=all(part.is_whole for part in parts),
            notes=tuple(note for part in parts for note in part.notes),
        )

    def _of_link(self, link: Link, model: str, longest: int, too_long: str) -> Items:
        if not link.stage:
            return self._of_file(link, model, longest, too_long)
        if getattr(self.recipe.stages[link.stage], "kind", "") != "data":
            return Items(items=[], count=0, is_whole=False)
        kept = 1 - float(getattr(self.recipe.stages[link.stage], "heldout", 0.0))
        share = kept if link.output == "train" else 1 - kept
        sources = [source for source in self.wiring.links[link.stage] if source.field == "files" and not source.stage]
        parts = [self._of_file(replace(source, kinds=link.kinds), model, longest, too_long) for source in sources]
        return Items(
            items=[item for part in parts for item in part.items],
            count=round(share * sum(part.count for part in parts)),
            is_whole=False,
            notes=(f"{link.value}: taken to be like the files that {link.stage} reads", *_all_notes(parts)),
        )

    def _of_file(self, link: Link, model: str, longest: int, too_long: str) -> Items:
        source, options = link.source(), read_options(link)
        key = (source, model, link.kinds, longest, too_long, repr(options))
        if key not in self._read:
            self._read[key] = self._measured(source, model, _kind_of(link.kinds), options, longest, too_long)
        return self._read[key]

    def _measured(
        self, source: str, model: str, kind: Kind | None, options: Mapping[str, Any], longest: int, too_long: str
    ) -> Items:
        from kedge.data.reading import prompt_key, read

        reading = iter(read(source, kind=kind, **options))
        examples = list(islice(reading, MOST_READ))
        more = sum(1 for _ in reading)
        rows = zip(examples, self._rows(examples, model), strict=True)
        all_items = list(rows)
        fitting = [(example, item) for example, item in all_items if _longest(item) <= longest]
        kept = fitting if too_long == "drop" else all_items
        if examples and not kept:
            raise DataError(
                f"{source}: all {len(examples):,} examples are longer than {longest:,} tokens: none is left"
            )
        notes = [f"{source}: {MOST_READ:,} of {MOST_READ + more:,} examples were measured"] if more else []
        if long := len(examples) - len(fitting):
            notes.append(f"{source}: {long:,} examples are longer than {longest:,} tokens: {_FATE[too_long]}")
        return Items(
            items=[tuple(Row(min(row.tokens, longest), min(row.counted, longest)) for row in item) for _, item in kept],
            keys=[prompt_key(example) for example, _ in kept],
            count=len(kept) + round(more * len(kept) / max(1, len(examples))),
            is_whole=not more,
            notes=tuple(notes),
        )

    def _rows(self, examples: Sequence[Example], model: str) -> Iterator[Item]:
        """The rows of each example."""
        from kedge.data.encoding.pieces import TextTokenizer
        from kedge.data.template import encode_conversations, encode_prompt

        tokenizer = self._tokenizer_of(model)
        tokenise = TextTokenizer(tokenizer)
        for example in examples:
            prompt, conversations = _texts(example)
            if not conversations:
                yield (Row(len(encode_prompt(tokenizer, prompt)), 0),)
                continue
            encoded = encode_conversations(tokenise, conversations)
            yield tuple(Row(len(text.tokens), int(text.assistant_mask.sum())) for text in encoded)

    def _tokenizer_of(self, model: str) -> PreTrainedTokenizerBase:
        from kedge.data.template import apply_template
        from kedge.data.tokenizer import load_tokenizer
        from kedge.models.loading.config_file import described_at

        if model not in self._tokenizers:
            tokenizer, template = load_tokenizer(described_at(model)), self.recipe.chat_template
            self._tokenizers[model] = tokenizer if template is None else apply_template(tokenizer, template)
        return self._tokenizers[model]


def _longest(item: Item) -> int:
    return max(row.tokens for row in item)


def _all_notes(parts: Sequence[Items]) -> list[str]:
    return [note for part in parts for note in part.notes]


def _assumed(longest: int, where: str) -> Items:
    half = max(1, longest // 2)
    note = f"{where} is made by another stage: {ASSUMED:,} rows of {half:,} tokens are assumed"
    return Items(items=[(Row(half, half // 2),)], count=ASSUMED, is_whole=False, notes=(note,))


def _kind_of(kinds: Sequence[str]) -> Kind | None:
    wanted = [kind for kind in kinds if kind in DATA_KINDS and kind != "records"]
    return cast("Kind", wanted[0]) if len(wanted) == 1 else None


def _texts(example: Example) -> tuple[Messages, list[tuple[Messages, int]]]:
    """The prompt of an example, and its conversations, each with the message that is learnt from; a prompt has none."""
    from kedge.data.examples import Demonstration, Prompt, answers_of, prompt_of

    if isinstance(example, Prompt):
        return example.prompt, []
    if isinstance(example, Demonstration):
        return (), [(example.messages, 0)]
    prompt = prompt_of(example)
    return prompt, [(prompt + answer, len(prompt)) for answer in answers_of(example)]
