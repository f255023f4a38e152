"""Examples as tokens: conversations to imitate, and texts as a reward model reads them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from kedge.core.errors import DataError
from kedge.core.stage import TooLong
from kedge.data.batching import TokenSequence
from kedge.data.examples import Demonstration, Messages, Origin
from kedge.data.long_prompts import LongPrompts, place_of, prompt_before
from kedge.data.reading import read
from kedge.data.template import encode_conversation, encode_prompt
from kedge.data.tokenizer import special_ids, tokens_of
from kedge.models.reward.reward_model import reward_tokens
from kedge.models.settings import Truncate
from kedge.stages.shared.context import Context

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """What is trained on, tokenised, with the prompts that samples are taken from."""

    sequences: Sequence[TokenSequence]
    prompts: Sequence[Sequence[int]]
    num_too_long: int
    """Left out."""
    num_cut: int = 0


def encode_demonstrations(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    samples: int = 0,
    too_long: TooLong = "drop",
) -> Conversations:
    """The conversations of a file, those that are too long left out or cut, and the prompts of the first few."""
    sequences: list[TokenSequence] = []
    prompts: list[list[int]] = []
    places: list[tuple[str, int]] = []
    total = num_too_long = 0
    for example in read(source, kind="demonstrations"):
        total += 1
        messages = cast(Demonstration, example).messages
        encoded = encode_conversation(tokenizer, messages)
        if len(encoded.tokens) > max_length:
            places.append((place_of(example.origin), len(encoded.tokens)))
            shorter = _shortened(tokenizer, messages, example.origin, max_length) if too_long == "cut" else None
            if shorter is None:
                num_too_long += 1
                continue
            messages, encoded = shorter, encode_conversation(tokenizer, shorter)
        # Plain text is cut here: it has no prompt that could be.
        tokens, counted = encoded.tokens[-max_length:], encoded.assistant_mask[-max_length:]
        sequences.append(TokenSequence(tokens=tokens, counted=counted))
        if len(prompts) < samples and len(messages) > 1:  # plain text has no prompt
            prompts.append(encode_prompt(tokenizer, messages[:-1]))
    refuse_long(source, places, too_long, total=total, limit=max_length, noun="conversation")
    if not any(any(sequence.counted) for sequence in sequences):
        raise DataError(
            f"{source}: no conversation of at most {max_length} tokens (max_length) has an assistant's token "
            f"to learn, and {num_too_long} are longer; raise max_length, or look at it with kedge data check"
        )
    num_cut = len(places) - num_too_long
    return Conversations(sequences=sequences, prompts=prompts, num_too_long=num_too_long, num_cut=num_cut)


def refuse_long(
    source: str, places: Sequence[tuple[str, int]], too_long: TooLong, *, total: int, limit: int, noun: str
) -> None:
    """`too_long: refuse`: an error that names the examples over the limit, where there are any."""
    if places and too_long == "refuse":
        long = LongPrompts(places=tuple(places), total=total, limit=limit, limit_name="max_length", noun=noun)
        raise DataError(f"{source}: {long.in_words()}: {long.fix}")


def report_long(context: Context, code: str, what: str, *, max_length: int, dropped: int, cut: int) -> None:
    """Say how many examples were longer than `max_length` tokens, and what became of them."""
    if dropped:
        context.event("warning", code, f"{dropped:,} {what} are longer than {max_length} tokens: left out")
    if cut:
        context.event("warning", code, f"{cut:,} {what} are longer than {max_length} tokens: they lost their beginning")


def _shortened(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, origin: Origin, max_length: int
) -> Messages | None:
    """The conversation with the beginning of its prompt cut off; None where that is not enough."""
    if len(messages) == 1:
        return messages
    prompt, answer = messages[:-1], messages[-1:]
    shorter = prompt_before(tokenizer, prompt, [answer], max_length=max_length, origin=origin)
    return None if shorter is None else shorter + answer


def truncation(too_long: TooLong) -> Truncate:
    """How a reward model reads texts longer than its window, ever after: as its training data was treated."""
    return "refuse" if too_long == "refuse" else "left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """From a prompt and an answer to tokens that end in the end-of-turn token, where the score is read."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    truncate: Truncate

    def tokens(self, prompt: Messages, answer: Messages) -> list[int]:
        return self._tokens(prompt, answer, self.max_length)

    def whole(self, prompt: Messages, answer: Messages) -> list[int]:
        """The tokens, however many they are."""
        return self._tokens(prompt, answer, sys.maxsize)

    def _tokens(self, prompt: Messages, answer: Messages, max_length: int) -> list[int]:
        return reward_tokens(
            encode_conversation(self.tokenizer, prompt + answer).tokens,
            stop_ids=special_ids(self.tokenizer),
            blank_ids={*tokens_of(self.tokenizer, "\n"), *tokens_of(self.tokenizer, " ")},
            max_length=max_length,
            truncate=self.truncate,
        )

    def length(self, answer: Messages) -> int:
        return len(tokens_of(self.tokenizer, "\n".join(message.content for message in answer)))
