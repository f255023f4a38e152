"""What an RL run writes of its iterations: the detectors and their state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from kedge.monitor.detectors.settings import DetectorSettings
from kedge.runtime.local import Clock
from kedge.stages.rl.journal import IterationJournal
from kedge.trainers.settings import KLSettings, ScoreSettings


def journal(*, normalise: str = "none") -> IterationJournal:
    scores = ScoreSettings.model_validate({"normalise": normalise})
    settings = SimpleNamespace(detectors=DetectorSettings(), kl=KLSettings(target=6.0, limit=12.0), scores=scores)
    reward = SimpleNamespace(failure_counters=())
    nothing = cast(Any, None)
    return IterationJournal(
        context=nothing,
        settings=cast(Any, settings),
        reward=cast(Any, reward),
        gold=None,
        prompts=nothing,
        tokenizer=nothing,
        clock=Clock(),
    )


def test_a_resumed_run_raises_the_alarms_of_an_uninterrupted_one() -> None:
    steps = [{"kl/mean": 0.3 * number} for number in range(40)]
    whole = journal().detectors
    expected = [alarm.code for step, row in enumerate(steps, start=1) for alarm in whole.observe(step, row)]
    assert "kl.near_limit" in expected
    first, second = journal(), journal()
    codes = [alarm.code for step, row in enumerate(steps[:25], start=1) for alarm in first.detectors.observe(step, row)]
    second.load(first.state())
    resumed = enumerate(steps[25:], start=26)
    codes += [alarm.code for step, row in resumed for alarm in second.detectors.observe(step, row)]
    assert codes == expected


def test_the_scale_of_scores_that_are_normalised_does_not_matter() -> None:
    rows = [{"reward/std": 50.0}] * 12
    for normalise, expected in (("none", ["reward.scale"]), ("standard", [])):
        detectors = journal(normalise=normalise).detectors
        assert [alarm.code for step, row in enumerate(rows) for alarm in detectors.observe(step, row)] == expected
