"""From sampled tokens to answers as text, and from sources that read text to scores of rollouts.

Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kedge.core.answers import Answer, TextSource
from kedge.core.records import Rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecord:
    """A prompt as its data file has it: the conversation, the known solution, and the other fields of its row."""

    prompt: tuple[tuple[str, str], ...]
    solution: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


def answers_of(
    rollouts: Rollouts, *, prompt_of: Callable[[int], PromptRecord], decode: Callable[[Sequence[int]], str]
) -> list[Answer]:
    """The answers as text. `prompt_of` gives a group's prompt; the token that ended an answer is not in its text."""
    rows = zip(
        rollouts.tokens_BT.tolist(),
        rollouts.response_mask_BT.tolist(),
        rollouts.group_B.tolist(),
        rollouts.finished_B.tolist(),
        strict=True,
    )
    answers: list[Answer] = []
    for tokens, is_sampled, group, is_finished in rows:
        sampled = [token for token, counts in zip(tokens, is_sampled, strict=True) if counts]
        record = prompt_of(group)
        answers.append(
            Answer(
                prompt=record.prompt,
                text=decode(sampled[:-1] if is_finished else sampled),
                is_finished=is_finished,
                solution=record.solution,
                extra=record.extra,
            )
        )
    return answers


class FromText:
    """Scores rollouts with a source that reads text."""

    def __init__(self, source: TextSource, read: Callable[[Rollouts], list[Answer]]) -> None:
        self._source = source
        self._read = read

    def score(self, rollouts: Rollouts) -> Tensor:
        scores = self._source.score(self._read(rollouts))
        return torch.tensor(scores, dtype=torch.float32, device=rollouts.tokens_BT.device)
