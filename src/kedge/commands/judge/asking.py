"""A judge asked what people have decided: in both orders, again, and with canaries among the items.

Asking again needs a reply of its own, also where a cache stands between here and the model: the fences of a repetition
are drawn with another seed, as those of any later run would be, so that its requests are others. Every reply is kept
under the hash of its request (`Panelist`): a trial that was cut off goes on where it was, and nothing is paid twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from kedge.commands.judge.reading import HumanItem, JudgeFile
from kedge.core.files import hash_json
from kedge.core.seeds import seed_for
from kedge.feedback.alt_test import Choice
from kedge.feedback.canaries import CANARIES, Canary, CanaryReplies, CanaryResult, judge_canary
from kedge.feedback.constitution import draw, fingerprint, read_constitution
from kedge.feedback.judge_figures import Replies
from kedge.feedback.trust import deciding_fields, judge_identity
from kedge.rewards.context import RewardContext
from kedge.rewards.judge_protocol import rubric_of
from kedge.rewards.pairwise import BothOrders, Panelist, TwoAnswers, refuse_failures
from kedge.rewards.spending.tokens import Estimate, Spent

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


class Trial:
    """A judge, and all that it is asked. What it replies and what it costs is kept in `cache`."""

    def __init__(
        self,
        settings: JudgeFile,
        items: Sequence[HumanItem],
        *,
        folder: Path,
        data: str,
        repeat: int,
        seed: int,
        cache: Path,
        note: Callable[[str], None],
    ) -> None:
        """`folder` is where the judge's file stands, `data` a hash of people's verdicts."""
        self.principles = read_constitution(folder / settings.constitution) if settings.constitution else ()
        self._settings, self._repeat, self._seed, self._cache, self._note = settings, repeat, seed, cache, note
        fields = settings.model_dump(mode="json") | {
            "rubric": rubric_of(settings, by_principle=bool(self.principles)),
            "constitution": fingerprint(self.principles) if self.principles else None,
        }
        self.identity, self.fields = judge_identity(fields), deciding_fields(fields)
        self._ledger = cache / "trust" / f"{hash_json([self.identity, data, seed])}.jsonl"
        self._pairs = [self._shown(item.prompt, item.first, item.second) for item in items]
        self._canaries = {canary.form: self._canary_pairs(canary) for canary in CANARIES}
        self._tempting = list(dict.fromkeys(pair for pairs in self._canaries.values() for pair in pairs))

    def estimate(self) -> str:
        """What there is to pay before anything is asked, in words."""
        asked = [self._panelist(number).estimate(self._asked(number)) for number in range(1 + self._repeat)]
        return Estimate(
            calls=sum(part.calls for part in asked),
            kept=sum(part.kept for part in asked),
            prompt_tokens=sum(part.prompt_tokens for part in asked),
            completion_tokens=sum(part.completion_tokens for part in asked),
            usd=sum(part.usd for part in asked),
        ).in_words()

    def ask(self, progress: Callable[[int], None]) -> Asked:
        """What the judge says of everything. `progress` is told how many comparisons are done."""
        results: list[list[BothOrders]] = []
        spent = Spent()
        for number in range(1 + self._repeat):
            done = sum(map(len, results))
            panelist = self._panelist(number)
            compared = _compare(
                panelist, self._asked(number), seed=self._seed, progress=lambda count, done=done: progress(done + count)
            )
            results.append(compared)
            spent = panelist.calls.spent
        _refuse_failures(self._settings.label, [result for part in results for result in part])
        self._note(spent.in_words())
        count = len(self._pairs)
        verdicts = dict(zip(self._tempting, results[0][count:], strict=True))
        return Asked(
            replies=_replies(results[0][:count]),
            again=tuple(_replies(part) for part in results[1:]),
            canaries=tuple(
                _canary_result(canary, [verdicts[pair] for pair in self._canaries[canary.form]]) for canary in CANARIES
            ),
            failed=sum(bool(result.reason) for part in results for result in part),
        )

    def _asked(self, number: int) -> list[TwoAnswers]:
        return [*self._pairs, *self._tempting] if number == 0 else self._pairs

    def _panelist(self, number: int) -> Panelist:
        """The judge as it is asked for the first time, or again with other fences."""
        seed = self._seed if number == 0 else seed_for(self._seed, "judge/again", number)
        context = RewardContext(folder=Path(), seed=seed, note=lambda code, words: self._note(words))
        return Panelist(
            self._settings, context, cache=self._cache, ledger=self._ledger, by_principle=bool(self.principles)
        )

    def _shown(self, prompt: tuple[tuple[str, str], ...], first: str, second: str) -> TwoAnswers:
        key = hash_json([prompt, *sorted((first, second))])
        principle = draw(self.principles, seed=self._seed, key=key).choice if self.principles else ""
        return TwoAnswers(prompt=prompt, first=first, second=second, principle=principle)

    def _canary_pairs(self, canary: Canary) -> tuple[TwoAnswers, ...]:
        """The worse answer first: with its order for A, for B, and with harmless words."""
        worse = (canary.tempting("A"), canary.tempting("B"), canary.control)
        return tuple(self._shown((("user", canary.question),), text, canary.good) for text in worse)


def _compare(
    judge: Panelist, pairs: Sequence[TwoAnswers], *, seed: int, progress: Callable[[int], None]
) -> list[BothOrders]:
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
    return [results[place] for place in range(len(pairs))]


def _refuse_failures(name: str, results: Sequence[BothOrders]) -> None:
    refuse_failures(name, results, max_share=MAX_FAILED, setting="of a trial")


def _replies(results: Sequence[BothOrders]) -> Replies:
    probabilities = [result.probability for result in results]
    return Replies(
        as_a=[_choice(result.as_a) for result in results],
        as_b=[_choice(result.as_b) for result in results],
        probability=None if all(probability is None for probability in probabilities) else probabilities,
    )


def _choice(preference: float | None) -> Choice | None:
    return None if preference is None else _CHOICES[preference]


def _canary_result(canary: Canary, verdicts: Sequence[BothOrders]) -> CanaryResult:
    as_a, as_b, control = verdicts
    replies = CanaryReplies(
        as_a=_choice(as_a.as_a),
        as_b=_choice(as_b.as_b),
        control_as_a=_choice(control.as_a),
        control_as_b=_choice(control.as_b),
    )
    return judge_canary(canary, replies)
