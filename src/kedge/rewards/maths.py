"""Mathematical equivalence through `math-verify`, in a child process with limits.

math-verify parses with sympy, which evaluates what it reads and may take for ever; one child serves a batch.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence

from kedge.core.answers import Answer
from kedge.core.errors import PluginError
from kedge.rewards.context import Context
from kedge.rewards.extract import extract_all
from kedge.rewards.sandbox import Job, Limits, run
from kedge.rewards.settings import MathSource
from kedge.rewards.verdicts import Source, Verdict, needs_solution, unscored

Verify = Callable[[Sequence[tuple[str, str]], float], list[bool | None]]
"""(solution, answer) pairs and seconds for each; None where it could not tell."""

_CODE = """
import json, sys
from math_verify import parse, verify

order = json.load(sys.stdin)
limit = max(1, round(order["timeout_s"]))
for solution, answer in order["pairs"]:
    try:
        gold, found = (parse(text, parsing_timeout=limit) for text in (solution, answer))
        said = verify(gold, found, timeout_seconds=limit) if gold else None
    except Exception:
        said = None
    print(json.dumps(said), flush=True)
"""


def make(settings: MathSource, context: Context) -> Source:
    if importlib.util.find_spec("math_verify") is None:
        raise PluginError("reward 'math' needs 'math_verify': pip install 'kedge[math]'")
    return source(settings, verify_in_child)


def source(settings: MathSource, verify: Verify) -> Source:
    """The source over any verifier."""

    def judge(answers: Sequence[Answer], solutions: list[str]) -> list[Verdict]:
        found = extract_all([answer.text for answer in answers], settings.extract)
        rows = [index for index, one in enumerate(found) if one.text is not None]
        pairs = [(solutions[index], found[index].text or "") for index in rows]
        said = dict(zip(rows, verify(pairs, settings.timeout_s) if pairs else [], strict=True))
        return [_verdict(one.failure, said.get(index, False)) for index, one in enumerate(found)]

    return needs_solution(judge)


def _verdict(failure: str, is_right: bool | None) -> Verdict:
    if failure or is_right is None:
        return unscored(failure or "math-verify could not compare the answer with the solution")
    return Verdict(float(is_right))


def verify_in_child(pairs: Sequence[tuple[str, str]], timeout_s: float) -> list[bool | None]:
    order = {"pairs": list(pairs), "timeout_s": timeout_s}
    longest_s = 60 + 3 * timeout_s * len(pairs)
    limits = Limits(wall_s=longest_s, cpu_s=int(longest_s) + 1, memory_mb=4096, output_bytes=16 * len(pairs) + 64)
    outcome = run(Job(code=_CODE, stdin=json.dumps(order), uses_packages=True), limits)
    said: list[bool | None] = [json.loads(line) for line in outcome.stdout.splitlines()]
    return [*said, *[None] * (len(pairs) - len(said))]
