"""Verdicts of a chat as data: thumbs on answers of one model, pairs of the answers of two, a line each, never lost.

The files are those that `kedge data` checks and stages read; a line is written and flushed as it is given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from kedge.core.errors import ConfigError
from kedge.core.files import append_line
from kedge.data.examples import Kind, Messages
from kedge.data.kinds import kind_of
from kedge.data.reading import read

Kinds = Literal["thumbs", "pairs"]


class VerdictFile:
    """A file of thumbs or of pairs that grows by a line a verdict."""

    def __init__(self, path: Path, kind: Kinds) -> None:
        if path.suffix != ".jsonl":
            raise ConfigError(f"--feedback {path}: the name must end in .jsonl")
        if path.is_dir():
            raise ConfigError(f"--feedback {path}: a folder; name a file")
        if path.is_file() and path.stat().st_size:
            held: Kind = kind_of(next(iter(read(str(path), max_broken=0.0))))
            if held != kind:
                raise ConfigError(
                    f"--feedback {path}: holds {held}, and this chat writes {kind}; give another file (one model gives "
                    "thumbs, two give pairs)"
                )
        self.path, self.kind, self.count = path, kind, 0

    def add(self, row: Mapping[str, Any]) -> None:
        append_line(self.path, json.dumps(row, ensure_ascii=False))
        self.count += 1


def plain(messages: Messages) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def thumb_row(prompt: Messages, answer: str, *, is_good: bool, facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt": plain(prompt), "completion": answer, "label": is_good, **facts}


def pair_row(
    prompt: Messages, answers: tuple[str, str], *, better: int | None, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """`better` is 0 for the left answer, 1 for the right one, None for a tie, which is a pair without a direction."""
    chosen = better or 0
    tie = {"certainty": 0.5} if better is None else {}
    return {"prompt": plain(prompt), "chosen": answers[chosen], "rejected": answers[1 - chosen], **tie, **facts}


def conversation_row(messages: Messages, facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"messages": plain(messages), **facts}
