"""A language model that says which of two answers is better, asked in both orders, because judges favour a position.

How it is asked and how its reply is read: `judge_protocol`. A reply that names no winner is unreadable, and is counted
rather than asked for again. What was asked once is not paid for twice, also after a crash: `paid`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kedge.core.errors import RewardError
from kedge.rewards.client import Call, CallFailed
from kedge.rewards.context import RewardContext
from kedge.rewards.judge import read_rubric
from kedge.rewards.judge_protocol import (
    TOP_LOGPROBS,
    chat_body,
    content_of,
    fence_of,
    last_match,
    read_axes,
    read_winner,
    rubric_of,
    token_at,
)
from kedge.rewards.paid import PaidCalls
from kedge.rewards.settings import PairwiseJudge
from kedge.rewards.spending.ledger import SharedBudget
from kedge.rewards.spending.tokens import Estimate

_VARIABLES = ("prompt", "first", "second", "principle", "axes", "fence")
_WINS = {"a": 1.0, "b": 0.0, "tie": 0.5}
_VERDICT = re.compile(r'(?<!\\)"better"\s*:\s*"')


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoAnswers:
    """Two answers to the same conversation."""

    prompt: tuple[tuple[str, str], ...]
    first: str
    second: str
    principle: str = ""
    """What is asked of them, under a constitution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a judge said in one order: how much it prefers the answer that it was shown as A."""

    a: float | None
    """1, 0 (B is better) or 0.5 (a tie); None where its reply names no winner."""
    probability: float | None = None
    """The probability of A, half of that of a tie added, among the three verdicts; None without log-probabilities."""
    axes: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """The same as `a`, axis by axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BothOrders:
    """What a judge thinks of the first of two answers, shown as A and shown as B; 1 where it is the better one."""

    as_a: float | None
    as_b: float | None
    probability: float | None = None
    """That the first is better, as the mean of both orders."""
    reason: str = ""
    """Why the judge could not be asked; then both are None."""
    axes: Mapping[str, tuple[float | None, float | None]] = field(
        default_factory=dict[str, tuple[float | None, float | None]]
    )
    """The same as `as_a` and `as_b`, axis by axis."""


class Panelist:
    """One judge, ready to compare. What it replies is kept in `cache`, if that is given, and what it costs in `ledger`;
    `shared` is the budget of a panel.

    With `by_principle` every pair names the principle that it is compared by.
    """

    def __init__(
        self,
        settings: PairwiseJudge,
        context: RewardContext,
        *,
        cache: Path | None = None,
        ledger: Path | None = None,
        shared: SharedBudget | None = None,
        by_principle: bool = False,
    ) -> None:
        self.name = settings.label
        self._settings, self._context = settings, context
        self.rubric = rubric_of(settings, by_principle=by_principle)
        self._template = read_rubric(
            self.rubric,
            variables=_VARIABLES,
            shows=("first", "second"),
            uses=("principle",) if by_principle else (),
        )
        self.calls = PaidCalls(
            settings,
            cache,
            budget=settings.budget,
            rate=settings.rate,
            seed=context.seed,
            ledger=ledger,
            shared=shared,
            note=context.note,
        )

    def compare(self, pairs: Sequence[TwoAnswers], *, sample: int = 0) -> list[BothOrders]:
        """What the judge says of each pair; another `sample` is another vote. Equal texts are a tie without asking."""
        verdicts = self.calls.ask(self._calls(pairs, sample))
        asked = iter(_both(verdicts[at], verdicts[at + 1]) for at in range(0, len(verdicts), 2))
        equal = BothOrders(
            as_a=0.5,
            as_b=0.5,
            probability=0.5 if self._settings.logprobs else None,
            axes=dict.fromkeys(self._settings.axes, (0.5, 0.5)),
        )
        return [equal if pair.first == pair.second else next(asked) for pair in pairs]

    def estimate(self, pairs: Sequence[TwoAnswers], *, samples: int = 1) -> Estimate:
        """What comparing these will cost, before anything is asked."""
        return self.calls.estimate([call for sample in range(samples) for call in self._calls(pairs, sample)])

    def _calls(self, pairs: Sequence[TwoAnswers], sample: int) -> list[Call[Verdict]]:
        """Two calls a pair, one in each order."""
        wanted = [pair for pair in pairs if pair.first != pair.second]
        return [call for pair in wanted for call in self._orders(pair, sample)]

    def _orders(self, pair: TwoAnswers, sample: int) -> list[Call[Verdict]]:
        more = {"logprobs": True, "top_logprobs": TOP_LOGPROBS} if self._settings.logprobs else {}
        calls: list[Call[Verdict]] = []
        for first, second in ((pair.first, pair.second), (pair.second, pair.first)):
            shown = [*(part for message in pair.prompt for part in message), "", first, second]
            fence = fence_of(self._context.seed, shown)
            text = self._template.render(
                prompt=pair.prompt,
                first=first,
                second=second,
                principle=pair.principle,
                axes=self._settings.axes,
                fence=fence,
            )
            calls.append(
                Call(
                    body=chat_body(self._settings, text, **more),
                    read=partial(_verdict, fence=fence, axes=self._settings.axes),
                    keep=partial(_kept, fence=fence),
                    sample=sample,
                )
            )
        return calls


