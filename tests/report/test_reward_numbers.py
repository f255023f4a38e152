"""Numbers of the reward report against arithmetic on paper."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kedge.core.errors import ConfigError, DataError, NumericsError
from kedge.core.stats import BOOTSTRAP_DRAWS
from kedge.report.reward import ScoredPair, reward_report
from kedge.report.reward.accuracy import bootstrap, share, wilson
from kedge.report.reward.numbers import numbers

Make = Callable[..., ScoredPair]


def test_bootstrap_draws_prompts_not_pairs() -> None:
    # 100 prompts of 4 pairs each that are right or wrong together: a resample is a binomial of 100, not of 400.
    right = np.repeat([1.0] * 70 + [0.0] * 30, 4)
    interval = bootstrap(right, np.repeat(np.arange(100), 4))
    below = {k: sum(math.comb(100, i) * 0.7**i * 0.3 ** (100 - i) for i in range(k + 1)) for k in range(101)}
    low, high = round(interval.low * 100), round(interval.high * 100)
    noise = 4 * math.sqrt(0.025 * 0.975 / BOOTSTRAP_DRAWS)
    assert below[low - 1] - noise <= 0.025 <= below[low] + noise
    assert below[high - 1] - noise <= 0.975 <= below[high] + noise
    assert interval.high - interval.low > 1.8 * (wilson(280, 400).high - wilson(280, 400).low)


def test_bootstrap_weighs_prompts_by_their_pairs() -> None:
    # Prompt 0: one right pair; prompt 1: three wrong ones. Drawn twice: 1, then 1/4 (not 1/2) in the mixed half, or 0.
    x_B, prompt_B = np.array([1.0, 0.0, 0.0, 0.0]), np.array([0, 1, 1, 1])
    assert bootstrap(x_B, prompt_B).low == 0.0
    assert bootstrap(x_B, prompt_B).high == 1.0
    # 1 of 50 prompts is large and wrong: it is absent from 36 % of resamples, which are then all right.
    sizes = np.array([200] + [1] * 49)
    many = bootstrap(np.repeat([0.0] + [1.0] * 49, sizes), np.repeat(np.arange(50), sizes))
    assert many.high == 1.0
    # It is there at most 3 times in 98.2 % and at most 2 in 92.2 %, so the low end has it three times: 47 / (47 + 600).
    assert many.low == pytest.approx(47 / 647)


def test_headline_interval_is_wilson_for_distinct_prompts_and_the_wider_for_shared_ones() -> None:
    right = np.array([1.0] * 7 + [0.5] * 2 + [0.0])
    alone = share(right, np.arange(10))
    assert (alone.value, alone.n, alone.ties) == (0.8, 10, 2)
    assert (alone.low, alone.high) == (wilson(8, 10).low, wilson(8, 10).high)
    # Without any error the bootstrap has no width; Wilson's low end is n / (n + z^2).
    perfect = share(np.ones(6), np.array([0, 0, 0, 1, 1, 1]))
    assert perfect.low == pytest.approx(6 / (6 + 1.959964**2))
    assert perfect.high == 1.0
    torn = share(np.array([1.0] * 20 + [0.0] * 20), np.repeat([0, 1], 20))
    assert (torn.low, torn.high) == (0.0, 1.0)


def test_accuracy_counts_ties_half(make: Make) -> None:
    pairs = [make(2, 1, prompt="a"), make(1, 1, prompt="b"), make(0, 3, prompt="c"), make(5, 4, prompt="d")]
    report = reward_report(pairs)
    assert report.accuracy.value == (1 + 0.5 + 0 + 1) / 4
    assert report.accuracy.ties == 1
    assert (report.pairs, report.prompts, report.members, report.errors) == (4, 4, 1, 1)


def test_combinations_of_members(make: Make) -> None:
    # mean: 3 against 2.5; worst: 0 against 2; mean - ½ variance: 3 - ½·9 = -1.5 against 2.5 - ½·0.25 = 2.375.
    pair = make((0.0, 6.0), (2.0, 3.0))
    assert reward_report([pair]).accuracy.value == 1.0
    assert reward_report([pair], combine="worst").accuracy.value == 0.0
    error = reward_report([pair], combine="uncertainty").worst_errors[0]
    assert (error.chosen_score, error.rejected_score) == (-1.5, 2.375)
    assert reward_report([pair], combine="uncertainty", uncertainty_coef=0.01).accuracy.value == 1.0


def test_length_rule_and_balanced_accuracy(make: Make) -> None:
    pairs = [
        make(1, 0, lengths=(30, 10), prompt="a"),  # longer chosen, right
        make(1, 0, lengths=(20, 10), prompt="b"),  # longer chosen, right
        make(0, 1, lengths=(11, 10), prompt="c"),  # longer chosen, wrong
        make(1, 0, lengths=(15, 10), prompt="d"),  # longer chosen, right
        make(0, 1, lengths=(10, 90), prompt="e"),  # longer rejected, wrong
        make(1, 1, lengths=(10, 12), prompt="f"),  # longer rejected, tie
        make(1, 0, lengths=(10, 10), prompt="g"),  # equal, right
    ]
    length = reward_report(pairs).length
    assert length.rule.value == (4 + 0.5) / 7
    assert length.rule.ties == 1
    assert length.longer_chosen
    assert length.longer_rejected
    assert length.equal
    assert length.balanced
    assert (length.longer_chosen.model.value, length.longer_chosen.rule, length.longer_chosen.model.n) == (0.75, 1, 4)
    assert (length.longer_rejected.model.value, length.longer_rejected.rule) == (0.25, 0)
    assert (length.equal.model.value, length.equal.rule) == (1, 0.5)
    assert length.balanced.value == 0.5
    below = math.hypot(0.75 - wilson(3, 4).low, 0.25 - wilson(0.5, 2).low) / 2
    assert length.balanced.low == pytest.approx(0.5 - below)
    # right in 4.5 of 7 against 4.5 by "longer" and 2.5 by "shorter"
    assert length.gain_over_longer.value == pytest.approx(0)
    assert length.gain_over_shorter.value == pytest.approx(2 / 7)


def test_correlations(make: Make) -> None:
    # differences 1, 2, 6 against gaps 10, 30, 20: ranks 1 2 3 and 1 3 2, so rho = 1 - 6·2/(3·8) = 0.5
    # Pearson: deviations -2 -1 3 and -10 10 0: 10 / sqrt(14 · 200)
    pairs = [
        make(1, 0, lengths=(15, 5), prompt="a"),
        make(2, 0, lengths=(35, 5), prompt="b"),
        make(6, 0, lengths=(25, 5), prompt="c"),
    ]
    length = reward_report(pairs).length
    assert length.difference_spearman == pytest.approx(0.5)
    assert length.difference_pearson == pytest.approx(10 / math.sqrt(2800))
    # answers: scores 1 2 6 0 0 0 (ranks 4 5 6 2 2 2), lengths 15 35 25 5 5 5 (ranks 4 6 5 2 2 2)
    assert length.score_spearman == pytest.approx(
        (0.5**2 + 2 * 1.5 * 2.5 + 3 * 1.5**2) / (0.5**2 + 1.5**2 + 2.5**2 + 6.75)
    )
    assert reward_report([make(1, 0), make(2, 0)]).length.difference_spearman is None


def test_bins_by_length_gap_never_cross_zero(make: Make) -> None:
    gaps = (-8, -4, -3, -1, 0, 0, 2, 5)
    pairs = [make(at % 2, 0.5, lengths=(20 + gap, 20), prompt=str(at)) for at, gap in enumerate(gaps)]
    bins = reward_report(pairs).by_length_gap
    assert [(bin.low, bin.high, bin.accuracy.n) for bin in bins] == [
        (-8, -8, 1), (-4, -4, 1), (-3, -3, 1), (-1, -1, 1), (0, 0, 2), (2, 2, 1), (5, 5, 1)
    ]  # fmt: skip
    assert [bin.accuracy.value for bin in bins] == [0, 1, 0, 1, 0.5, 0, 1]


def test_bins_by_margin_of_the_data_and_of_the_scores(make: Make) -> None:
    margins = (3.0, 1.0, None, 1.0, 3.0, 3.0)
    scores = (4.0, -1.0, 9.0, 2.0, 3.0, -5.0)
    pairs = [make(score, 0, margin=margin, prompt=str(score)) for margin, score in zip(margins, scores, strict=True)]
    report = reward_report(pairs)
    assert [(bin.low, bin.high, bin.accuracy.value) for bin in report.by_data_margin] == [
        (1, 1, 0.5), (3, 3, pytest.approx(2 / 3))
    ]  # fmt: skip
    assert report.without_margin == 1
    assert [(bin.low, bin.accuracy.value) for bin in report.by_score_margin] == [
        (1, 0), (2, 1), (3, 1), (4, 1), (5, 0), (9, 1)
    ]  # fmt: skip


def test_calibration_bins_error_and_log_loss(make: Make) -> None:
    # 40 pairs at confidence 3/4 of which 30 are right, 40 at 9/10 of which 28 are.
    three, nine = math.log(3), math.log(9)
    scores = [three] * 30 + [-three] * 10 + [nine] * 28 + [-nine] * 12
    found = reward_report([make(score, 0, prompt=str(at)) for at, score in enumerate(scores)]).calibration
    assert [bin.confidence for bin in found.bins] == pytest.approx([0.75, 0.9])
    assert [bin.observed.value for bin in found.bins] == pytest.approx([0.75, 0.7])
    assert found.error == pytest.approx(0.5 * 0.0 + 0.5 * 0.2)
    assert found.excess.value == pytest.approx(0.825 - 58 / 80)
    expected = -(30 * math.log(0.75) + 10 * math.log(0.25) + 28 * math.log(0.9) + 12 * math.log(0.1)) / 80
    assert found.log_loss == pytest.approx(expected)


def test_temperature_of_one_size_of_difference(make: Make) -> None:
    # |d| = 2 and 3 of 4 right: sigmoid(2 / T) = 3/4, so T = 2 / log 3, and the loss there is the entropy of 1/4.
    found = reward_report([make(score, 0, prompt=str(score)) for score in (2.0, 2.0, 2.0, -2.0)]).calibration
    assert found.temperature == pytest.approx(2 / math.log(3))
    assert found.log_loss_at_temperature == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    tiny = reward_report([make(score * 1e-6, 0, prompt=str(score)) for score in (2.0, 2.0, 2.0, -2.0)]).calibration
    assert tiny.temperature == pytest.approx(2e-6 / math.log(3))


@pytest.mark.parametrize("scores", [(1.0, 2.0, 0.0), (1.0, -2.0, 0.5), (0.0, 0.0, 0.0)])
def test_no_temperature_where_all_are_right_or_most_are_wrong(make: Make, scores: tuple[float, ...]) -> None:
    found = reward_report([make(score, 0, prompt=str(at)) for at, score in enumerate(scores)]).calibration
    assert (found.temperature, found.log_loss_at_temperature) == (None, None)


def test_agreement_of_members(make: Make) -> None:
    pairs = [
        make((1.0, 12.0, 5.0), (0.0, 10.0, 1.0), prompt="a"),  # + + +
        make((1.0, 10.0, 5.0), (0.0, 12.0, 1.0), prompt="b"),  # + - +
        make((0.0, 10.0, 1.0), (1.0, 12.0, 1.0), prompt="c"),  # - - 0
        make((1.0, 12.0, 1.0), (0.0, 10.0, 5.0), prompt="d"),  # + + -
    ]
    found = reward_report(pairs).agreement
    assert found
    assert found.pairwise == ((0, 1, 0.75), (0, 2, 0.5), (1, 2, 0.25))
    assert found.agreement == 0.5
    assert [member.accuracy.value for member in found.members] == [0.75, 0.5, 0.625]
    assert [member.score_mean for member in found.members] == [0.5, 11.0, 2.5]
    assert found.unanimous
    assert found.divided
    assert (found.unanimous.n, found.unanimous.value) == (1, 1)
    # b: mean 16/3 against 13/3; c: 11/3 against 14/3; d: 14/3 against 5
    assert (found.divided.n, found.divided.value) == (3, pytest.approx(1 / 3))


def test_disagreement_ignores_the_level_of_a_member(make: Make) -> None:
    # Centred, members are ±1 and ±3: spread 1 between them on every answer, their mean ±2 spreads by 2 over answers.
    found = reward_report([make((1.0, 103.0), (-1.0, 97.0)), make((-1.0, 97.0), (1.0, 103.0))]).agreement
    assert found
    assert found.disagreement == pytest.approx(0.5)
    assert found.offset_spread == pytest.approx(50 / 2)


def test_histogram_holds_every_answer(make: Make) -> None:
    report = reward_report([make(0.0, 3.0), make(2.95, 1.55), make(3.0, 0.05)])
    counts = dict(enumerate(report.histogram.chosen))
    assert (report.histogram.edges[0], report.histogram.edges[-1], len(counts)) == (0, 3, 30)
    assert {at for at, count in counts.items() if count} == {0, 29}
    assert {at for at, count in enumerate(report.histogram.rejected) if count} == {0, 15, 29}
    assert sum(report.histogram.chosen) == sum(report.histogram.rejected) == 3
    flat = reward_report([make(7.0, 7.0)]).histogram
    assert (sum(flat.chosen), sum(flat.rejected), flat.edges[0] < 7 < flat.edges[-1]) == (1, 1, True)


def test_worst_errors_come_by_the_wrong_margin(make: Make) -> None:
    pairs = [make(-float(at), 0, where=f"f:{at}", prompt=str(at)) for at in range(20)]
    report = reward_report([make(1, 0, where="right", prompt="x"), *pairs])
    assert [error.pair.where for error in report.worst_errors] == [f"f:{at}" for at in range(19, 7, -1)]
    assert report.errors == 19


def test_order_of_pairs_changes_nothing(world: Callable[..., list[ScoredPair]]) -> None:
    drawn = world(300, quality=1.0, length=0.3, longer=0.6)
    pairs = [replace(pair, prompt=str(at * at % 37)) for at, pair in enumerate(drawn)]
    one, other = reward_report(pairs), reward_report(pairs[::-1])
    assert one.prompts == 19  # squares modulo 37
    assert other.accuracy == one.accuracy
    assert other.bootstrap == one.bootstrap
    assert other.length.gain_over_longer.low == pytest.approx(one.length.gain_over_longer.low)
    assert [finding.code for finding in other.findings] == [finding.code for finding in one.findings]


def test_bad_pairs_are_refused_with_their_place(make: Make) -> None:
    with pytest.raises(NumericsError, match=r"a\.jsonl:7: member 1 scored the rejected answer nan"):
        make((1.0, 2.0), (0.0, math.nan), where="a.jsonl:7")
    with pytest.raises(NumericsError, match=r"a\.jsonl:7: the margin is inf"):
        make(1.0, 0.0, margin=math.inf, where="a.jsonl:7")
    with pytest.raises(DataError, match=r"a\.jsonl:8: 2 score\(s\) of the chosen answer and 1 of the rejected"):
        make((1.0, 2.0), 0.0, where="a.jsonl:8")
    with pytest.raises(DataError, match=r"a\.jsonl:9: answers of -1 and 4 tokens"):
        make(1.0, 0.0, lengths=(-1, 4), where="a.jsonl:9")
    with pytest.raises(DataError, match=r"b:2: scored by 2 member\(s\), but b:1 by 1"):
        reward_report([make(1.0, 0.0, where="b:1"), make((1.0, 1.0), (0.0, 0.0), where="b:2")])
    with pytest.raises(DataError, match="no scored pairs"):
        reward_report([])


def test_bad_settings_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"combine: found 'worse' \(did you mean 'worst'\?\)"):
        reward_report([make(1, 0)], combine="worse")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"train_accuracy: found 87"):
        reward_report([make(1, 0)], train_accuracy=87)


def test_accuracy_by_group(make: Make) -> None:
    """Three right of four in German, one of two in English, each with Wilson's interval of its own pairs."""
    outcomes = [("de", 1), ("de", 1), ("de", -1), ("en", 1), ("en", -1), ("de", 1)]
    pairs = [make(float(sign), 0.0, prompt=str(row)) for row, (_, sign) in enumerate(outcomes)]
    report = reward_report(pairs, groups={"language": [language for language, _ in outcomes]})
    german, english = report.by_group["language"]["de"], report.by_group["language"]["en"]
    assert (german.value, german.n, english.value, english.n) == (0.75, 4, 0.5, 2)
    assert (german.low, german.high) == (wilson(3, 4).low, wilson(3, 4).high)
    rows = {row.name: row.value for row in numbers(report)}
    assert (rows["accuracy, language de"], rows["accuracy, language en"]) == ("75.0 %", "50.0 %")
    assert report.as_dict()["by_group"]["language"]["en"]["n"] == 2
    assert reward_report(pairs).by_group == {}
