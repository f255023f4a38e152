"""The examples of data files once they are read: one frozen record per kind, all text.

Every record knows its origin (file and line) and keeps in `extra` the fields that Kedge does not read, so that a
conversion loses nothing. Tokens come later (`kedge.data.tokenizer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["pairs", "rankings", "thumbs", "demonstrations", "prompts"]
Role = Literal["system", "developer", "user", "assistant", "tool", "text"]
"""`text` is text that no chat template touches: a whole document to learn."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `detail` has what a chat template reads besides: tool calls, the name of a tool, and on the first
    message the `tools` of the conversation. A turn of the assistant that is not `is_trained` is only context."""

    role: Role
    content: str
    is_trained: bool = field(default=True, repr=False)
    detail: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)


Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an example came from. `line` counts from 1; for formats without lines it is the row number."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One preference: `chosen` over `rejected` as answers to `prompt`. Answers are the messages after the prompt."""

    prompt: Messages
    chosen: Messages
    rejected: Messages
    margin: float | None = None
    certainty: float | None = None
    """The probability that `chosen` is the better one, from 0 to 1."""
    origin: Origin
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def is_tie(self) -> bool:
        """Whether neither answer is the better one: people said so, or are of two minds."""
        return self.certainty == 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """K answers to one prompt; `rank[i]` is the place of `answers[i]`, 1 is best, equal numbers are ties."""

    prompt: Messages
    answers: tuple[Messages, ...]
    rank: tuple[int, ...]
    origin: Origin
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Thumb:
    """One answer that somebody liked or did not."""

    prompt: Messages
    answer: Messages
    is_good: bool
    origin: Origin
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A conversation to imitate; it ends with an assistant message."""

    messages: Messages
    origin: Origin
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt to answer; `answer` is the checkable solution where one is known."""

    prompt: Messages
    answer: str | None = None
    origin: Origin
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


Example = Pair | Ranking | Thumb | Demonstration | Prompt


def prompt_of(example: Example) -> Messages:
    """The part that is given to the model: splits, leakage checks and duplicates of prompts go by it.

    For a demonstration that is everything before its last message; for plain text, the text itself.
    """
    match example:
        case Demonstration(messages=messages):
            return messages[:-1] or messages
        case Pair() | Ranking() | Thumb() | Prompt():
            return example.prompt


def answers_of(example: Example) -> tuple[Messages, ...]:
    """The answers that an example holds, in the order of its file; a prompt has none."""
    match example:
        case Pair():
            return example.chosen, example.rejected
        case Ranking():
            return example.answers
        case Thumb():
            return (example.answer,)
        case Demonstration():
            return (example.messages[-1:],)
        case Prompt():
            return ()


def text_of(messages: Messages) -> str:
    """Messages as one plain string, for hashing, counting and showing; never for training."""
    return "\n".join(f"{message.role}: {message.content}" for message in messages)
