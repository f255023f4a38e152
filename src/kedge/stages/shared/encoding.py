"""Examples as tokens: conversations to imitate, and texts as a reward model reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, cast

from kedge.core.errors import DataError
from kedge.data.batching import TokenSequence
from kedge.data.encoding.pieces import TextTokenizer
from kedge.data.encoding.rows import TOO_LONG, DemonstrationEncoder
from kedge.data.encoding.store import LazyRows, TokenTable
from kedge.data.examples import Demonstration, Messages
from kedge.data.reading import read
from kedge.data.template import encode_conversation, encode_prompt
from kedge.data.tokenizer import tokens_of
from kedge.models.reward.reward_model import reward_tokens
from kedge.models.settings import Truncate
from kedge.stages.shared.token_cache import SMALL_ITEMS, encoded_data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """What is trained on, tokenised, with the prompts that samples are taken from."""

    sequences: Sequence[TokenSequence]
    prompts: Sequence[Sequence[int]]
    num_too_long: int
    num_counted: int
    """Tokens that are learnt, of all sequences together."""


def encode_demonstrations(
    source: str, tokenizer: PreTrainedTokenizerBase, *, max_length: int, samples: int = 0
) -> Conversations:
    """The conversations of a file that are not too long, and the prompts of the first few."""
    examples = cast("Iterable[Demonstration]", read(source, kind="demonstrations"))
    data = encoded_data(
        source,
        examples,
        lambda tokenise: DemonstrationEncoder(tokenise=tokenise, max_length=max_length),
        tokenizer,
        settings={"kind": "demonstrations", "max_length": max_length},
    )
    num_too_long, num_counted = data.left_out.get(TOO_LONG, 0), int(data.table.column("num_counted").sum())
    if not num_counted:
        raise DataError(
            f"{source}: no conversation of at most {max_length} tokens (max_length) has an assistant's token "
            f"to learn, and {num_too_long} are longer; raise max_length, or look at it with kedge data check"
        )
    return Conversations(
        sequences=LazyRows(partial(_token_sequence, data.table), range(len(data.table))),
        prompts=_sample_prompts(source, tokenizer, max_length=max_length, count=samples),
        num_too_long=num_too_long,
        num_counted=num_counted,
    )


def _token_sequence(table: TokenTable, row: int) -> TokenSequence:
    return TokenSequence(tokens=table.value("tokens", row), counted=table.value("counted", row))


def _sample_prompts(source: str, tokenizer: PreTrainedTokenizerBase, *, max_length: int, count: int) -> list[list[int]]:
    """The prompts of the first conversations of a file that are not too long; plain text has none."""
    prompts: list[list[int]] = []
    tokenise = TextTokenizer(tokenizer)
    for example in islice(read(source, kind="demonstrations"), SMALL_ITEMS) if count else ():
        messages = cast(Demonstration, example).messages
        if len(messages) < 2:
            continue
        if len(encode_conversation(tokenizer, messages, tokenise=tokenise).tokens) <= max_length:
            prompts.append(encode_prompt(tokenizer, messages[:-1]))
        if len(prompts) == count:
            break
    return prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """From a prompt and an answer to tokens that end in the end-of-turn token, where the score is read."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    truncate: Truncate
    tokenise: TextTokenizer | None = None
    """For many texts in a row (`kedge.data.encoding.pieces`)."""

    def tokens(self, prompt: Messages, answer: Messages) -> list[int]:
        tokenise = self.tokenise or TextTokenizer(self.tokenizer)
        return reward_tokens(
            encode_conversation(self.tokenizer, prompt + answer, tokenise=tokenise).tokens,
            stop_ids=tokenise.control,
            blank_ids={*tokens_of(self.tokenizer, "\n"), *tokens_of(self.tokenizer, " ")},
            max_length=self.max_length,
            truncate=self.truncate,
        )

    def length(self, answer: Messages) -> int:
        text = "\n".join(message.content for message in answer)
        return len(tokens_of(self.tokenizer, text) if self.tokenise is None else self.tokenise(text).tokens)
