"""A language model that says which of two answers is better, asked in both orders, because judges favour a position.

How it is asked and how its reply is read: `judge_protocol`. A reply that names no winner is unreadable, and is counted
rather than asked for again. What was asked once is not paid for twice, also after a crash: `paid`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kedge.core.errors import RewardError
from kedge.rewards.client import Call, CallFailed
from kedge.rewards.context import RewardContext
from kedge.rewards.judge import read_rubric
from kedge.rewards.judge_protocol import COMPARISON, chat_body, content_of, fence_of, read_winner
from kedge.rewards.paid import PaidCalls
from kedge.rewards.settings import PairwiseJudge

_VARIABLES = ("prompt", "first", "second", "fence")
_WINS = {"a": 1.0, "b": 0.0, "tie": 0.5}
_TOP = 20
"""Alternatives of each token that are asked for: the most that OpenAI's API gives."""
_VERDICT = re.compile(r'(?<!\\)"better"\s*:\s*"')


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoAnswers:
    """Two answers to the same conversation."""

    prompt: tuple[tuple[str, str], ...]
    first: str
    second: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a judge said in one order: how much it prefers the answer that it was shown as A."""

    a: float | None
    """1, 0 (B is better) or 0.5 (a tie); None where its reply names no winner."""
    probability: float | None = None
    """The probability of A, half of that of a tie added, among the three verdicts; None without log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BothOrders:
    """What a judge thinks of the first of two answers, shown as A and shown as B; 1 where it is the better one."""

    as_a: float | None
    as_b: float | None
    probability: float | None = None
    """That the first is better, as the mean of both orders."""
    reason: str = ""
    """Why the judge could not be asked; then both are None."""


class Panelist:
    """One judge, ready to compare. What it replies is kept in `cache`, if that is given."""

    def __init__(
        self, settings: PairwiseJudge, context: RewardContext, *, cache: Path | None = None, ledger: Path | None = None
    ) -> None:
        self.name = settings.label
        self._settings, self._context = settings, context
        self._template = read_rubric(settings.rubric or COMPARISON, variables=_VARIABLES, shows=("first", "second"))
        self.calls = PaidCalls(
            settings,
            cache,
            budget=settings.budget,
            rate=settings.rate,
            seed=context.seed,
            ledger=ledger,
            note=context.note,
        )

    def compare(self, pairs: Sequence[TwoAnswers]) -> list[BothOrders]:
        """What the judge says of each pair. Equal texts are a tie without asking."""
        wanted = [pair for pair in pairs if pair.first != pair.second]
        verdicts = self.calls.ask([call for pair in wanted for call in self._orders(pair)])
        asked = iter(_both(verdicts[at], verdicts[at + 1]) for at in range(0, len(verdicts), 2))
        equal = BothOrders(as_a=0.5, as_b=0.5, probability=0.5 if self._settings.logprobs else None)
        return [equal if pair.first == pair.second else next(asked) for pair in pairs]

    def _orders(self, pair: TwoAnswers) -> list[Call[Verdict]]:
        """The call in each order."""
        more = {"logprobs": True, "top_logprobs": _TOP} if self._settings.logprobs else {}
        calls: list[Call[Verdict]] = []
        for first, second in ((pair.first, pair.second), (pair.second, pair.first)):
            shown = [*(part for message in pair.prompt for part in message), "", first, second]
            fence = fence_of(self._context.seed, shown)
            text = self._template.render(prompt=pair.prompt, first=first, second=second, fence=fence)
            body = chat_body(self._settings, text, **more)
            calls.append(Call(body=body, read=partial(_verdict, fence=fence), keep=partial(_kept, fence=fence)))
        return calls


def refuse_failures(name: str, results: Sequence[BothOrders], *, max_share: float) -> int:
    """How many comparisons could not be asked; more than the share that may fail is an error that says why."""
    failed = [result.reason for result in results if result.reason]
    if len(failed) > max_share * len(results):
        raise RewardError(
            f"judge {name}: {len(failed):,} of {len(results):,} comparisons could not be asked, more than "
            f"{max_share:.0%} (failures.max_share); the first: {failed[0]}. What was answered is kept: run it again, "
            "and only the others are asked"
        )
    return len(failed)


def _kept(reply: Any, *, fence: str) -> dict[str, Any]:
    """The text, and what its log-probabilities come to, which are many times longer."""
    content = content_of(reply)
    return {"content": content, "probability": _probability_of_a(reply, content, fence)}


def _verdict(kept: Any, *, fence: str) -> Verdict:
    try:
        return Verdict(a=_WINS[read_winner(kept["content"], fence=fence)], probability=kept["probability"])
    except ValueError:
        return Verdict(a=None)


def _both(as_a: Verdict | CallFailed, as_b: Verdict | CallFailed) -> BothOrders:
    """From what the first answer won in its own place, and what the second one won there."""
    for result in (as_a, as_b):
        if isinstance(result, CallFailed):
            return BothOrders(as_a=None, as_b=None, reason=str(result))
    assert isinstance(as_a, Verdict)
    assert isinstance(as_b, Verdict)
    probabilities = (as_a.probability, as_b.probability)
    return BothOrders(
        as_a=as_a.a,
        as_b=None if as_b.a is None else 1 - as_b.a,
        probability=None
        if probabilities[0] is None or probabilities[1] is None
        else (probabilities[0] + 1 - probabilities[1]) / 2,
    )


def _probability_of_a(reply: Any, content: str, fence: str) -> float | None:
    try:
        tokens: list[dict[str, Any]] = reply["choices"][0]["logprobs"]["content"]
        return probability_of_a(content, tokens, fence=fence)
    except (KeyError, IndexError, TypeError):
        return None  # the server gives no log-probabilities


def probability_of_a(content: str, tokens: Sequence[dict[str, Any]], *, fence: str) -> float | None:
    """P(A) + ½ P(tie) over P(A) + P(B) + P(tie), from the alternatives of the token in which the verdict begins.

    None where the verdict is not found in the tokens, or none of the alternatives is one.

    >>> verdict = {"token": '"A', "top_logprobs": [{"token": '"A', "logprob": -0.5}, {"token": '"B', "logprob": -1.0}]}
    >>> tokens = [{"token": '{"better": ', "top_logprobs": []}, verdict, {"token": '"}', "top_logprobs": []}]
    >>> round(probability_of_a('{"better": "A"}', tokens, fence="[[f]]"), 4)  # e^-0.5 / (e^-0.5 + e^-1)
    0.6225
    """
    begin = content.rfind(fence) + len(fence) if fence in content else 0
    match = _VERDICT.search(content, begin)
    if match is None or "".join(token["token"] for token in tokens) != content:
        return None
    start = 0
    for token in tokens:
        if start <= match.end() < start + len(token["token"]):
            return _share_of_a(token, token["token"][: match.end() - start])
        start += len(token["token"])
    return None


def _share_of_a(token: dict[str, Any], before: str) -> float | None:
    """`before` is what the token holds before the verdict: alternatives must begin alike."""
    mass = {"a": 0.0, "b": 0.0, "tie": 0.0}
    for other in token["top_logprobs"]:
        text: str = other["token"]
        rest = text.removeprefix(before).lower().partition('"')[0] if text.startswith(before) else ""
        verdict = next((name for name in mass if rest and name.startswith(rest)), None)
        if verdict is not None:
            mass[verdict] += math.exp(other["logprob"])
    total = sum(mass.values())
    return (mass["a"] + mass["tie"] / 2) / total if total else None
