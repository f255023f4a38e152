"""The watch over a running run: detectors with a state, and the predicted peak."""

from __future__ import annotations

import math
from itertools import count

from kedge.monitor.detectors.settings import DetectorSettings
from kedge.stages.rl.lookout import Lookout, peak_passed
from kedge.trainers.settings import KLSettings, ScoreSettings


def lookout(*, normalise: str = "none") -> Lookout:
    scores = ScoreSettings.model_validate({"normalise": normalise})
    return Lookout(DetectorSettings(), KLSettings(target=6.0, limit=12.0), scores)


def test_alarms_are_those_of_an_uninterrupted_run() -> None:
    steps = [{"kl/mean": 0.3 * number} for number in range(40)]
    whole = lookout()
    expected = [alarm.code for step, row in enumerate(steps, start=1) for alarm in whole.observe(step, row)]
    assert "kl.near_limit" in expected
    first, second = lookout(), lookout()
    found = [alarm.code for step, row in enumerate(steps[:25], start=1) for alarm in first.observe(step, row)]
    second.load(first.state())
    found += [alarm.code for step, row in enumerate(steps[25:], start=26) for alarm in second.observe(step, row)]
    assert found == expected


def test_the_scale_of_scores_that_are_normalised_does_not_matter() -> None:
    rows = [{"reward/std": 50.0}] * 12
    for normalise, expected in (("none", ["reward.scale"]), ("standard", [])):
        watch = lookout(normalise=normalise)
        assert [alarm.code for step, row in enumerate(rows) for alarm in watch.observe(step, row)] == expected


def test_a_run_past_the_peak_of_its_gold_score_is_told_so() -> None:
    """R = 1 + d (2 - 1 ln d), d = sqrt(KL): the peak is at ln d = 1, a KL of e^2 = 7.39."""
    curve = [
        {"kl/mean": kl, "gold/mean": 1 + math.sqrt(kl) * (2 - math.log(math.sqrt(kl))) + 0.01 * (-1) ** number}
        for kl, number in zip((0.5 * step for step in range(1, 40)), count(), strict=False)
    ]
    assert peak_passed(curve[:8]) is None
    assert peak_passed([{"kl/mean": 3.0}]) is None
    found = peak_passed(curve)
    assert found is not None
    assert math.isclose(found.peak_kl, math.e**2, rel_tol=0.1)
