"""Sources that leave answers without a score are warned of when there are more such answers than before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kedge.rewards.failures import FailureCounter
from kedge.rewards.results import ScoreResult
from kedge.rewards.settings import FailureSettings
from kedge.stages.rl.reward import report_unscored


def failing(counter: FailureCounter, *reasons: str) -> None:
    counter.add([ScoreResult(score=float("nan"), reason=reason) for reason in reasons])


def test_each_source_is_reported_when_it_has_more_than_before() -> None:
    events: list[Any] = []
    context: Any = SimpleNamespace(event=lambda *arguments, **evidence: events.append((*arguments, evidence)))
    first, second, good = (
        FailureCounter(name, FailureSettings(max_share=1.0)) for name in ("reward.a", "reward.b", "reward.c")
    )
    failing(first, "late", "late", "refused")
    failing(second, *"vwxyz")
    good.add([ScoreResult(score=1.0, reason="")])

    reported = report_unscored(context, [first, second, good], step=4)
    assert reported == {"reward.a": 3, "reward.b": 5}
    assert events == [
        (
            "warning",
            "reward.unscored",
            "reward.a: 3 of 3 answers have no score so far: late (2x); refused (1x)",
            {"step": 4},
        ),
        (
            "warning",
            "reward.unscored",
            "reward.b: 5 of 5 answers have no score so far: v (1x); w (1x); x (1x)",
            {"step": 4},
        ),
    ]

    failing(second, "x")
    assert report_unscored(context, [first, second, good], reported=reported, code="other") == {
        "reward.a": 3,
        "reward.b": 6,
    }
    assert [event[1:3] for event in events[2:]] == [
        ("other", "reward.b: 6 of 6 answers have no score so far: x (2x); v (1x); w (1x)")
    ]
