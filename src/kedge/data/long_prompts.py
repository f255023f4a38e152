"""Prompts and conversations that are longer than a stage allows: refused with their places, left out, or cut.

The one place for this rule: every stage that asks prompts or learns from conversations, and `kedge check`, go through
it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.core.errors import DataError
from kedge.core.stage import TooLong
from kedge.data.encoding.store import LazyRows
from kedge.data.examples import Message, Messages, Origin, Prompt
from kedge.data.template import encode_conversation, encode_prompt
from kedge.data.tokenizer import tokens_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NAMED = 3
"""Places of long prompts that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPrompts:
    """The prompts that are asked, with their tokens; `long` were over the limit before they were left out or cut."""

    prompts: list[Prompt]
    tokens: Sequence[Sequence[int]]
    long: LongPrompts


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPrompts:
    """The prompts over a limit, as place and length, and how many prompts there are in all."""

    places: tuple[tuple[str, int], ...]
    total: int
    limit: int
    limit_name: str = "max_prompt_tokens"
    noun: str = "prompt"

    def __bool__(self) -> bool:
        return bool(self.places)

    def in_words(self) -> str:
        """
        >>> LongPrompts(places=(("a.jsonl:3", 700), ("a.jsonl:9", 600)), total=50, limit=512).in_words()
        '2 of 50 prompts are longer than max_prompt_tokens 512; the longest has 700 (a.jsonl:3); also a.jsonl:9 (600)'
        """
        ranked = sorted(self.places, key=lambda place: -place[1])
        nouns = self.noun if self.total == 1 else f"{self.noun}s"
        verb = f"{nouns} {'is' if len(ranked) == 1 else 'are'}"
        (where, longest), others = ranked[0], ranked[1:_NAMED]
        also = "; also " + ", ".join(f"{place} ({length:,})" for place, length in others) if others else ""
        return (
            f"{len(ranked):,} of {self.total:,} {verb} longer than {self.limit_name} {self.limit:,}; the longest has "
            f"{longest:,} ({where}){also}"
        )

    @property
    def fix(self) -> str:
        longest = max(length for _, length in self.places)
        is_setting = self.limit_name in ("max_prompt_tokens", "max_length")
        larger = f"raise it to {longest:,}" if is_setting else "allow shorter answers"
        return f"{larger}, shorten the {self.noun}s, or set too_long: drop (or cut)"


def tighter_limit(window: int | None, max_prompt_tokens: int | None, max_new_tokens: int) -> tuple[int, str]:
    """The most tokens that a prompt may have so that an answer fits behind it, and what sets this limit.

    >>> tighter_limit(1024, 512, 256), tighter_limit(512, 512, 256)
    ((512, 'max_prompt_tokens'), (256, 'the window of 512 less max_new_tokens 256, that is'))
    """
    room = None if window is None else window - max_new_tokens
    if max_prompt_tokens is not None and (room is None or max_prompt_tokens <= room):
        return max_prompt_tokens, "max_prompt_tokens"
    if room is None:
        return sys.maxsize, "max_prompt_tokens"
    return room, f"the window of {window:,} less max_new_tokens {max_new_tokens:,}, that is"


def place_of(origin: Origin) -> str:
    return f"{Path(origin.file).name}:{origin.line}"


def measure_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    limit_name: str = "max_prompt_tokens",
    tokens: Sequence[Sequence[int]] | None = None,
) -> tuple[Sequence[Sequence[int]], LongPrompts]:
    """The tokens of each prompt, and which prompts are over the limit; `tokens` where they are known already."""
    tokens = [encode_prompt(tokenizer, prompt.prompt) for prompt in prompts] if tokens is None else tokens
    places = tuple(
        (place_of(prompt.origin), len(row))
        for prompt, row in zip(prompts, tokens, strict=True)
        if len(row) > max_tokens
    )
    return tokens, LongPrompts(places=places, total=len(prompts), limit=max_tokens, limit_name=limit_name)


