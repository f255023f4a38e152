"""Conversations as a reader sees them: the marks of a chat template become turns with the name of who speaks.

Known marks are those of ChatML, Llama 2 and 3, Gemma, Zephyr and their like. A mark in the middle of an answer was
written by the model: it is shown, in brackets of its own, because it says that the model plays both sides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

ROLES = ("system", "developer", "user", "assistant", "tool", "model", "human", "gpt")
_ROLE = "|".join(ROLES)
_OPENINGS = re.compile(
    rf"""<\|im_start\|>\s*(?P<chatml>{_ROLE})[ \t]*\n?
    | <\|start_header_id\|>\s*(?P<llama3>{_ROLE})\s*<\|end_header_id\|>\s*
    | <start_of_turn>\s*(?P<gemma>{_ROLE})[ \t]*\n?
    | <\|(?P<zephyr>{_ROLE})\|>[ \t]*\n?
    | (?P<inst>\[INST\])[ ]?
    | (?P<answer>\[/INST\])[ ]?""",
    re.VERBOSE,
)
_MARK = re.compile(r"<\|[^|<>\s]{1,40}\|>|<(?:start|end)_of_turn>|</?s>|<(?:bos|eos|pad)>|\[/?INST\]|<</?SYS>>")
_ENDINGS = re.compile(rf"(?:\s*(?:{_MARK.pattern}))+\s*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """`role` is empty where a text does not say who speaks."""

    role: str
    text: str


def turns(text: str) -> tuple[Turn, ...]:
    """The turns of a prompt, without the empty one that asks for an answer.

    >>> for turn in turns("<|im_start|>user\\nHow much?<|im_end|>\\n<|im_start|>assistant\\n"):
    ...     print(turn.role, "|", turn.text)
    user | How much?
    >>> turns("<s>[INST] Hello [/INST] Good day</s>")
    (Turn(role='user', text='Hello'), Turn(role='assistant', text='Good day'))
    >>> turns("plain text")
    (Turn(role='', text='plain text'),)
    """
    openings = list(_OPENINGS.finditer(text))
    starts = [0, *(opening.end() for opening in openings)]
    ends = [*(opening.start() for opening in openings), len(text)]
    roles = ["", *(_role(opening) for opening in openings)]
    parts = [
        Turn(role=role, text=answer_text(text[start:end]).strip())
        for role, start, end in zip(roles, starts, ends, strict=True)
    ]
    return tuple(turn for turn in parts if turn.text)


def named_turns(text: str, names: Sequence[str] = ROLES) -> tuple[Turn, ...]:
    """The turns of a text whose parts begin with `NAME: `, each on a line of its own. Marks of a template inside a part
    begin turns of their own.

    >>> named_turns("system: Be kind.\\nuser: <|im_start|>user\\nHow much?<|im_end|>")
    (Turn(role='system', text='Be kind.'), Turn(role='user', text='How much?'))
    >>> [turn.role for turn in named_turns("chosen: <|im_start|>assistant\\nTen", ["chosen"])]
    ['chosen', 'assistant']
    """
    openings = list(re.finditer(rf"^({'|'.join(map(re.escape, names))}):[ ]", text, re.MULTILINE))
    starts = [0, *(opening.end() for opening in openings)]
    ends = [*(opening.start() for opening in openings), len(text)]
    parts: list[Turn] = []
    for name, start, end in zip(["", *(opening[1] for opening in openings)], starts, ends, strict=True):
        inner = turns(text[start:end])
        if inner and not inner[0].role:
            inner = (Turn(role=name, text=inner[0].text), *inner[1:])
        elif name and name not in ROLES:  # who speaks is said by the marks, which part it is only by its name
            inner = (Turn(role=name, text=""), *inner)
        parts += inner
    return tuple(parts)


def has_marks(text: str) -> bool:
    """Whether a text holds marks of a chat template.

    >>> has_marks("Ten.<|im_end|>"), has_marks("a <b> c")
    (True, False)
    """
    return _MARK.search(text) is not None


def answer_text(text: str) -> str:
    """An answer without the marks that end it; marks in its middle in brackets that no template has.

    >>> answer_text("Ten euro.<|im_end|>"), answer_text("Ten.<|im_end|>\\n<|im_start|>user\\nThanks")
    ('Ten euro.', 'Ten.⟨im_end⟩\\n⟨im_start⟩user\\nThanks')
    """
    without_end = _ENDINGS.sub("", text)
    return _MARK.sub(lambda mark: f"⟨{mark.group().strip('<|>[]')}⟩", without_end)


def _role(opening: re.Match[str]) -> str:
    names = {"inst": "user", "answer": "assistant"}
    return names.get(opening.lastgroup or "", opening.group(opening.lastgroup or 0))


def in_one_line(text: str) -> str:
    """A prompt as one line, for a terminal.

    >>> in_one_line("<|im_start|>system\\nBe kind.<|im_end|>\\n<|im_start|>user\\nHow  much?<|im_end|>")
    'system: Be kind. user: How much?'
    """
    lines = (f"{turn.role}: {turn.text}" if turn.role else turn.text for turn in turns(text))
    return " ".join(" ".join(lines).split())
