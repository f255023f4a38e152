"""The part of an answer that counts: \\boxed{…}, what follows ####, the last line, a fenced block, a pattern.

Patterns have a time limit for each text, which the package `regex` keeps: an engine that backtracks takes exponential
time on texts that are easy to write, for people and for policies.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import regex

from kedge.rewards.settings import Extract, NamedPart, Pattern

_FENCE = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Extracted:
    """`text` is None where the answer has no such part; `failure` says why that could not be found out."""

    text: str | None
    failure: str = ""


def extract(text: str, part: NamedPart) -> str | None:
    """The part, without white space around it; None where the answer has no such part.

    >>> extract("So it is \\\\boxed{\\\\frac{1}{2}}.", "boxed")
    '\\\\frac{1}{2}'
    >>> extract("6 x 7 = 42\\n#### 42\\n", "hashes")
    '42'
    >>> extract("No mark", "hashes") is None
    True
    """
    match part:
        case "whole":
            return text.strip()
        case "boxed":
            return _boxed(text)
        case "hashes":
            _, mark, rest = text.rpartition("####")
            return rest.strip().split("\n")[0].strip() if mark else None
        case "last_line":
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            return lines[-1] if lines else None
        case "fenced":
            blocks = _FENCE.findall(text)
            return blocks[-1].strip("\n") if blocks else None


def extract_all(texts: Sequence[str], part: Extract) -> list[Extracted]:
    """The part of each text."""
    if isinstance(part, Pattern):
        return match_all(part.pattern, texts, group=part.group, timeout_s=1.0)
    return [Extracted(extract(text, part)) for text in texts]


def match_all(
    pattern: str,
    texts: Sequence[str],
    *,
    group: int = 0,
    must: Literal["last", "contain", "be"] = "last",
    timeout_s: float,
) -> list[Extracted]:
    """A group of the last match, of the first one (`contain`), or of the match of a whole text (`be`).

    >>> match_all(r"x=(\\d)", ["x=1, x=2", "none"], group=1, timeout_s=1.0)
    [Extracted(text='2', failure=''), Extracted(text=None, failure='')]
    """
    compiled = regex.compile(pattern)
    return [_matched(compiled, text, group=group, must=must, timeout_s=timeout_s) for text in texts]


def _matched(
    pattern: regex.Pattern[str], text: str, *, group: int, must: Literal["last", "contain", "be"], timeout_s: float
) -> Extracted:
    try:
        match must:
            case "be":
                match = pattern.fullmatch(text, timeout=timeout_s)
            case "contain":
                match = pattern.search(text, timeout=timeout_s)
            case "last":
                match = next(iter(deque(pattern.finditer(text, timeout=timeout_s), maxlen=1)), None)
    except TimeoutError:
        return Extracted(None, f"the pattern took longer than {timeout_s:g} s")
    return Extracted(match and match.group(group))


def _boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for index in range(begin, len(text)):
        if text[index] == "}" and depth == 0:
            return text[begin:index].strip()
        depth += {"{": 1, "}": -1}.get(text[index], 0)
    return None