def fit_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    source: str,
    max_tokens: int,
    too_long: TooLong,
    limit_name: str = "max_prompt_tokens",
    tokens: Sequence[Sequence[int]] | None = None,
) -> FittedPrompts:
    """The prompts of `source` as they are asked: none of them has more than `max_tokens` tokens.

    `refuse` raises where one is longer; `drop` leaves it out; `cut` takes its beginning away (`cut_prompt`). `tokens`
    are those of the prompts where they are known already.
    """
    tokens, long = measure_prompts(tokenizer, prompts, max_tokens=max_tokens, limit_name=limit_name, tokens=tokens)
    if not long:
        return FittedPrompts(prompts=list(prompts), tokens=tokens, long=long)
    if too_long == "refuse":
        raise DataError(f"{source}: {long.in_words()}: {long.fix}")
    if too_long == "drop":
        places = [place for place, row in enumerate(tokens) if len(row) <= max_tokens]
        if not places:
            raise DataError(f"{source}: {long.in_words()}, and too_long: drop leaves none: {long.fix}")
        short = LazyRows(tokens.__getitem__, places)
        return FittedPrompts(prompts=[prompts[place] for place in places], tokens=short, long=long)
    cut = {
        place: replace(prompt, prompt=cut_prompt(tokenizer, prompt, max_tokens=max_tokens, limit_name=limit_name))
        for place, (prompt, row) in enumerate(zip(prompts, tokens, strict=True))
        if len(row) > max_tokens
    }
    cut_tokens = {place: encode_prompt(tokenizer, prompt.prompt) for place, prompt in cut.items()}
    return FittedPrompts(
        prompts=[cut.get(place, prompt) for place, prompt in enumerate(prompts)],
        tokens=LazyRows(lambda place: cut_tokens.get(place) or tokens[place], range(len(prompts))),
        long=long,
    )


def cut_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, *, max_tokens: int, limit_name: str = "max_prompt_tokens"
) -> Messages:
    """The conversation without its beginning: its oldest turns go first, then the beginning of its last message.

    System messages stay, and what is left begins with a turn of the user. The reward reads what the policy read.
    """
    system = tuple(message for message in prompt.prompt if message.role == "system")
    turns = [message for message in prompt.prompt if message.role != "system"]
    while len(turns) > 1:
        del turns[0]
        while len(turns) > 1 and turns[0].role != "user":
            del turns[0]
        if len(encode_prompt(tokenizer, (*system, *turns))) <= max_tokens:
            return (*system, *turns)
    kept = tokens_of(tokenizer, turns[-1].content) if turns else []
    while kept:
        excess = len(encode_prompt(tokenizer, (*system, *_ending(tokenizer, turns[-1], kept)))) - max_tokens
        if excess <= 0:
            return (*system, *_ending(tokenizer, turns[-1], kept))
        kept = kept[excess:]
    raise DataError(
        f"{prompt.origin}: too_long: cut cannot make this prompt fit: without its last message the system message and "
        f"the template alone are longer than {limit_name} {max_tokens:,}; raise it, or set too_long: drop"
    )


def prompt_before(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Messages,
    answers: Sequence[Messages],
    *,
    max_length: int,
    origin: Origin,
) -> Messages | None:
    """The prompt without its beginning (`cut_prompt`), so that each of the answers fits behind it.

    None where an answer alone is too long.
    """
    opening = len(encode_prompt(tokenizer, prompt))
    longest = max(len(encode_conversation(tokenizer, prompt + answer).tokens) - opening for answer in answers)
    whole = Prompt(prompt=prompt, answer=None, origin=origin, extra={})
    try:
        shorter = cut_prompt(tokenizer, whole, max_tokens=max_length - longest, limit_name="max_length")
    except DataError:
        return None
    fits = all(len(encode_conversation(tokenizer, shorter + answer).tokens) <= max_length for answer in answers)
    return shorter if fits else None


def _ending(tokenizer: PreTrainedTokenizerBase, message: Message, tokens: Sequence[int]) -> Messages:
    """The message with the text of these of its tokens; half a character at the cut is left out."""
    text = str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return (Message(message.role, text.lstrip("\ufffd")),)
