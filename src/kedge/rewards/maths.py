"""Mathematical equivalence through `math-verify`, in a child process with limits.

math-verify parses with sympy, which evaluates what it reads and may take for ever; one child serves a batch.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence

from kedge.core.answers import Answer
from kedge.core.errors import PluginError
from kedge.rewards.context import RewardContext
from kedge.rewards.extraction import extract_all
from kedge.rewards.failures import ScoreResult, Source, needs_solution, unscored
from kedge.rewards.sandbox import Job, Limits, run
from kedge.rewards.settings import MathSource

Verify = Callable[[Sequence[tuple[str, str]], float], list[bool | None]]
"""From (solution, answer) pairs and seconds for each to whether they are equal; None where that is not known."""

_CODE = """
import json, sys
from math_verify import parse, verify

order = json.load(sys.stdin)
limit = max(1, round(order["timeout_s"]))
for solution, answer in order["pairs"]:
    try:
        gold, parsed = (parse(text, parsing_timeout=limit) for text in (solution, answer))
        is_equal = verify(gold, parsed, timeout_seconds=limit) if gold else None
    except Exception:
        is_equal = None
    print(json.dumps(is_equal), flush=True)
"""


def make(settings: MathSource, context: RewardContext) -> Source:
    if importlib.util.find_spec("math_verify") is None:
        raise PluginError("reward 'math' needs 'math_verify': pip install 'kedge[math]'")
    return source(settings, verify_in_child)


def source(settings: MathSource, verify: Verify) -> Source:
    """The source over any verifier."""

    def judge(answers: Sequence[Answer], solutions: list[str]) -> list[ScoreResult]:
        parts = extract_all([answer.text for answer in answers], settings.extract)
        rows = [row for row, part in enumerate(parts) if part.text is not None]
        pairs = [(solutions[row], parts[row].text or "") for row in rows]
        is_equal = dict(zip(rows, verify(pairs, settings.timeout_s) if pairs else [], strict=True))
        return [_result(part.failure, is_equal.get(row, False)) for row, part in enumerate(parts)]

    return needs_solution(judge)


def _result(failure: str, is_right: bool | None) -> ScoreResult:
    if failure or is_right is None:
        return unscored(failure or "math-verify could not compare the answer with the solution")
    return ScoreResult(float(is_right))


def verify_in_child(pairs: Sequence[tuple[str, str]], timeout_s: float) -> list[bool | None]:
    order = {"pairs": list(pairs), "timeout_s": timeout_s}
    longest_s = 60 + 3 * timeout_s * len(pairs)
    limits = Limits(
        wall_s=longest_s, cpu_s=int(longest_s) + 1, memory_mb=4096, output_bytes=16 * len(pairs) + 64, isolation="any"
    )
    outcome = run(Job(code=_CODE, stdin=json.dumps(order), uses_packages=True), limits)
    replies: list[bool | None] = [json.loads(line) for line in outcome.stdout.splitlines()]
    return [*replies, *[None] * (len(pairs) - len(replies))]
