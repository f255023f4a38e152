"""Rows without a score: counted, explained, saved, and too many stop the run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

import pytest

from kedge.core.answers import Answer
from kedge.core.errors import ConfigError, RewardError
from kedge.rewards.failures import Guarded, Tally
from kedge.rewards.settings import FailureSettings
from kedge.rewards.verdicts import Source, Verdict, unscored

Make = Callable[..., Answer]


class Plain:
    """A source as a third party would write it: no reasons."""

    def __init__(self, say: Callable[[Sequence[Answer]], list[float]]) -> None:
        self.say = say

    def score(self, answers: Sequence[Answer]) -> list[float]:
        return self.say(answers)


def tally(max_share: float = 0.5, window: int = 10) -> Tally:
    return Tally("reward.style", FailureSettings(max_share=max_share, window=window))


def test_rows_are_counted_with_their_reasons(answer: Make) -> None:
    def judge(answers: Sequence[Answer]) -> list[Verdict]:
        return [unscored(f"no  {a.text}\n") if a.text in "xy" else Verdict(1.0) for a in answers]

    count = tally()
    guarded = Guarded(Source(judge), count)
    scores = guarded.score([answer(text) for text in ("x", "good", "y", "x")])
    assert [math.isnan(score) for score in scores] == [True, False, True, True]
    guarded.score([answer("good")] * 9)
    report = count.report(top=1)
    assert (report.source, report.rows, report.failed, report.in_window) == ("reward.style", 13, 3, 1)
    assert report.reasons == {"no x": 2}


def test_too_many_stop_the_run(answer: Make) -> None:
    count = tally(max_share=0.25, window=8)
    fine, bad = Verdict(1.0), unscored("server down")
    count.add([fine, bad, bad])  # two of eight are allowed, though they are two of the first three
    with pytest.raises(RewardError) as error:
        count.add([fine, bad])
    assert str(error.value) == (
        "reward 'reward.style' gave no score to 3 of its last 5 answers; allowed are 25% of 8. "
        "Reasons: server down (3x). Mend the source, or allow more failures"
    )
    assert RewardError.exit_code == 1


def test_old_failures_are_forgotten_and_none_can_be_allowed() -> None:
    count = tally(max_share=0.25, window=8)
    for _ in range(20):
        count.add([unscored("late"), *[Verdict(1.0)] * 7])
    assert count.report().failed == 20
    with pytest.raises(RewardError):
        tally(max_share=0.0).add([Verdict(1.0), unscored("late")])
    tally(max_share=1.0, window=4).add([unscored("late")] * 9)


def test_a_resumed_tally_stops_at_the_same_row() -> None:
    def rows(count: Tally, start: int, end: int) -> int | None:
        for row in range(start, end):
            try:
                count.add([unscored("late") if row % 3 == 0 else Verdict(1.0)])
            except RewardError:
                return row
        return None

    whole = rows(tally(max_share=0.3, window=12), 0, 100)
    first, second = tally(max_share=0.3, window=12), tally(max_share=0.3, window=12)
    assert rows(first, 0, 5) is None
    second.load(json.loads(json.dumps(first.state())))
    assert second.report() == first.report()
    assert rows(second, 5, 100) == whole == 9  # rows 0, 3, 6, 9: four of twelve are more than 0.3


def test_reasons_are_short_and_few() -> None:
    count = tally(max_share=1.0)
    count.add([unscored(f"{index} " + "x" * 500) for index in range(150)])
    reasons = count.report(top=200).reasons
    assert max(map(len, reasons)) == 200
    assert (len(reasons), reasons["other reasons"]) == (101, 50)


def test_a_source_that_raises_has_scored_nothing(answer: Make) -> None:
    def say(answers: Sequence[Answer]) -> list[float]:
        raise OSError("disk on fire")

    count = tally(max_share=1.0)
    assert all(math.isnan(score) for score in Guarded(Plain(say), count).score([answer("x"), answer("y")]))
    assert count.report().reasons == {"OSError: disk on fire": 2}


def test_errors_of_ours_stay_errors(answer: Make) -> None:
    def say(answers: Sequence[Answer]) -> list[float]:
        raise ConfigError("wrong setting")

    with pytest.raises(ConfigError, match="wrong setting"):
        Guarded(Plain(say), tally()).score([answer("x")])


def test_one_score_a_row_or_an_error(answer: Make) -> None:
    guarded = Guarded(Plain(lambda answers: [1.0]), tally())
    assert guarded.score([answer("x")]) == [1.0]
    with pytest.raises(RewardError, match="gave 1 scores for 2 answers"):
        guarded.score([answer("x"), answer("y")])
    assert guarded.score([]) == []


def test_infinity_is_no_score(answer: Make) -> None:
    count = tally(max_share=1.0)
    scores = Guarded(Plain(lambda answers: [math.inf, -1.5]), count).score([answer("x"), answer("y")])
    assert math.isnan(scores[0])
    assert scores[1] == -1.5
    assert count.report().reasons == {"the source gave no number": 1}
