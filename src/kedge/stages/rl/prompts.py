"""The prompts of an RL run, tokenised once, in an order that the seed fixes, and the rollouts of their batches.

Every epoch is a new permutation. A group's id is its position in that endless order, so that a resumed run asks what
the uninterrupted one would have asked, and a prompt that comes twice is two groups. Batches may be sampled ahead of the
policy, by at most `lag` versions: batch n is submitted before batch n - lag is learnt from, so it is sampled by the
weights of n - lag updates or more. What is under way is part of a checkpoint, so that a resumed run learns from the
very answers that the undisturbed one learns from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kedge.core.errors import DataError
from kedge.core.protocols import Generator
from kedge.core.records import Prompts, Rollouts, repeated, to_device
from kedge.core.seeds import item_at, seed_for
from kedge.core.stage import TooLong
from kedge.data.encoding.rows import PromptEncoder
from kedge.data.encoding.store import LazyRows
from kedge.data.examples import Prompt
from kedge.data.long_prompts import LongPrompts, fit_prompts, tighter_limit
from kedge.data.mixing import MIXTURE, group_values
from kedge.data.reading import read
from kedge.models.loading.describe import context_window
from kedge.rewards.rollouts import PromptRecord
from kedge.stages.rl.settings import RLSettings
from kedge.stages.shared.context import Context
from kedge.stages.shared.token_cache import encoded_data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Mixture:
    """Files with shares in one endless order: after n groups every file has had its share of n, to within one or two,
    so that each batch has it too."""

    def __init__(self, rows: Sequence[Sequence[int]], shares: Sequence[float]) -> None:
        self.rows = rows
        """By file, which prompts are its own."""
        self._shares = shares
        self._counts = [0] * len(rows)
        self._places: list[tuple[int, int]] = []

    def place(self, group: int) -> tuple[int, int]:
        """The file of a group, and how many groups before it were of that file.

        >>> mixture = Mixture([[0, 1, 2], [3]], [0.75, 0.25])
        >>> [mixture.place(group) for group in range(5)]
        [(0, 0), (0, 1), (1, 0), (0, 2), (0, 3)]
        """
        while len(self._places) <= group:
            done = len(self._places) + 1
            lacks = [share * done - count for share, count in zip(self._shares, self._counts, strict=True)]
            part = lacks.index(max(lacks))
            self._places.append((part, self._counts[part]))
            self._counts[part] += 1
        return self._places[group]


def _mixture(prompts: Sequence[Prompt]) -> Mixture | None:
    """The mixture that prompts were written for (`kedge.data.mixing`), if they were."""
    marks = [prompt.extra.get(MIXTURE) for prompt in prompts]
    if not marks or not all(isinstance(mark, Mapping) for mark in marks):
        return None
    parts: dict[int, list[int]] = {}
    shares: dict[int, float] = {}
    for row, mark in enumerate(cast("list[Mapping[str, Any]]", marks)):
        parts.setdefault(mark["part"], []).append(row)
        shares[mark["part"]] = mark["share"]
    return Mixture([parts[part] for part in sorted(parts)], [shares[part] for part in sorted(parts)])


def balanced(prompts: Sequence[Prompt], field: str, source: str) -> Mixture:
    """As many groups of each value of a field, however many prompts have it."""
    if _mixture(prompts) is not None:
        raise DataError(f"{source}: balance: {field}: the prompts have shares of their own already; leave one out")
    parts: dict[str, list[int]] = {}
    for row, value in enumerate(group_values([prompt.extra for prompt in prompts], field, setting="balance")):
        parts.setdefault(value, []).append(row)
    return Mixture([parts[value] for value in sorted(parts)], [1 / len(parts)] * len(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDataset:
    prompts: Sequence[Prompt]
    tokens: Sequence[Sequence[int]]
    batch: int
    """Prompts in one iteration."""
    answers: int
    """Answers to each."""
    seed: int
    mixture: Mixture | None = None
    """Where the prompts come from several files with weights, or are balanced by a field: which part each group is
    drawn from."""

    def item(self, group: int) -> int:
        """Which prompt a group is about."""
        if self.mixture is None:
            return item_at(group, len(self.prompts), self.seed)
        part, number = self.mixture.place(group)
        rows = self.mixture.rows[part]
        return rows[item_at(number, len(rows), seed_for(self.seed, "part", part))]

    def case(self, group: int) -> PromptRecord:
        found = self.prompts[self.item(group)]
        said = tuple((message.role, message.content) for message in found.prompt)
        return PromptRecord(prompt=said, solution=found.answer, extra=found.extra)

    def batches(self, start: int, end: int) -> Iterator[Prompts]:
        """The prompts of the iterations from `start` up to `end`."""
        return map(self.prompts_in, range(start, end))

    def prompts_in(self, number: int) -> Prompts:
        """The prompts of an iteration."""
        return self.prompts_of(range(number * self.batch, (number + 1) * self.batch))

    def prompts_of(self, groups: Sequence[int], *, answers: int | None = None) -> Prompts:
        """What is asked of these groups; `answers` to each, those of a batch where it is not said."""
        tokens = [self.tokens[self.item(group)] for group in groups]
        return repeated(tokens, ids=groups, answers=self.answers if answers is None else answers)


def fields_of(prompts: Sequence[Prompt]) -> frozenset[str]:
    """The fields of the prompts' records that a reward may ask for: `solution` where one is known, and all others."""
    solution = {"solution"} if any(prompt.answer is not None for prompt in prompts) else set[str]()
    return frozenset(solution.union(*(prompt.extra for prompt in prompts)))


