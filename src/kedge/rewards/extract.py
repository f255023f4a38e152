"""The part of an answer that counts: \\boxed{…}, what follows ####, the last line, a fenced block, a pattern."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kedge.rewards.matching import Found, find_all
from kedge.rewards.settings import Extract, Named, Pattern

_FENCE = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)


def extract(text: str, how: Named) -> str | None:
    """The part, without white space around it; None where the answer has no such part.

    >>> extract("So it is \\\\boxed{\\\\frac{1}{2}}.", "boxed")
    '\\\\frac{1}{2}'
    >>> extract("6 x 7 = 42\\n#### 42\\n", "hashes")
    '42'
    >>> extract("No mark", "hashes") is None
    True
    """
    match how:
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


def extract_all(texts: Sequence[str], how: Extract) -> list[Found]:
    """The same for many texts; a pattern runs in a child process, because some take for ever on some texts."""
    if isinstance(how, Pattern):
        return find_all(how.pattern, texts, group=how.group, timeout_s=1.0)
    return [Found(extract(text, how)) for text in texts]


def _boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for place in range(begin, len(text)):
        if text[place] == "}" and depth == 0:
            return text[begin:place].strip()
        depth += {"{": 1, "}": -1}.get(text[place], 0)
    return None