def ledger_of(folder: Path, judge: PairwiseJudge, number: int = 0) -> Path:
    """The file in a stage's folder that says what a judge cost; `number` tells the judges of a panel apart.

    >>> ledger_of(Path("eval"), PairwiseJudge(kind="judge", url="http://localhost/v1", model="org/m 1"), 2).as_posix()
    'eval/calls/2-org-m-1.jsonl'
    """
    return folder / "calls" / f"{number}-{re.sub(r'[^A-Za-z0-9._-]+', '-', judge.label)[:60]}.jsonl"


def refuse_failures(
    name: str, results: Sequence[BothOrders], *, max_share: float, setting: str = "failures.max_share"
) -> int:
    """How many comparisons could not be asked; more than the share that may fail is an error that says why."""
    failed = [result.reason for result in results if result.reason]
    if len(failed) > max_share * len(results):
        raise RewardError(
            f"judge {name}: {len(failed):,} of {len(results):,} comparisons could not be asked, more than "
            f"{max_share:.0%} ({setting}); the first: {failed[0]}. What was answered is kept: run it again, and only "
            "the others are asked"
        )
    return len(failed)


def _kept(reply: Any, *, fence: str) -> dict[str, Any]:
    """The text, and what its log-probabilities come to, which are many times longer."""
    content = content_of(reply)
    return {"content": content, "probability": _probability_of_a(reply, content, fence)}


def _verdict(kept: Any, *, fence: str, axes: Sequence[str]) -> Verdict:
    content = kept["content"]
    try:
        winner = _WINS[read_winner(content, fence=fence)]
        by_axis = read_axes(content, axes, fence=fence)
    except ValueError:
        return Verdict(a=None)
    named = {axis: None if better is None else _WINS[better] for axis, better in by_axis.items()}
    return Verdict(a=winner, probability=kept["probability"], axes=named)


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
        as_b=_other_side(as_b.a),
        probability=None
        if probabilities[0] is None or probabilities[1] is None
        else (probabilities[0] + 1 - probabilities[1]) / 2,
        axes={axis: (value, _other_side(as_b.axes.get(axis))) for axis, value in as_a.axes.items()},
    )


def _other_side(preference: float | None) -> float | None:
    return None if preference is None else 1 - preference


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
    match = last_match(_VERDICT, content, fence)
    place = match and token_at(content, tokens, match.end())
    return _share_of_a(*place) if place else None


def _share_of_a(token: Mapping[str, Any], before: str) -> float | None:
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
