"""Rows without a score: counted, explained, saved, and too many stop the run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

import pytest

from kedge.core.answers import Answer
from kedge.core.errors import ConfigError, RewardError
from kedge.rewards.failures import CountedSource, FailureCounter, ScoreResult, Source, unscored
from kedge.rewards.settings import FailureSettings

Make = Callable[..., Answer]


class Plain:
    """A source as a third party would write it: no reasons."""

    def __init__(self, say: Callable[[Sequence[Answer]], list[float]]) -> None:
        self.say = say

    def score(self, answers: Sequence[Answer]) -> list[float]:
        return self.say(answers)


def new_counter(max_share: float = 0.5, window: int = 10) -> FailureCounter:
    return FailureCounter("reward.style", FailureSettings(max_share=max_share, window=window))


def test_rows_are_counted_with_their_reasons(answer: Make) -> None:
    def judge(answers: Sequence[Answer]) -> list[ScoreResult]:
        return [unscored(f"no  {a.text}\n") if a.text in "xy" else ScoreResult(1.0) for a in answers]

    counter = new_counter()
    counted = CountedSource(Source(judge), counter)
    scores = counted.score([answer(text) for text in ("x", "good", "y", "x")])
    assert [math.isnan(score) for score in scores] == [True, False, True, True]
    counted.score([answer("good")] * 9)
    report = counter.report(top=1)
    assert (report.source, report.rows, report.failed, report.in_window) == ("reward.style", 13, 3, 1)
    assert report.reasons == {"no x": 2}


def test_too_many_stop_the_run(answer: Make) -> None:
    counter = new_counter(max_share=0.25, window=8)
    fine, bad = ScoreResult(1.0), unscored("server down")
    counter.add([fine, bad, bad])  # two of eight are allowed, though they are two of the first three
    with pytest.raises(RewardError) as error:
        counter.add([fine, bad])
    assert str(error.value) == (
        "reward 'reward.style' gave no score to 3 of its last 5 answers; allowed are 25% of 8. "
        "Reasons: server down (3x). Mend the source, or allow more failures"
    )
    assert RewardError.exit_code == 1


def test_old_failures_are_forgotten_and_none_can_be_allowed() -> None:
    counter = new_counter(max_share=0.25, window=8)
    for _ in range(20):
        counter.add([unscored("late"), *[ScoreResult(1.0)] * 7])
    assert counter.report().failed == 20
    with pytest.raises(RewardError):
        new_counter(max_share=0.0).add([ScoreResult(1.0), unscored("late")])
    new_counter(max_share=1.0, window=4).add([unscored("late")] * 9)


def test_a_resumed_counter_stops_at_the_same_row() -> None:
    def rows(counter: FailureCounter, start: int, end: int) -> int | None:
        for row in range(start, end):
            try:
                counter.add([unscored("late") if row % 3 == 0 else ScoreResult(1.0)])
            except RewardError:
                return row
        return None

    whole = rows(new_counter(max_share=0.3, window=12), 0, 100)
    first, second = new_counter(max_share=0.3, window=12), new_counter(max_share=0.3, window=12)
    assert rows(first, 0, 5) is None
    second.load(json.loads(json.dumps(first.state())))
    assert second.report() == first.report()
    assert rows(second, 5, 100) == whole == 9  # rows 0, 3, 6, 9: four of twelve are more than 0.3


def test_reasons_are_short_and_few() -> None:
    counter = new_counter(max_share=1.0)
    counter.add([unscored(f"{index} " + "x" * 500) for index in range(150)])
    reasons = counter.report(top=200).reasons
    assert max(map(len, reasons)) == 200
    assert (len(reasons), reasons["other reasons"]) == (101, 50)


def test_a_source_that_raises_has_scored_nothing(answer: Make) -> None:
    def say(answers: Sequence[Answer]) -> list[float]:
        raise OSError("disk on fire")

    counter = new_counter(max_share=1.0)
    assert all(math.isnan(score) for score in CountedSource(Plain(say), counter).score([answer("x"), answer("y")]))
    assert counter.report().reasons == {"OSError: disk on fire": 2}


def test_errors_of_ours_stay_errors(answer: Make) -> None:
    def say(answers: Sequence[Answer]) -> list[float]:
        raise ConfigError("wrong setting")

    with pytest.raises(ConfigError, match="wrong setting"):
        CountedSource(Plain(say), new_counter()).score([answer("x")])


def test_one_score_a_row_or_an_error(answer: Make) -> None:
    counted = CountedSource(Plain(lambda answers: [1.0]), new_counter())
    assert counted.score([answer("x")]) == [1.0]
    with pytest.raises(RewardError, match=r"reward 'reward.style' returned 1 scores for 2 answers"):
        counted.score([answer("x"), answer("y")])
    assert counted.score([]) == []


def test_infinity_is_no_score(answer: Make) -> None:
    counter = new_counter(max_share=1.0)
    scores = CountedSource(Plain(lambda answers: [math.inf, -1.5]), counter).score([answer("x"), answer("y")])
    assert math.isnan(scores[0])
    assert scores[1] == -1.5
    assert counter.report().reasons == {"the source gave inf": 1}
