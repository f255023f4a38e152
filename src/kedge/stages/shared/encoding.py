"""Examples as tokens: conversations to imitate, and texts as a reward model reads them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

from kedge.core.errors import DataError
from kedge.core.stage import TooLong
from kedge.data.batching import TokenSequence
from kedge.data.encoding.pieces import TextTokenizer
from kedge.data.encoding.rows import TOO_LONG, DemonstrationEncoder, shortened
from kedge.data.encoding.store import LazyRows, TokenTable
from kedge.data.encoding.workers import LeftOut, RowEncoder
from kedge.data.examples import Demonstration, Messages
from kedge.data.long_prompts import LongPrompts
from kedge.data.reading import read
from kedge.data.template import encode_conversations, encode_prompt
from kedge.data.tokenizer import tokens_of
from kedge.models.reward.reward_model import reward_tokens
from kedge.models.settings import Truncate
from kedge.stages.shared.context import Context
from kedge.stages.shared.token_cache import SMALL_ITEMS, encoded_data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ExampleT = TypeVar("ExampleT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """What is trained on, tokenised, with the prompts that samples are taken from."""

    sequences: Sequence[TokenSequence]
    prompts: Sequence[Sequence[int]]
    num_too_long: int
    """Left out."""
    num_cut: int
    num_counted: int
    """Tokens that are learnt, of all sequences together."""


def encode_demonstrations(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    samples: int = 0,
    too_long: TooLong = "drop",
) -> Conversations:
    """The conversations of a file, those that are too long left out or cut, and the prompts of the first few."""

    def encoder(tokenise: TextTokenizer) -> DemonstrationEncoder:
        return DemonstrationEncoder(tokenise=tokenise, max_length=max_length, too_long=too_long)

    settings = {"kind": "demonstrations", "max_length": max_length, "too_long": too_long}
    data = encoded_data(source, _demonstrations(source), encoder, tokenizer, settings=settings)
    num_too_long, num_counted = data.left_out.get(TOO_LONG, 0), int(data.table.column("num_counted").sum())
    if num_too_long and too_long == "refuse":
        again = encoder(TextTokenizer(tokenizer))
        refuse_long(source, _demonstrations(source), again, limit=max_length, noun="conversation")
    if not num_counted:
        raise DataError(
            f"{source}: no conversation of at most {max_length} tokens (max_length) has an assistant's token "
            f"to learn, and {num_too_long} are longer; raise max_length, or look at it with kedge data check"
        )
    return Conversations(
        sequences=LazyRows(partial(_token_sequence, data.table), range(len(data.table))),
        prompts=_sample_prompts(source, tokenizer, max_length=max_length, too_long=too_long, count=samples),
        num_too_long=num_too_long,
        num_cut=int(data.table.column("is_cut").sum()),
        num_counted=num_counted,
    )


def _demonstrations(source: str) -> Iterable[Demonstration]:
    return cast("Iterable[Demonstration]", read(source, kind="demonstrations"))


def _token_sequence(table: TokenTable, row: int) -> TokenSequence:
    return TokenSequence(tokens=table.value("tokens", row), counted=table.value("counted", row))


def _sample_prompts(
    source: str, tokenizer: PreTrainedTokenizerBase, *, max_length: int, too_long: TooLong, count: int
) -> list[list[int]]:
    """The prompts of the first conversations of a file that are learnt; plain text has none."""
    prompts: list[list[int]] = []
    tokenise = TextTokenizer(tokenizer)
    for example in islice(_demonstrations(source), SMALL_ITEMS) if count else ():
        if len(example.messages) < 2:
            continue
        messages = shortened(tokenise, example.messages, example.origin, max_length=max_length, too_long=too_long)
        if not isinstance(messages, LeftOut):
            prompts.append(encode_prompt(tokenizer, messages[:-1]))
        if len(prompts) == count:
            break
    return prompts


def refuse_long(
    source: str, items: Iterable[ExampleT], encoder: RowEncoder[ExampleT], *, limit: int, noun: str
) -> NoReturn:
    """`too_long: refuse`: an error that names the examples over the limit, which are looked for again."""
    places: list[tuple[str, int]] = []
    total = 0
    for item in items:
        total += 1
        (row,) = encoder([item])
        if isinstance(row, LeftOut) and row.reason == TOO_LONG:
            places.append((Path(row.where).name, row.length))
    long = LongPrompts(places=tuple(places), total=total, limit=limit, limit_name="max_length", noun=noun)
    raise DataError(f"{source}: {long.in_words()}: {long.fix}")


def report_long(context: Context, code: str, what: str, *, max_length: int, dropped: int, cut: int) -> None:
    """Say how many examples were longer than `max_length` tokens, and what became of them."""
    if dropped:
        context.event("warning", code, f"{dropped:,} {what} are longer than {max_length} tokens: left out")
    if cut:
        context.event("warning", code, f"{cut:,} {what} are longer than {max_length} tokens: they lost their beginning")


def truncation(too_long: TooLong) -> Truncate:
    """How a reward model reads texts longer than its window, ever after: as its training data was treated."""
    return "refuse" if too_long == "refuse" else "left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """From a prompt and an answer to tokens that end in the end-of-turn token, where the score is read."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    truncate: Truncate
    tokenise: TextTokenizer | None = None
    """For many texts in a row (`kedge.data.encoding.pieces`)."""

    def tokens(self, prompt: Messages, answer: Messages) -> list[int]:
        (tokens,) = self._encode([(prompt, answer)], self.max_length)
        return tokens

    def whole(self, texts: Sequence[tuple[Messages, Messages]]) -> Iterator[list[int]]:
        """The tokens of each prompt with its answer, however many they are."""
        return self._encode(texts, sys.maxsize)

    def _encode(self, texts: Sequence[tuple[Messages, Messages]], max_length: int) -> Iterator[list[int]]:
        tokenise = self.tokenise or TextTokenizer(self.tokenizer)
        blank_ids = {*tokens_of(self.tokenizer, "\n"), *tokens_of(self.tokenizer, " ")}
        for encoded in encode_conversations(tokenise, [(prompt + answer, 0) for prompt, answer in texts]):
            yield reward_tokens(
                encoded.tokens.tolist(),
                stop_ids=tokenise.control,
                blank_ids=blank_ids,
                max_length=max_length,
                truncate=self.truncate,
            )

    def lengths(self, answers: Sequence[Messages]) -> list[int]:
        """The tokens of each answer by itself."""
        texts = ["\n".join(message.content for message in answer) for answer in answers]
        if self.tokenise is None:
            return [len(tokens_of(self.tokenizer, text)) for text in texts]
        return [len(tokenised.tokens) for tokenised in self.tokenise.many(texts)]
