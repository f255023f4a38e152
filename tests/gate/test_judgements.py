"""Win rates by judges, as rules read them: both orders, at equal length by our own bounds; files that were changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from gate_files import Verdicts, source_of, write_evaluation, write_judgements, write_rules

from kedge.core.errors import ConfigError, DataError
from kedge.gate.decide import decide
from kedge.gate.evidence import read_evidence
from kedge.gate.planned import unasked
from kedge.gate.results import RuleResult
from kedge.gate.suggested import suggested_rules
from kedge.stages.evaluate.settings import EvaluateSettings

PROMPTS = 400


def evaluation(folder: Path, verdicts: Mapping[str, Verdicts]) -> Path:
    same = [0.5] * PROMPTS
    return write_judgements(write_evaluation(folder, {"sft": same, "ppo": same}, source="reward"), verdicts)


def decided(folder: Path, judge: str, *, names: Mapping[str, str] | None = None, more: str = "") -> RuleResult:
    rules = write_rules(folder / "rules", f"improve: {{win_rate: {{judge: {judge}{more}}}}}")
    source = source_of(folder, names) if names else source_of(folder)
    return decide(rules, read_evidence([source]))[0]


def wins(count: int, *, gap: int = 0) -> list[tuple[float | None, float | None, int, int]]:
    """So many wins among all prompts, spread over answers of all lengths."""
    return [
        (float(number * count % PROMPTS < count), float(number * count % PROMPTS < count), 40 + number % 9 + gap, 44)
        for number in range(PROMPTS)
    ]


@pytest.mark.parametrize(("count", "verdict"), [(250, "pass"), (205, "undecided"), (150, "fail")])
def test_a_judge_may_show_the_improvement(tmp_path: Path, count: int, verdict: str) -> None:
    result = decided(evaluation(tmp_path, {"gpt": wins(count)}), "gpt")
    assert result.verdict == verdict
    assert result.value == pytest.approx(count / PROMPTS, abs=0.01)
    assert result.note == f"by gpt at equal length, {count / PROMPTS:.1%} as it is"


def test_orders_that_disagree_are_ties_and_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    verdicts: list[tuple[float | None, float | None, int, int]] = [
        *[(1.0, 0.0, 40 + number % 5, 42) for number in range(200)],
        *[(1.0, 1.0, 40 + number % 5, 42) for number in range(100)],
        *[(None, 1.0, 40, 42)] * 100,
    ]
    result = decided(evaluation(tmp_path, {"gpt": verdicts}), "gpt", more=", at_equal_length: false")
    assert result.value == pytest.approx((200 * 0.5 + 100) / 300)
    assert result.items == 300


def test_a_judge_that_likes_length_shows_no_improvement(tmp_path: Path) -> None:
    """The candidate wins where it is longer, and nowhere else: as often as not at equal length."""
    gaps = [(number % 41) - 12 for number in range(PROMPTS)]
    won = [float(gap > 0 or (gap == 0 and number % 2)) for number, gap in enumerate(gaps)]
    verdicts = [(is_won, is_won, 40 + gap, 40) for is_won, gap in zip(won, gaps, strict=True)]
    folder = evaluation(tmp_path, {"gpt": verdicts})
    assert decided(folder, "gpt", more=", at_equal_length: false").verdict == "pass"
    assert decided(folder, "gpt").verdict == "undecided"


def test_of_several_judges_most_decide(tmp_path: Path) -> None:
    folder = evaluation(tmp_path, {"a": wins(280), "b": wins(280), "c": wins(100)})
    plain = ", at_equal_length: false"
    assert decided(folder, "majority", more=plain).value == pytest.approx(280 / PROMPTS)
    assert decided(folder, "c", more=plain).verdict == "fail"


@pytest.mark.parametrize(
    ("judge", "names", "text"),
    [
        ("gtp", None, r"scores or comparisons by 'gtp' \(there are gpt, reward \(did you mean 'gpt'\?\)\)"),
        ("gpt", {"candidate": "sft", "baseline": "ppo"}, "the baseline as its first model, with which 'gpt' compares"),
    ],
)
def test_what_no_judge_said_is_named(tmp_path: Path, judge: str, names: Mapping[str, str] | None, text: str) -> None:
    folder = evaluation(tmp_path, {"gpt": wins(250)})
    with pytest.raises(ConfigError, match=text):
        decided(folder, judge, names=names)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda lines: lines[1:], r"399 comparisons of ppo by gpt, and evaluation.json beside it counts 400"),
        (lambda lines: [*lines, "{"], r"judgements.jsonl:401: not a comparison"),
        (lambda lines: [lines[0].replace("1.0", "7.0"), *lines[1:]], "verdicts are 1, 0.5, 0 or null"),
    ],
)
def test_a_file_that_was_changed_is_refused(tmp_path: Path, damage: object, text: str) -> None:
    folder = evaluation(tmp_path, {"gpt": wins(250)})
    file = folder / "judgements.jsonl"
    file.write_text("\n".join(damage(file.read_text().splitlines())))  # pyright: ignore
    with pytest.raises(DataError, match=text):
        read_evidence([source_of(folder)])


def test_a_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    folder = evaluation(tmp_path, {"gpt": wins(250)})
    (folder / "judgements.jsonl").unlink()
    with pytest.raises(DataError, match=r"judgements\.jsonl: not there; run the stage again"):
        read_evidence([source_of(folder)])


def test_a_recipe_is_told_which_judges_it_has(tmp_path: Path) -> None:
    panel = [{"kind": "judge", "url": "http://127.0.0.1:1/v1", "model": name} for name in ("gpt", "claude")]
    stage = EvaluateSettings.model_validate({"kind": "evaluate", "models": ["a", "b"], "prompts": "p", "judge": panel})
    for judge in ("gpt", "majority"):
        rules = write_rules(tmp_path, f"improve: {{win_rate: {{judge: {judge}}}}}")
        assert unasked(rules, [stage], tmp_path) == []
    rules = write_rules(tmp_path, "improve: {win_rate: {judge: gtp}}")
    ((_, text),) = unasked(rules, [stage], tmp_path)
    assert text == (
        "no evaluate stage of `from` has `gtp` (did you mean 'gpt'?); there are gpt, claude, majority: nobody "
        "would say who wins"
    )


def test_rules_to_start_from_name_the_judge(tmp_path: Path) -> None:
    folder = evaluation(tmp_path, {"gpt": wins(250)})
    file = folder / "evaluation.json"
    about = json.loads(file.read_text())
    file.write_text(json.dumps({**about, "comparisons": {"ppo": {"reward": {}}}}))
    assert "win_rate: {judge: gpt," in suggested_rules([folder])
