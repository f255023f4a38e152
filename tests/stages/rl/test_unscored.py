"""Sources that leave answers without a score are warned of when there are more such answers than before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from kedge.core.records import Rollouts
from kedge.rewards.failures import FailureCounter, ScoreResult
from kedge.rewards.settings import FailureSettings
from kedge.stages.rl.reward import closed, last_tokens, report_unscored


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


def test_rollouts_are_worked_on_where_they_are() -> None:
    """As on an accelerator: a tensor made elsewhere, here on a default device that cannot compute, would not fit."""
    tokens_BT = torch.tensor([[5, 6, 7], [5, 8, 2]])
    mask_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    rollouts = Rollouts(
        tokens_BT=tokens_BT,
        attention_mask_BT=mask_BT,
        response_mask_BT=mask_BT,
        behaviour_logp_BT=torch.zeros(2, 3),
        group_B=torch.tensor([0, 1]),
        finished_B=torch.tensor([False, True]),
        version=0,
    )
    with torch.device("meta"):
        ended = closed(rollouts, ends=[2, 3], end=3)
        cut = last_tokens(ended, 2)
    assert ended.tokens_BT.tolist() == [[5, 6, 7, 3], [5, 8, 3, 0]]
    assert cut.tokens_BT.tolist() == [[7, 3], [8, 3]]
