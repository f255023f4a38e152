"""What the reward report says about models whose fault is known because it was planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kedge.report.reward import RewardReport, ScoredPair, reward_report
from kedge.report.reward.rules import RULES

World = Callable[..., list[ScoredPair]]
Make = Callable[..., ScoredPair]


def codes(report: RewardReport, *levels: str) -> list[str]:
    return [finding.code for finding in report.findings if finding.level in (levels or ("fatal", "warning"))]


def test_planted_length_bias_is_caught_although_accuracy_looks_fine(world: World) -> None:
    report = reward_report(world(600, length=1.0, noise=0.3, longer=0.75))
    assert report.accuracy.low > 0.6
    assert codes(report, "fatal") == ["length.disguise"]
    assert not report.is_fit
    assert report.verdict.startswith("Not fit to use: the model is length in disguise")
    assert "where the longer answer was rejected" in report.verdict


def test_planted_preference_for_short_answers_is_caught_too(world: World) -> None:
    report = reward_report(world(600, length=-1.0, noise=0.3, longer=0.25))
    assert report.accuracy.low > 0.6
    assert codes(report, "fatal") == ["length.disguise"]
    assert "where the shorter answer was rejected" in report.verdict
    assert "“the shorter wins”" in report.verdict


def test_length_behind_much_noise_is_caught_by_balanced_accuracy(world: World) -> None:
    report = reward_report(world(1500, length=0.6, noise=1.0, longer=0.9))
    assert report.length.difference_spearman is not None
    assert report.length.difference_spearman < RULES["length.disguise"].threshold
    assert report.accuracy.low > 0.5
    assert codes(report, "fatal") == ["length.disguise"]


def test_length_that_nothing_contradicts_is_not_trusted(world: World) -> None:
    """Without one pair where the longer was rejected, a model that follows length closely has nothing to show."""
    report = reward_report(world(200, length=1.0, noise=0.1, longer=1.0))
    assert codes(report, "fatal") == ["length.disguise"]
    assert "in no pair the longer answer was rejected" in report.verdict
    assert report.length.balanced is None


def test_good_model_on_biased_data_is_fit(world: World) -> None:
    """Worse than "the longer wins", but right where the longer was rejected."""
    report = reward_report(world(600, quality=1.8, longer=0.95))
    assert report.accuracy.value < report.length.rule.value
    assert report.length.longer_rejected
    assert report.length.longer_rejected.model.low > 0.5
    assert codes(report) == []
    assert report.is_fit
    assert codes(report, "info") == ["length.baseline"]
    assert "the number to look at is balanced accuracy" in report.findings[0].message


@pytest.mark.parametrize(
    ("quality", "length", "noise"),
    [(1.5, 1.5, 0.3), (0.5, 1.0, 2.0), (0.5, -1.0, 2.0)],
    ids=["follows length, no better than a coin against it", "follows it loosely, wrong against it", "shortness"],
)
def test_quality_with_length_is_a_warning(world: World, quality: float, length: float, noise: float) -> None:
    report = reward_report(world(1500, quality=quality, length=length, noise=noise))
    assert report.length.balanced
    assert report.length.balanced.low > 0.5
    assert codes(report)[0] == "length.leans"
    assert report.is_fit
    assert report.verdict.startswith("Usable with care.")


def test_weak_but_honest_model_is_said_to_be_no_better_than_length(world: World) -> None:
    report = reward_report(world(400, quality=0.5, longer=0.9, noise=1.0))
    assert codes(report, "fatal") == []
    assert "length.no_better" in codes(report, "warning")


def test_coin(world: World) -> None:
    report = reward_report(world(600))
    assert codes(report, "fatal") == ["accuracy.coin"]
    assert report.verdict.startswith("Not fit to use: the model is not distinguishable from a coin")


def test_inverted(world: World) -> None:
    report = reward_report(world(300, quality=-1.5))
    assert codes(report, "fatal") == ["accuracy.inverted"]
    assert "labels swapped" in report.verdict


@pytest.mark.parametrize(("level", "noise"), [(0.0, 0.0), (-3.0, 1e-5), (1e4, 1e-2)])
def test_constant(world: World, level: float, noise: float) -> None:
    pairs = [
        replace(pair, chosen=(pair.chosen[0] + level,), rejected=(pair.rejected[0] + level,))
        for pair in world(200, noise=noise, quality=noise)
    ]
    assert codes(reward_report(pairs), "fatal") == ["scores.constant"]


def test_nearly_all_ties(make: Make) -> None:
    pairs = [make(1.0 if at < 12 else 0.0, 0.0, prompt=str(at)) for at in range(120)]
    assert codes(reward_report(pairs), "fatal") == ["scores.tied"]
    some = [make(1.0 if at < 100 else 0.0, 0.0, prompt=str(at)) for at in range(120)]
    assert "scores.ties" in codes(reward_report(some), "info")


def test_good_calibrated_model(make: Make) -> None:
    rng = np.random.default_rng(3)
    pairs = list[ScoredPair]()
    for at in range(1000):
        size = float(rng.exponential(2.0))
        is_right = rng.random() < 1 / (1 + np.exp(-size))
        lengths = (int(rng.integers(10, 90)), int(rng.integers(10, 90)))
        pairs.append(make(size if is_right else -size, 0.0, lengths=lengths, prompt=str(at)))
    report = reward_report(pairs)
    assert [finding.code for finding in report.findings] == ["reward.ok"]
    assert report.is_fit
    assert report.verdict == f"Fit to use. {report.findings[0].message}"
    assert report.calibration.temperature is not None
    assert 0.85 < report.calibration.temperature < 1.15
    loud = [replace(pair, chosen=(6 * pair.chosen[0],)) for pair in pairs]
    told = reward_report(loud)
    assert codes(told) == ["calibration.overconfident"]
    assert told.calibration.temperature == pytest.approx(6 * report.calibration.temperature)
    quiet = [replace(pair, chosen=(pair.chosen[0] / 6,)) for pair in pairs]
    assert codes(reward_report(quiet), "fatal", "warning", "info") == ["calibration.underconfident"]


def test_calibration_errors_that_cancel_out_are_not_called_overconfident(make: Make) -> None:
    """Confidence 3/4 is right in 36 of 40, and 9/10 in 30 of 40: an error of 0.15 each, in opposite directions."""
    three, nine = np.log(3), np.log(9)
    scores = [three] * 36 + [-three] * 4 + [nine] * 30 + [-nine] * 10
    report = reward_report([make(float(score), 0, prompt=str(at)) for at, score in enumerate(scores)])
    assert report.calibration.error == pytest.approx(0.15)
    assert not any(finding.code.startswith("calibration") for finding in report.findings)


def test_small_heldout_sets(world: World) -> None:
    assert "heldout.small" in codes(reward_report(world(99, quality=2.0)))
    assert "heldout.small" not in codes(reward_report(world(100, quality=2.0)))
    shared = [replace(pair, prompt=str(at % 29)) for at, pair in enumerate(world(300, quality=2.0))]
    assert "heldout.few_prompts" in codes(reward_report(shared))


def test_shared_prompts_can_take_the_significance_away(make: Make) -> None:
    """60 % of 400 pairs beats a coin, unless they are 20 prompts that are right or wrong as a whole."""
    rights = [at % 20 < 12 for at in range(400)]
    apart = reward_report([make(1.0 if right else -1.0, 0, prompt=str(at)) for at, right in enumerate(rights)])
    together = reward_report([make(1.0 if right else -1.0, 0, prompt=str(at % 20)) for at, right in enumerate(rights)])
    assert apart.accuracy.value == together.accuracy.value == 0.6
    assert "accuracy.coin" not in codes(apart)
    assert "accuracy.coin" in codes(together)


def test_overfitting(world: World) -> None:
    pairs = world(400, quality=1.0)
    value = reward_report(pairs).accuracy.value
    assert "accuracy.overfit" not in codes(reward_report(pairs, train_accuracy=value + 0.149))
    assert "accuracy.overfit" in codes(reward_report(pairs, train_accuracy=value + 0.151))


def ensemble(*worlds: list[ScoredPair]) -> list[ScoredPair]:
    return [
        replace(
            pairs[0],
            chosen=tuple(pair.chosen[0] for pair in pairs),
            rejected=tuple(pair.rejected[0] for pair in pairs),
        )
        for pairs in zip(*worlds, strict=True)
    ]


def test_members_that_disagree_are_copies_or_stand_on_different_levels(world: World) -> None:
    noisy = ensemble(*(world(300, quality=0.8, seed=seed) for seed in range(3)))
    assert "members.disagree" in codes(reward_report(noisy))
    sound = ensemble(*(world(300, quality=3.0, seed=seed) for seed in range(3)))
    assert [code for code in codes(reward_report(sound)) if code.startswith("members")] == []
    copies = ensemble(*(world(300, quality=2.0) for _ in range(2)))
    assert "members.identical" in codes(reward_report(copies))
    lifted = [
        replace(
            pair, chosen=(pair.chosen[0] + 9, *pair.chosen[1:]), rejected=(pair.rejected[0] + 9, *pair.rejected[1:])
        )
        for pair in sound
    ]
    assert "members.offset" in codes(reward_report(lifted, combine="worst"))
    assert "members.offset" not in codes(reward_report(lifted, combine="mean"))


def test_findings_come_worst_first_with_threshold_and_fix(world: World) -> None:
    report = reward_report(world(90, length=1.0, noise=0.3, longer=0.75))
    levels = [finding.level for finding in report.findings]
    assert levels == sorted(levels, key=("fatal", "warning", "info", "ok").index)
    assert {"fatal", "warning", "info"} <= set(levels)
    for finding in report.findings:
        assert finding.fix == RULES[finding.code].fix
        assert finding.evidence["threshold"] == RULES[finding.code].threshold
