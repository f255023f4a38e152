"""From examples to the rows of a token table: what is kept of a conversation, a pair or an answer.

They run in the processes that fill the cache, and stand here by themselves so that those start without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import orjson

from kedge.core.errors import DataError
from kedge.core.stage import TooLong
from kedge.data.encoding.pieces import TextTokenizer
from kedge.data.encoding.store import Columns
from kedge.data.encoding.workers import LeftOut
from kedge.data.examples import Demonstration, Message, Messages, Origin, Pair, Prompt, Thumb
from kedge.data.long_prompts import prompt_before
from kedge.data.reading import prompt_key
from kedge.data.template import EncodedArrays, encode_conversations, render
from kedge.data.writing import encode as as_json

TOO_LONG, IDENTICAL = "too_long", "identical"
"""Why an example has no row."""


def messages_as_text(messages: Messages) -> str:
    """Messages in one column of a table, from which `messages_of_text` reads them back."""
    fields = [(message.role, message.content, message.is_trained, message.detail) for message in messages]
    return as_json(fields).decode()


def messages_of_text(text: str) -> Messages:
    """
    >>> messages_of_text(messages_as_text((Message("user", "Hi"),)))
    (Message(role='user', content='Hi'),)
    """
    return tuple(
        Message(role, content, is_trained=is_trained, detail=detail)
        for role, content, is_trained, detail in orjson.loads(text)
    )


def relative_place(place: str, source: str) -> str:
    """Where an example stands, as seen from its source: equal files have equal caches, wherever they lie.

    >>> relative_place("data/pairs.jsonl:7", "data/pairs.jsonl"), relative_place("data/a.jsonl:7", "data:train")
    ('0 :7', '6 /a.jsonl:7')
    """
    shared = next(
        (at for at, (a, b) in enumerate(zip(place, source, strict=False)) if a != b), min(len(place), len(source))
    )
    return f"{len(source) - shared} {place[shared:]}"


def absolute_place(relative: str, source: str) -> str:
    """
    >>> absolute_place("6 /a.jsonl:7", "elsewhere:train")
    'elsewhere/a.jsonl:7'
    """
    unshared, _, rest = relative.partition(" ")
    return source[: len(source) - int(unshared)] + rest


def shortened(
    tokenise: TextTokenizer, messages: Messages, origin: Origin, *, max_length: int, too_long: TooLong
) -> Messages | LeftOut:
    """The conversation as it is if it is short enough, else with the beginning of its prompt cut off.

    It is left out where cutting is not asked for, or not enough.
    """
    (encoded,) = encode_conversations(tokenise, [(messages, 0)])
    length = len(encoded.tokens)
    if length <= max_length or (too_long == "cut" and len(messages) == 1):  # plain text has no prompt: it is cut itself
        return messages
    prompt, answer = messages[:-1], messages[-1:]
    shorter = None
    if too_long == "cut":
        shorter = prompt_before(tokenise.tokenizer, prompt, [answer], max_length=max_length, origin=origin)
    return LeftOut(TOO_LONG, str(origin), length) if shorter is None else shorter + answer


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationEncoder:
    """Conversations, masked on what is learnt; those that are too long have no row, or lose their beginning."""

    tokenise: TextTokenizer
    max_length: int
    too_long: TooLong = "drop"

    columns: ClassVar[Columns] = {"tokens": "tokens", "counted": "mask", "num_counted": "number", "is_cut": "number"}

    def __call__(self, examples: Sequence[Demonstration]) -> list[Mapping[str, Any] | LeftOut]:
        encoded = encode_conversations(self.tokenise, [(example.messages, 0) for example in examples])
        return [self._row(example, conversation) for example, conversation in zip(examples, encoded, strict=True)]

    def _row(self, example: Demonstration, encoded: EncodedArrays) -> Mapping[str, Any] | LeftOut:
        is_cut = len(encoded.tokens) > self.max_length
        if is_cut:
            messages = shortened(
                self.tokenise, example.messages, example.origin, max_length=self.max_length, too_long=self.too_long
            )
            if isinstance(messages, LeftOut):
                return messages
            (encoded,) = encode_conversations(self.tokenise, [(messages, 0)])
        tokens, mask = encoded.tokens[-self.max_length :], encoded.assistant_mask[-self.max_length :]
        return {"tokens": tokens, "counted": mask, "num_counted": int(mask.sum()), "is_cut": int(is_cut)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceEncoder:
    """Both answers of a pair, or the one that somebody liked or did not, behind their prompt; the answer counts.

    Too long ones have no row, or lose the beginning of their prompt; pairs of equal answers have none.
    """

    tokenise: TextTokenizer
    max_length: int
    too_long: TooLong = "drop"

    columns: ClassVar[Columns] = {
        "tokens": "token_lists",
        "counted": "masks",
        "is_good": "flags",
        "prompt_key": "key",
        "prompt": "text",
        "is_cut": "number",
    }

    def __call__(self, examples: Sequence[Pair | Thumb]) -> list[Mapping[str, Any] | LeftOut]:
        encoded = self._encode((example.prompt, answer) for example in examples for answer in _judged(example))
        return [self._row(example, [next(encoded) for _ in _judged(example)]) for example in examples]

    def _row(self, example: Pair | Thumb, encoded: list[EncodedArrays]) -> Mapping[str, Any] | LeftOut:
        prompt, answers, origin = example.prompt, _judged(example), example.origin
        _refuse_untrained(encoded, origin)
        longest = max(len(answer.tokens) for answer in encoded)
        is_cut = longest > self.max_length
        if is_cut:
            shorter = self._shortened(prompt, answers, origin)
            if shorter is None:
                return LeftOut(TOO_LONG, str(origin), longest)
            prompt = shorter
            encoded = list(self._encode((prompt, answer) for answer in answers))
            _refuse_untrained(encoded, origin)
        if len(encoded) == 2 and np.array_equal(encoded[0].tokens, encoded[1].tokens):
            return LeftOut(IDENTICAL, str(example.origin))
        return {
            "tokens": [answer.tokens for answer in encoded],
            "counted": [answer.assistant_mask for answer in encoded],
            "is_good": [example.is_good] if isinstance(example, Thumb) else [True, False],
            "prompt_key": prompt_key(example),
            "prompt": messages_as_text(prompt),
            "is_cut": int(is_cut),
        }

    def _shortened(self, prompt: Messages, answers: tuple[Messages, ...], origin: Origin) -> Messages | None:
        if self.too_long != "cut":
            return None
        tokenizer = self.tokenise.tokenizer
        return prompt_before(tokenizer, prompt, list(answers), max_length=self.max_length, origin=origin)

    def _encode(self, texts: Iterable[tuple[Messages, Messages]]) -> Iterator[EncodedArrays]:
        return encode_conversations(self.tokenise, [(prompt + answer, len(prompt)) for prompt, answer in texts])


def _judged(example: Pair | Thumb) -> tuple[Messages, ...]:
    return (example.answer,) if isinstance(example, Thumb) else (example.chosen, example.rejected)


def _refuse_untrained(encoded: Iterable[EncodedArrays], origin: Origin) -> None:
    if not all(answer.assistant_mask[1:].any() for answer in encoded):
        raise DataError(f"{origin}: an answer has no token of the assistant's, so there is nothing to learn from it")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEncoder:
    """Prompts up to where the answer starts."""

    tokenise: TextTokenizer

    columns: ClassVar[Columns] = {"tokens": "tokens"}

    def __call__(self, examples: Sequence[Prompt]) -> list[Mapping[str, Any]]:
        texts = [render(self.tokenise.tokenizer, example.prompt, add_generation_prompt=True) for example in examples]
        return [{"tokens": tokenised.tokens} for tokenised in self.tokenise.many(texts)]
