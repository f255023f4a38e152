"""Examples as tokens: conversations to imitate, and texts as a reward model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from kedge.core.errors import DataError
from kedge.data.batching import TokenSequence
from kedge.data.examples import Demonstration, Messages
from kedge.data.reading import read
from kedge.data.template import encode_conversation, encode_prompt
from kedge.data.tokenizer import special_ids, tokens_of
from kedge.models.reward.reward_model import reward_tokens
from kedge.models.settings import Truncate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """What is trained on, tokenised, with the prompts that samples are taken from."""

    sequences: Sequence[TokenSequence]
    prompts: Sequence[Sequence[int]]
    num_too_long: int


def encode_demonstrations(
    source: str, tokenizer: PreTrainedTokenizerBase, *, max_length: int, samples: int = 0
) -> Conversations:
    """The conversations of a file that are not too long, and the prompts of the first few."""
    sequences: list[TokenSequence] = []
    prompts: list[list[int]] = []
    num_too_long = 0
    for example in read(source, kind="demonstrations"):
        messages = cast(Demonstration, example).messages
        encoded = encode_conversation(tokenizer, messages)
        if len(encoded.tokens) > max_length:
            num_too_long += 1
            continue
        sequences.append(TokenSequence(tokens=encoded.tokens, counted=encoded.assistant_mask))
        if len(prompts) < samples and len(messages) > 1:  # plain text has no prompt
            prompts.append(encode_prompt(tokenizer, messages[:-1]))
    if not any(any(sequence.counted) for sequence in sequences):
        raise DataError(
            f"{source}: no conversation of at most {max_length} tokens (max_length) has an assistant's token "
            f"to learn, and {num_too_long} are longer; raise max_length, or look at it with kedge data check"
        )
    return Conversations(sequences=sequences, prompts=prompts, num_too_long=num_too_long)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """From a prompt and an answer to tokens that end in the end-of-turn token, where the score is read."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    truncate: Truncate

    def tokens(self, prompt: Messages, answer: Messages) -> list[int]:
        return reward_tokens(
            encode_conversation(self.tokenizer, prompt + answer).tokens,
            stop_ids=special_ids(self.tokenizer),
            blank_ids={*tokens_of(self.tokenizer, "\n"), *tokens_of(self.tokenizer, " ")},
            max_length=self.max_length,
            truncate=self.truncate,
        )

    def length(self, answer: Messages) -> int:
        return len(tokens_of(self.tokenizer, "\n".join(message.content for message in answer)))
