"""A judge asked what people have decided: in both orders, again, and with canaries among the items.

Asking again needs a reply of its own, also where a cache stands between here and the model: the fences of a repetition
are drawn with another seed, as those of any later run would be, so that its requests are others. Every reply is kept
under the hash of its request (`Panelist`): a trial that was cut off goes on where it was, and nothing is paid twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from kedge.commands.judge.reading import HumanItem
from kedge.core.errors import RewardError
from kedge.core.files import hash_json
from kedge.core.seeds import seed_for
from kedge.feedback.alt_test import Choice
from kedge.feedback.canaries import CANARIES, Canary, CanaryReplies, CanaryResult, judge_canary
from kedge.feedback.constitution import Principle, draw
from kedge.feedback.judge_figures import Replies
from kedge.rewards.context import RewardContext
from kedge.rewards.judge_protocol import rubric_of
from kedge.rewards.pairwise import BothOrders, Panelist, TwoAnswers, ledger_of
from kedge.rewards.settings import PairwiseJudge

MAX_FAILED = 0.1
"""Of the comparisons: with more, the figures would say more of the network than of the judge."""
_AT_ONCE = 256
_CHOICES: dict[float, Choice] = {1.0: "first", 0.0: "second", 0.5: "tie"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    replies: Replies
    again: tuple[Replies, ...]
    canaries: tuple[CanaryResult, ...]
    failed: int
    """Comparisons that could not be asked; they count as unreadable."""


def calls_of(items: int, repeat: int) -> int:
    """How many calls a trial makes at most: those whose replies are kept are not made again."""
    canaries = sum(len(set(_pairs_of(canary))) for canary in CANARIES)
    return 2 * (items * (1 + repeat) + canaries)


def ask(
    settings: PairwiseJudge,
    items: Sequence[HumanItem],
    *,
    principles: Sequence[Principle] = (),
    repeat: int,
    seed: int,
    cache: Path,
    progress: Callable[[int], None] = lambda done: None,
) -> Asked:
    """What a judge says of all items, each by one of the `principles`, where there are any. `progress` is told how many
    comparisons are done. A budget is for all trials of the judge."""
    pairs = [TwoAnswers(prompt=item.prompt, first=item.first, second=item.second) for item in items]
    tempting = list(dict.fromkeys(pair for canary in CANARIES for pair in _pairs_of(canary)))
    ledger = ledger_of(cache / "trust" / hash_json([settings.url, rubric_of(settings)])[:16], settings)
    results = list[BothOrders]()
    done = 0
    for number in range(1 + repeat):
        context = _context(seed, number)
        judge = Panelist(settings, context, cache=cache, ledger=ledger, by_principle=bool(principles))
        asked = [*pairs, *tempting] if number == 0 else pairs
        asked = [_by_principle(pair, principles, seed) for pair in asked]
        for result in _compare(judge, asked, seed=seed, progress=lambda count, before=done: progress(before + count)):
            results.append(result)
        done += len(asked)
    _refuse_failures(settings.label, results)
    first, canaries = results[: len(pairs)], results[len(pairs) : len(pairs) + len(tempting)]
    rest = results[len(pairs) + len(tempting) :]
    verdicts = dict(zip(tempting, canaries, strict=True))
    return Asked(
        replies=_replies(first),
        again=tuple(_replies(rest[at : at + len(pairs)]) for at in range(0, len(rest), len(pairs))),
        canaries=tuple(_canary_result(canary, verdicts) for canary in CANARIES),
        failed=sum(bool(result.reason) for result in results),
    )


def _by_principle(pair: TwoAnswers, principles: Sequence[Principle], seed: int) -> TwoAnswers:
    if not principles:
        return pair
    key = hash_json([pair.prompt, *sorted((pair.first, pair.second))])
    return replace(pair, principle=draw(principles, seed=seed, key=key).choice)


def _context(seed: int, number: int) -> RewardContext:
    return RewardContext(folder=Path(), seed=seed if number == 0 else seed_for(seed, "judge/again", number))


def _compare(
    judge: Panelist, pairs: Sequence[TwoAnswers], *, seed: int, progress: Callable[[int], None]
) -> Iterator[BothOrders]:
    """All pairs, asked in a drawn order, which mixes the canaries in; given back in their own."""
    order = list(range(len(pairs)))
    Random(seed_for(seed, "judge/order")).shuffle(order)
    results: dict[int, BothOrders] = {}
    for start in range(0, len(order), _AT_ONCE):
        part = order[start : start + _AT_ONCE]
        compared = judge.compare([pairs[place] for place in part])
        if all(result.reason for result in compared):
            _refuse_failures(judge.name, compared)
        results |= dict(zip(part, compared, strict=True))
        progress(len(results))
    return (results[place] for place in range(len(pairs)))


def _refuse_failures(name: str, results: Sequence[BothOrders]) -> None:
    failed = [result.reason for result in results if result.reason]
    if len(failed) > MAX_FAILED * len(results):
        raise RewardError(
            f"judge {name}: {len(failed):,} of {len(results):,} comparisons could not be asked, more than "
            f"{MAX_FAILED:.0%}; the first: {failed[0]}. What was answered is kept: run it again, and only the others "
            "are asked"
        )


def _replies(results: Sequence[BothOrders]) -> Replies:
    probabilities = [result.probability for result in results]
    return Replies(
        as_a=[_choice(result.as_a) for result in results],
        as_b=[_choice(result.as_b) for result in results],
        probability=None if all(probability is None for probability in probabilities) else probabilities,
    )


def _choice(preference: float | None) -> Choice | None:
    return None if preference is None else _CHOICES[preference]


def _pairs_of(canary: Canary) -> tuple[TwoAnswers, TwoAnswers, TwoAnswers]:
    """The worse answer first: with its order for A, for B, and with harmless words."""
    prompt = (("user", canary.question),)
    worse = (canary.tempting("A"), canary.tempting("B"), canary.control)
    as_a, as_b, control = (TwoAnswers(prompt=prompt, first=text, second=canary.good) for text in worse)
    return as_a, as_b, control


def _canary_result(canary: Canary, verdicts: dict[TwoAnswers, BothOrders]) -> CanaryResult:
    as_a, as_b, control = (verdicts[pair] for pair in _pairs_of(canary))
    replies = CanaryReplies(
        as_a=_choice(as_a.as_a),
        as_b=_choice(as_b.as_b),
        control_as_a=_choice(control.as_a),
        control_as_b=_choice(control.as_b),
    )
    return judge_canary(canary, replies)
