r"""Transcripts as HH-RLHF writes them (`\n\nHuman: …\n\nAssistant: …`) into messages.

Space around a turn is layout and is dropped. A turn that quotes a marker at the start of a paragraph cannot be
told from two turns.
"""

from __future__ import annotations

import re

from kedge.core.errors import DataError
from kedge.data.examples import Message, Messages, Role

_MARKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_OPENING = re.compile(r"\A\s*Human:")
_ROLES: dict[str, Role] = {"Human": "user", "Assistant": "assistant"}


def is_transcript(value: object) -> bool:
    return isinstance(value, str) and _OPENING.match(value) is not None and "\n\nAssistant:" in value


def turns(text: str) -> Messages:
    r"""
    >>> [message.role for message in turns("\n\nHuman: Hello\n\nAssistant: Hi!")]
    ['user', 'assistant']
    """
    marks = list(_MARKER.finditer(text))
    if not marks or marks[0].start() > 0:
        raise DataError("a transcript must start with 'Human:' or 'Assistant:'")
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return tuple(
        Message(_ROLES[mark[1]], text[mark.end() : end].strip()) for mark, end in zip(marks, ends, strict=True)
    )


def prompt_turns(text: str) -> Messages:
    """The turns of a transcript that is a prompt: it may end with the bare `Assistant:` that asks for an answer."""
    found = turns(text)
    return found[:-1] if len(found) > 1 and found[-1] == Message("assistant", "") else found
