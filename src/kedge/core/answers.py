"""An answer as text: what reward sources that read text are given, and judges, and people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`prompt` is the conversation so far as (role, content); `solution` is the checkable answer where one is known."""

    prompt: tuple[tuple[str, str], ...]
    text: str
    is_finished: bool
    """False where the answer was cut off at the length limit."""
    solution: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


class TextSource(Protocol):
    """Scores answers as text, in their order. NaN marks a row that it could not score; it never drops one."""

    def score(self, answers: Sequence[Answer]) -> list[float]: ...
