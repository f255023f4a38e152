"""Verdicts from rows: by bounds, never by point values; what cannot be decided is said, what is missing is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from gate_files import binary, rows_of, source_of, write_evaluation, write_exam, write_rules

from kedge.core.errors import ConfigError, DataError
from kedge.gate.decide import decide, overall
from kedge.gate.evidence import read_evidence
from kedge.gate.results import RuleResult


def decided(tmp_path: Path, rules: str, *folders: Path, part: str = "all") -> tuple[str, dict[str, RuleResult]]:
    evidence = read_evidence([source_of(folder) for folder in folders])
    results = decide(write_rules(tmp_path, rules), evidence, part=part)  # pyright: ignore[reportArgumentType]
    return overall(results), {result.name: result for result in results}


def exam(tmp_path: Path, ppo: list[float], sft: list[float], *, name: str = "mmlu", better: str = "more") -> Path:
    rows = rows_of(name, "letter", {"sft": sft, "ppo": ppo})
    return write_exam(tmp_path / name, rows, better={"letter": better})


@pytest.mark.parametrize(
    ("lost", "gained", "verdict"),
    [(50, 50, "pass"), (170, 30, "fail"), (75, 35, "undecided")],
)
def test_keep_goes_by_the_bounds_of_the_paired_difference(tmp_path: Path, lost: int, gained: int, verdict: str) -> None:
    """2,000 items, margin 3 points; of the last the difference is −2 points and its lower bound −3."""
    both = [1.0] * (1900 - lost - gained)
    sft = [1.0] * lost + [0.0] * gained + both + [0.0] * 100
    ppo = [0.0] * lost + [1.0] * gained + both + [0.0] * 100
    whole, results = decided(tmp_path, "keep: {mmlu: 0.028}", exam(tmp_path, ppo, sft))
    result = results["mmlu"]
    assert whole == result.verdict == verdict
    assert result.value == pytest.approx((gained - lost) / 2000)
    assert result.candidate is not None
    assert result.baseline is not None
    assert result.candidate - result.baseline == pytest.approx(result.value)
    assert result.items == 2000
    assert result.needed == pytest.approx(6.1826 * (lost + gained) / 2000 / 0.028**2, abs=1)


def test_less_is_better_is_turned_round(tmp_path: Path) -> None:
    """Twelve points more refusals are a loss, twelve fewer are not."""
    more, fewer = binary(300, 1000), binary(180, 1000)
    _, worse = decided(
        tmp_path / "a", "keep: {xstest: 0.05}", exam(tmp_path, more, fewer, name="xstest", better="less")
    )
    _, better = decided(
        tmp_path / "b", "keep: {xstest: 0.05}", exam(tmp_path, fewer, more, name="xstest", better="less")
    )
    assert (worse["xstest"].verdict, better["xstest"].verdict) == ("fail", "pass")
    assert worse["xstest"].value == pytest.approx(-0.12)
    assert worse["xstest"].candidate == pytest.approx(0.3)


def test_clusters_widen_the_bounds(tmp_path: Path) -> None:
    """Ten items of a passage that are lost together are one loss, not ten."""
    sft, ppo = binary(1000, 1000), binary(980, 1000)
    passages = [f"passage-{number // 10}" for number in range(1000)]
    alone = write_exam(tmp_path / "alone", rows_of("mmlu", "letter", {"sft": sft, "ppo": ppo}))
    together = write_exam(tmp_path / "together", rows_of("mmlu", "letter", {"sft": sft, "ppo": ppo}, clusters=passages))
    rule = "keep: {mmlu: 0.035}"
    assert decided(tmp_path / "a", rule, alone)[0] == "pass"
    assert decided(tmp_path / "b", rule, together)[0] == "undecided"


@pytest.mark.parametrize(("complied", "verdict"), [(2, "pass"), (6, "undecided"), (30, "fail")])
def test_a_limit_goes_by_the_bounds_of_the_candidate_alone(tmp_path: Path, complied: int, verdict: str) -> None:
    folder = write_exam(
        tmp_path / "e", rows_of("harmbench", "complied", {"ppo": binary(complied, 200)}), better={"complied": "less"}
    )
    whole, results = decided(tmp_path, "limit: {harmbench.complied: 0.05}", folder)
    assert whole == verdict
    assert (results["harmbench.complied"].needed or 0) > (200 if verdict == "undecided" else 0)


def test_length_and_kl_have_limits(tmp_path: Path) -> None:
    lengths = {"sft": [10.0 + n % 5 for n in range(200)], "ppo": [14.0 + n % 5 for n in range(200)]}
    folder = write_evaluation(
        tmp_path / "e",
        {"sft": [0.0] * 200, "ppo": [1.0] * 200},
        lengths=lengths,
        kl=[20.0 + n % 3 for n in range(200)],
    )
    whole, results = decided(tmp_path, "limit: {length.ratio: 1.5, kl: 15}", folder)
    assert whole == "fail"
    assert results["length.ratio"].verdict == "pass"
    assert results["length.ratio"].value == pytest.approx(16 / 12)
    assert results["kl"].verdict == "fail"
    assert results["kl"].value == pytest.approx(20.995)


def test_answers_that_collapse_break_a_limit_too(tmp_path: Path) -> None:
    lengths = {"sft": [40.0 + n % 5 for n in range(200)], "ppo": [10.0 + n % 5 for n in range(200)]}
    folder = write_evaluation(tmp_path / "e", {"sft": [0.0] * 200, "ppo": [1.0] * 200}, lengths=lengths)
    whole, results = decided(tmp_path, "limit: {length.ratio: 1.6, length.shrinkage: 1.6}", folder)
    assert whole == "fail"
    assert results["length.ratio"].verdict == "pass"
    assert results["length.shrinkage"].verdict == "fail"
    assert results["length.shrinkage"].value == pytest.approx(42 / 12)


@pytest.mark.parametrize(("wins", "verdict"), [(460, "pass"), (410, "undecided"), (300, "fail")])
def test_an_improvement_must_be_shown(tmp_path: Path, wins: int, verdict: str) -> None:
    folder = write_evaluation(tmp_path / "e", {"sft": [0.5] * 805, "ppo": binary(wins, 805)})
    whole, results = decided(tmp_path, "improve: {win_rate: {judge: gold}}", folder)
    assert whole == results["win_rate"].verdict == verdict
    assert results["win_rate"].value == pytest.approx(wins / 805, abs=2e-3)


def test_a_longer_answer_is_no_better_one(tmp_path: Path) -> None:
    """The candidate wins where it is longer, and nowhere else: as often as not at equal length."""
    gaps = [(number % 41) - 12 for number in range(820)]
    sft = [0.5] * 820
    ppo = [1.0 if gap > 0 or (gap == 0 and number % 2) else 0.0 for number, gap in enumerate(gaps)]
    lengths = {"sft": [40.0] * 820, "ppo": [40.0 + gap for gap in gaps]}
    folder = write_evaluation(tmp_path / "e", {"sft": sft, "ppo": ppo}, lengths=lengths)
    plain, _ = decided(tmp_path / "a", "improve: {win_rate: {at_equal_length: false}}", folder)
    equal, results = decided(tmp_path / "b", "improve: {win_rate: {at_equal_length: true}}", folder)
    assert (plain, equal) == ("pass", "undecided")
    assert "at equal length, 69.5%" in results["win_rate"].note


def test_any_of_several_gains_is_enough_but_each_is_adjusted(tmp_path: Path) -> None:
    """One-sided p = 0.0415 passes alone; among three it is 0.12, and does not."""
    sft = [1.0] * 40 + [0.0] * 60 + [1.0] * 900
    ppo = [0.0] * 40 + [1.0] * 57 + [0.0] * 3 + [1.0] * 900
    folders = [exam(tmp_path, ppo, sft, name=name) for name in ("one", "two", "three")]
    alone, results = decided(tmp_path / "a", "improve: {one: 0}", folders[0])
    assert alone == "pass"
    assert results["one"].p_value == results["one"].adjusted == pytest.approx(0.0422, abs=1e-3)
    several, results = decided(tmp_path / "b", "improve: {one: 0, two: 0, three: 0}", *folders)
    assert several == "undecided"
    assert results["one"].adjusted == pytest.approx(3 * 0.0422, abs=3e-3)


def test_no_language_may_hide_in_the_mean(tmp_path: Path) -> None:
    """One point of all items is lost, and ten of those in German."""
    languages = ["en"] * 900 + ["de"] * 100
    sft = [1.0] * 1000
    ppo = [1.0] * 900 + [0.0] * 10 + [1.0] * 90
    groups = [{"language": language} for language in languages]
    folder = write_exam(tmp_path / "e", rows_of("mmlu", "letter", {"sft": sft, "ppo": ppo}, groups=groups))
    assert decided(tmp_path / "a", "keep: {mmlu: 0.02}", folder)[0] == "pass"
    whole, results = decided(tmp_path / "b", "{keep: {mmlu: 0.02}, groups: {language: {mmlu: 0.05}}}", folder)
    assert whole == "fail"
    assert results["mmlu (language: de)"].verdict == "fail"
    assert results["mmlu (language: en)"].verdict == "pass"
    assert decided(tmp_path / "c", "keep: {mmlu: {margin: 0.05, by: language}}", folder)[0] == "fail"


def test_a_group_of_one_item_is_undecided(tmp_path: Path) -> None:
    groups = [{"language": "en"}] * 999 + [{"language": "fi"}]
    scores = {"sft": [1.0] * 1000, "ppo": [1.0] * 1000}
    folder = write_exam(tmp_path / "e", rows_of("mmlu", "letter", scores, groups=groups))
    whole, results = decided(tmp_path, "groups: {language: {mmlu: 0.02}}", folder)
    assert whole == "undecided"
    assert results["mmlu (language: fi)"].verdict == "undecided"
    assert results["mmlu (language: en)"].verdict == "pass"


def test_a_margin_that_no_data_of_this_size_could_show_is_refused(tmp_path: Path) -> None:
    same = binary(120, 200)
    with pytest.raises(
        ConfigError, match=r"line 2: keep\.mmlu: a margin of 0\.01 cannot be shown with 200 items"
    ) as error:
        decided(tmp_path, "keep:\n  mmlu: 0.01", exam(tmp_path, same, same))
    assert "the smallest is 0.014, or take more than 268 items" in str(error.value)
    with pytest.raises(ConfigError, match=r"a limit of 0\.01 cannot be shown"):
        decided(tmp_path, "limit: {harm: 0.01}", exam(tmp_path, same, same, name="harm", better="less"))


def test_equal_scores_of_few_clusters_prove_nothing(tmp_path: Path) -> None:
    """Their variance is 0, but there are thirty of them."""
    scores = {"sft": [1.0] * 300, "ppo": [1.0] * 300}
    clusters = [f"c{number % 30}" for number in range(300)]
    folder = write_exam(tmp_path / "e", rows_of("mmlu", "letter", scores, clusters=clusters))
    _, results = decided(tmp_path, "keep: {mmlu: 0.1}", folder)
    assert results["mmlu"].low == pytest.approx(-2.7055 / 32.7055, abs=1e-4)


def test_a_margin_that_has_little_power_says_which_would_have_it(tmp_path: Path) -> None:
    sft = [1.0] * 30 + [0.0] * 25 + [1.0] * 445
    ppo = [0.0] * 30 + [1.0] * 25 + [1.0] * 445
    _, results = decided(tmp_path, "keep: {mmlu: 0.02}", exam(tmp_path, ppo, sft))
    assert results["mmlu"].verdict == "undecided"
    assert results["mmlu"].note == "80% power with these items needs a margin of 0.037"
    assert results["mmlu"].needed == 1701


def test_what_nobody_measured_names_the_stage_to_add(tmp_path: Path) -> None:
    folder = exam(tmp_path, binary(600, 1000), binary(600, 1000))
    rules = "improve: {win_rate: {judge: gold}}\nkeep:\n  mmlu: 0.03\n  mmlv: 0.03\nlimit: {kl: 15, mmlu.leter: 0.5}\n"
    with pytest.raises(ConfigError) as error:
        decided(tmp_path, rules, folder)
    text = str(error.value)
    assert "4 problem(s)" in text
    assert (
        "line 1: improve.win_rate: no stage of `from` has scores or comparisons by 'gold' of both models. Add" in text
    )
    assert "line 4: keep.mmlv: no stage of `from` has the exam 'mmlv' (did you mean 'mmlu'?)" in text
    assert "exam: {kind: exam, models: [BASELINE, CANDIDATE], exams: [mmlv]}" in text
    assert "line 5: limit.kl: no stage of `from` has the KL of the candidate" in text
    assert "mmlu has no metric 'leter' (did you mean 'letter'?)" in text


def test_models_that_answered_other_items_are_not_compared(tmp_path: Path) -> None:
    one = write_exam(tmp_path / "1", rows_of("mmlu", "letter", {"sft": binary(6, 10)}), items_hash="aaa")
    two = write_exam(tmp_path / "2", rows_of("mmlu", "letter", {"ppo": binary(6, 10)}), items_hash="bbb")
    with pytest.raises(ConfigError, match="items_hash aaa and bbb"):
        read_evidence([source_of(one), source_of(two)])
    three = write_exam(
        tmp_path / "3", rows_of("mmlu", "letter", {"ppo": binary(6, 10)}), items_hash="aaa", settings={"shots": 0}
    )
    with pytest.raises(ConfigError, match="other settings"):
        read_evidence([source_of(one), source_of(three)])


def test_a_lost_row_is_noticed(tmp_path: Path) -> None:
    folder = exam(tmp_path, binary(600, 1000), binary(600, 1000))
    file = folder / "items.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(DataError, match=r"999 items of mmlu\.letter by ppo, and exam\.json beside it counts 1,000"):
        read_evidence([source_of(folder)])


def test_an_exam_twice_is_refused(tmp_path: Path) -> None:
    folder = exam(tmp_path, binary(600, 1000), binary(600, 1000))
    with pytest.raises(DataError, match="more than once"):
        read_evidence([source_of(folder), source_of(folder)])


def test_half_of_the_items_are_kept_for_the_promotion(tmp_path: Path) -> None:
    folder = exam(tmp_path, binary(600, 1000), binary(600, 1000))
    rules = "{keep: {mmlu: 0.03}, reserve: 0.5}"
    counts = [decided(tmp_path, rules, folder, part=part)[1]["mmlu"].items for part in ("open", "reserved", "all")]
    assert counts[0] + counts[1] == counts[2] == 1000
    assert 440 < counts[0] < 560
