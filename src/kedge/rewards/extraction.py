"""The part of an answer that counts: \\boxed{…}, what follows ####, the last line, a fenced block, a pattern.

Patterns run in a child process with a time limit for each text: Python's engine backtracks, and an answer that takes
exponential time is easy to write, for people and for policies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kedge.rewards.sandbox import Job, Limits, run
from kedge.rewards.settings import Extract, NamedPart, Pattern

_FENCE = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)

_MATCHING_CODE = """
import json, re, signal, sys

class Late(Exception):
    pass

def late(*_):
    raise Late

signal.signal(signal.SIGALRM, late)
order = json.load(sys.stdin)
pattern, group = re.compile(order["pattern"]), order["group"]
for text in order["texts"]:
    reply = {"failure": f"the pattern took longer than {order['timeout_s']:g} s"}
    try:
        signal.setitimer(signal.ITIMER_REAL, order["timeout_s"])
        if order["must"] == "be":
            match = pattern.fullmatch(text)
        else:
            match = None
            for match in pattern.finditer(text):
                if order["must"] == "contain":
                    break
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply = {"text": match and match.group(group)}
    except Late:
        pass
    print(json.dumps(reply))
"""


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
    if not texts:
        return []
    order = {"pattern": pattern, "group": group, "must": must, "timeout_s": timeout_s, "texts": list(texts)}
    longest_s = 30 + timeout_s * len(texts)
    room = sum(map(len, texts)) * 12 + 200 * len(texts)  # a character is at most 12 bytes of escaped JSON
    # The code is ours: it may run where the walls are weak.
    limits = Limits(wall_s=longest_s, cpu_s=int(longest_s) + 1, memory_mb=1024, output_bytes=room, isolation="any")
    outcome = run(Job(code=_MATCHING_CODE, stdin=json.dumps(order)), limits)
    lines = outcome.stdout.splitlines()
    if outcome.ending != "done" or len(lines) != len(texts):
        return [Extracted(None, f"the pattern could not be tried: {outcome.detail}")] * len(texts)
    replies = [json.loads(line) for line in lines]
    return [Extracted(reply.get("text"), reply.get("failure", "")) for reply in replies]


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
