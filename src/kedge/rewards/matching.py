"""Regular expressions with a time limit for each text: they run in a child process, where they can be interrupted.

Python's engine backtracks, and an answer that takes exponential time is easy to write, for people and for policies.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kedge.rewards.sandbox import Job, Limits, run

_CODE = """
import json, re, signal, sys

class Late(Exception):
    pass

def late(*_):
    raise Late

signal.signal(signal.SIGALRM, late)
order = json.load(sys.stdin)
pattern, group = re.compile(order["pattern"]), order["group"]
for text in order["texts"]:
    said = {"failure": f"the pattern took longer than {order['timeout_s']:g} s"}
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
        said = {"text": match and match.group(group)}
    except Late:
        pass
    print(json.dumps(said))
"""


@dataclass(frozen=True, slots=True)
class Found:
    """`text` is None where there is no match; `failure` says why nobody knows."""

    text: str | None
    failure: str = ""


def find_all(
    pattern: str,
    texts: Sequence[str],
    *,
    group: int = 0,
    must: Literal["last", "contain", "be"] = "last",
    timeout_s: float,
) -> list[Found]:
    """A group of the last match, of the first one (`contain`), or of the match of a whole text (`be`).

    >>> find_all(r"x=(\\d)", ["x=1, x=2", "none"], group=1, timeout_s=1.0)
    [Found(text='2', failure=''), Found(text=None, failure='')]
    """
    if not texts:
        return []
    order = {"pattern": pattern, "group": group, "must": must, "timeout_s": timeout_s, "texts": list(texts)}
    longest_s = 30 + timeout_s * len(texts)
    room = sum(map(len, texts)) * 12 + 200 * len(texts)  # a character is at most 12 bytes of escaped JSON
    # The code is ours and opens nothing: it may run where the network cannot be cut.
    limits = Limits(wall_s=longest_s, cpu_s=int(longest_s) + 1, memory_mb=1024, output_bytes=room, network="allowed")
    outcome = run(Job(code=_CODE, stdin=json.dumps(order)), limits)
    lines = outcome.stdout.splitlines()
    if outcome.ending != "done" or len(lines) != len(texts):
        return [Found(None, f"the pattern could not be tried: {outcome.detail}")] * len(texts)
    said = [json.loads(line) for line in lines]
    return [Found(one.get("text"), one.get("failure", "")) for one in said]