def read_prompts(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch: int,
    answers: int,
    max_tokens: int,
    seed: int,
    set_aside: Path | None,
    limit_name: str = "max_prompt_tokens",
    too_long: TooLong = "refuse",
    balance: str | None = None,
    report: Callable[[LongPrompts], None] = lambda long: None,
) -> PromptDataset:
    """All prompts of a file, none with more than `max_tokens`: what happens to a longer one is said by `too_long`.

    With `balance` every value of that field has as many groups. `report` is called with those left out or cut.
    """
    prompts = [cast(Prompt, one) for one in read(source, kind="prompts", set_aside=set_aside)]
    if not prompts:
        raise DataError(f"{source}: no prompts in it; look at it with kedge data check")
    fitted = fit_prompts(
        tokenizer,
        prompts,
        source=source,
        max_tokens=max_tokens,
        too_long=too_long,
        limit_name=limit_name,
        tokens=_tokens(source, prompts, tokenizer),
    )
    report(fitted.long)
    return PromptDataset(
        prompts=fitted.prompts,
        tokens=fitted.tokens,
        batch=batch,
        answers=answers,
        seed=seed_for(seed, "prompts"),
        mixture=_mixture(fitted.prompts) if balance is None else balanced(fitted.prompts, balance, source),
    )


def run_prompts(
    context: Context,
    settings: RLSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    set_aside: Path | None = None,
    report: Callable[[LongPrompts], None] = lambda long: None,
) -> PromptDataset:
    """The prompts of an RL stage, which fit before an answer."""
    longest, limit_name = prompt_limit(
        context.input("from"), settings.max_prompt_tokens, settings.sampling.max_new_tokens
    )
    return read_prompts(
        context.input("prompts"),
        tokenizer,
        batch=settings.batch,
        answers=settings.answers,
        max_tokens=longest,
        limit_name=limit_name,
        seed=context.seed,
        set_aside=set_aside,
        too_long=settings.too_long,
        balance=settings.balance,
        report=report,
    )


def _tokens(source: str, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> Sequence[Sequence[int]]:
    """The tokens of the prompts that were read of a source; of many, from the cache."""
    data = encoded_data(
        source, prompts, lambda tokenise: PromptEncoder(tokenise=tokenise), tokenizer, settings={"kind": "prompts"}
    )
    return LazyRows(partial(data.table.value, "tokens"), range(len(data.table)))


def prompt_limit(model: str, max_prompt_tokens: int | None, max_new_tokens: int) -> tuple[int, str]:
    """The most tokens that a prompt may have so that an answer fits behind it, and what sets this limit."""
    return tighter_limit(context_window(model), max_prompt_tokens, max_new_tokens)


def report_long_prompts(context: Context, too_long: TooLong, long: LongPrompts) -> None:
    """An event with the number of prompts that were left out or cut for their length."""
    if long:
        done = {"drop": "left out", "cut": "they lose their beginning", "refuse": "refused"}[too_long]
        message = f"{long.in_words()}: {done} (too_long: {too_long})"
        context.event("warning", "prompts.too_long", message, count=len(long.places), total=long.total)


UnderWay = Sequence[tuple[int, Future[Rollouts]]]
"""Batches that were submitted and not yet learnt from: their numbers and answers, in order."""


class RolloutStream:
    """`take` the batches by their numbers, one after the other, up to `end`."""

    def __init__(
        self, generator: Generator, prompts: Callable[[int], Prompts], *, lag: int, seed: int, end: int
    ) -> None:
        """`prompts` are those of a batch, by its number."""
        self._generator, self._prompts = generator, prompts
        self._lag, self._seed, self._end = lag, seed, end
        self._under_way: dict[int, Future[Rollouts]] = {}

    def take(self, number: int) -> Rollouts:
        """The rollouts of a batch. Batches up to `lag` after it are submitted first, with the weights of now."""
        for later in range(number, min(number + self._lag, self._end - 1) + 1):
            if later not in self._under_way:
                self._under_way[later] = submit(self._generator, self._prompts(later), self._seed, later)
        return self._under_way.pop(number).result()

    @property
    def under_way(self) -> UnderWay:
        return tuple(self._under_way.items())

    def replace(self, batches: Iterable[tuple[int, Rollouts]]) -> None:
        """These are under way, and no others: where a run is resumed, or goes back to a checkpoint."""
        for future in self._under_way.values():
            future.cancel()
        self._under_way = {number: _done(rollouts) for number, rollouts in batches}


def submit(generator: Generator, prompts: Prompts, seed: int, number: int) -> Future[Rollouts]:
    """Ask for the answers of batch `number`: of a seed that is its own."""
    return generator.submit(prompts, seed_for(seed, "rollout", number))


def state_of(under_way: UnderWay) -> list[dict[str, Any]]:
    """What is under way as a checkpoint holds it, once it is there. From a batch on that failed there is nothing: the
    error comes to light where that batch is taken, and a resumed run asks for it again."""
    batches = list[dict[str, Any]]()
    for number, future in under_way:
        if future.exception() is not None:
            break
        rollouts = future.result()
        record = {field.name: getattr(rollouts, field.name) for field in fields(Rollouts)}
        batches.append({"number": number, "rollouts": record})
    return batches


def batches_of(state: Iterable[dict[str, Any]], device: Any) -> list[tuple[int, Rollouts]]:
    """The other way round, with tensors on the device."""
    return [(batch["number"], to_device(Rollouts(**batch["rollouts"]), device)) for batch in state]


def _done(rollouts: Rollouts) -> Future[Rollouts]:
    future = Future[Rollouts]()
    future.set_result(rollouts)
    return future
