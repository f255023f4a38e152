"""What an exam is: a name, its metrics, and a dialogue of questions and replies that ends with scores.

An exam never sees a model. `take` is a generator: it yields questions, is sent one reply to each in the same order, may
ask more that depend on them, and returns its scores. So the same exam runs on any engine, and in a test on none.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kedge.evaluate.detectors import Detector

Template = Literal["chat", "plain"]
"""How questions are written: with the chat template of the model, or as plain text."""
Turns = tuple[tuple[str, str], ...]
"""A conversation, (role, content) a turn, that ends before the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceQuestion:
    """How likely is each of these continuations?"""

    item: str
    turns: Turns
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenQuestion:
    """Write answers: one by the likeliest token each time, or several at a temperature."""

    item: str
    turns: Turns
    max_new_tokens: int = 256
    answers: int = 1
    temperature: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramQuestion:
    """Does this program end without an error? It runs in the sandbox, never here."""

    item: str
    program: str
    seconds: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreQuestion:
    """How good is each of these answers? Only reward models are asked."""

    item: str
    turns: Turns
    answers: tuple[str, ...]


Question = ChoiceQuestion | OpenQuestion | ProgramQuestion | ScoreQuestion


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceReply:
    logprobs: tuple[float, ...]
    """The sum over the tokens of each choice, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenReply:
    texts: tuple[str, ...]
    is_finished: tuple[bool, ...]
    """False where the answer reached its longest length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramReply:
    passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreReply:
    scores: tuple[float, ...]


Reply = ChoiceReply | OpenReply | ProgramReply | ScoreReply


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One item by one metric. A metric that does not apply to an item has no score for it."""

    item: str
    metric: str
    score: float
    """From 0 to 1 wherever a metric is a share; finite."""
    answer: str
    """The answer as text: what was written, or the choice that was likeliest."""
    cluster: str = ""
    """What items are not independent of: a passage, a template's prompt. Empty: the item stands alone."""
    groups: Mapping[str, str] = field(default_factory=dict[str, str])
    """Fields of the item that results are told by: subject, category, language."""
    confidence: float | None = None
    """The probability that the model gave to its answer among the choices, where there are choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    better: Literal["more", "less"]
    summary: str
    """One line: what the number counts."""
    detector: Detector | None = None
    """What the cases were told by, where that makes mistakes: a share is told as corrected for them too."""
    counts_detected: bool = True
    """Whether the number is the share that the detector finds, or of what it does not find."""


Dialogue = Generator[Sequence[Question], Sequence[Reply], list[Score]]


class Exam(Protocol):
    """`metrics` by name; the first is the main one, which the exam's own name means in a rule (`mmlu: 0.01`)."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def licence(self) -> str: ...

    @property
    def metrics(self) -> Mapping[str, Metric]: ...

    @property
    def items_hash(self) -> str:
        """Of everything that is asked and how it is graded: equal hashes, comparable numbers."""
        ...

    def take(self, seed: int) -> Dialogue: ...
