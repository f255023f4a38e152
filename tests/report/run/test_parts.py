"""The parts of a report by themselves: words, costs, samples, tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.monitor.doctor import History
from kedge.monitor.doctor.ppo import story
from kedge.report.run.curves import plots
from kedge.report.run.members import names_of_members, side_by_side
from kedge.report.run.methods import what_was_run
from kedge.report.run.overoptimisation import gold_plot
from kedge.report.run.run_records import read_run
from kedge.report.run.samples import compare, word_diff
from kedge.report.run.summary import ends
from kedge.report.run.tables import cost_of, evaluation_table
from kedge.runs.folder import Run
from kedge.testing.streams import ppo_metrics

MakeRun = Callable[..., Path]


def texts(before: str, after: str) -> tuple[str, str]:
    """Both texts, put together again from the pieces."""
    pieces = word_diff(before, after)
    old = "".join(one.text for one in pieces if one.kind != "new").split()
    new = "".join(one.text for one in pieces if one.kind != "gone")
    return " ".join(old), new


@pytest.mark.parametrize(
    ("before", "after"),
    [("a b c", "a x c"), ("", "all new"), ("all gone", ""), ("same", "same"), ("one\ntwo", "one\n\ntwo three")],
)
def test_pieces_hold_both_texts(before: str, after: str) -> None:
    assert texts(before, after) == (" ".join(before.split()), after)


def test_what_changed_is_marked_and_nothing_else() -> None:
    found = [(one.kind, one.text) for one in word_diff("I like red apples", "I like green apples")]
    assert found == [("same", "I like "), ("gone", "red "), ("new", "green "), ("same", "apples")]


def test_very_long_texts_are_not_matched() -> None:
    found = word_diff("a " * 1500, "b " * 1500)
    assert [one.kind for one in found] == ["gone", "new"]


def test_samples_are_compared_at_three_steps_and_prompts_met_once_come_last() -> None:
    samples = [{"step": step, "prompt": "p", "answer": f"a{step}"} for step in (0, 5, 10, 15, 20)]
    samples += [{"step": step, "prompt": f"once {step}", "answer": "x"} for step in (3, 9)]
    found = compare(samples)
    assert [(one.title, [answer.when for answer in one.answers]) for one in found.comparisons] == [
        ("p", ["before", "during", "after"]),
        ("once 9", ["seen once"]),
        ("once 3", ["seen once"]),
    ]
    assert [answer.step for answer in found.comparisons[0].answers] == [0, 10, 20]
    assert found.left_out == 0


def test_more_prompts_than_are_shown_are_counted() -> None:
    assert compare([{"step": 1, "prompt": str(at), "answer": ""} for at in range(13)]).left_out == 5


def test_costs_add_up(ppo_run: MakeRun) -> None:
    cost = cost_of(read_run(ppo_run(10)).stages[0])
    assert cost.seconds == pytest.approx(19.0)
    assert dict(cost.by_phase) == pytest.approx({"generating": 9.0, "judging": 3.0, "learning": 7.0})
    rates = [record["tokens/per_second"] for record in ppo_metrics(10)]
    assert cost.tokens == pytest.approx(1.9 * sum(rates))


def test_time_that_no_phase_explains_is_other(tmp_path: Path, ppo_run: MakeRun) -> None:
    folder = ppo_run(1)
    with Run.open(folder, for_writing=True) as run:
        run.log({"time/step": 5.0, "time/judge": 1.0}, 2)
    assert dict(cost_of(read_run(folder).stages[0]).by_phase)["other"] == pytest.approx(4.0)


def test_parts_of_less_than_a_hundredth_are_other(ppo_run: MakeRun) -> None:
    folder = ppo_run(1)
    with Run.open(folder, for_writing=True) as run:
        run.log({"time/step": 100.0, "time/update": 80.0, "time/save": 15.0, "time/data": 0.5}, 2)
    by_phase = dict(cost_of(read_run(folder).stages[0]).by_phase)
    assert by_phase == pytest.approx({"learning": 80.7, "saving": 15.0, "other": 6.2})


def test_ends_are_means_over_a_tenth_of_the_finite_values_as_the_doctor_has_them() -> None:
    records: list[dict[str, Any]] = [{"a": float(at)} for at in range(20)]
    records[5]["a"] = math.nan
    assert ends(records, "a") == (0.5, 18.5)  # 19 finite values, two at each end
    steps = [{"step": at, "reward/mean": float(at)} for at in range(20)]
    assert ends(steps, "reward/mean") == (0.5, 18.5)
    told = History(kind="ppo", status="done", settings={}, metrics=steps, events=[], samples=[])
    assert story(told) == "the reward went from 0.5 to 18.5 in 20 steps"
    assert ends(records[:1], "a") is None


def test_kinds_that_are_not_known_here_are_told_by_name() -> None:
    assert what_was_run("grpo", {"from": "sft"}) == "A stage of kind `grpo` starting from `sft`."
    assert what_was_run("evaluate", {"models": ["a", "b"], "prompts": "p.jsonl"}) == (
        "Evaluation: the answers of `a` and `b` to `p.jsonl`, compared."
    )


def test_every_metric_has_a_curve_or_is_a_cost(ppo_run: MakeRun) -> None:
    folder = ppo_run(20)
    with Run.open(folder, for_writing=True) as run:
        run.log({"mine/own": 3.0}, 21)
    titles = [one.title for one in plots(read_run(folder).stages[0])]
    assert titles[:2] == ["Reward", "KL from the reference"]
    assert {"mine/own", "policy/ratio_max", "policy/mismatch", "length/max"} <= set(titles)
    assert not any(title.startswith("time/") for title in titles)
    assert len(titles) == len(set(titles))


def test_training_and_heldout_values_share_a_chart(pipeline_run: Path) -> None:
    (loss,) = plots(read_run(pipeline_run).stages[1])
    assert loss.title == "Loss"
    assert [one.name for one in loss.series] == ["training", "held out"]
    assert [value for value in loss.series[1].values if value is not None] == pytest.approx(
        [2.5 - 1 / 3, 2.5 - 2 / 3, 1.5]
    )


def test_gold_is_shown_over_the_root_of_kl_in_order() -> None:
    records = [
        {"step": 1, "kl/mean": 4.0, "reward/mean": 100.0, "gold/mean": 1.0},
        {"step": 2, "kl/mean": 1.0, "reward/mean": 300.0, "gold/mean": 3.0},
        {"step": 3, "kl/mean": -0.1, "reward/mean": 5.0, "gold/mean": 3.0},
        {"step": 4, "kl/mean": 9.0, "reward/mean": 5.0},
    ]
    found = gold_plot(records)
    assert found is not None
    assert list(found.x) == [1.0, 2.0]
    assert [(one.name, list(one.values)) for one in found.series] == [
        ("proxy × 0.01", [3.0, 1.0]),
        ("gold", [3.0, 1.0]),
    ]
    assert found.curve is None
    assert "The law of overoptimisation shows no peak: too few points: 2 usable points" in found.note
    assert gold_plot([{"step": 1, "kl/mean": 1.0, "reward/mean": 1.0}]) is None


def test_evaluation_has_a_column_a_model(pipeline_run: Path) -> None:
    evaluation = read_run(pipeline_run).stages[4].evaluation
    assert evaluation is not None
    table = evaluation_table(evaluation)
    assert table.head == ("", "sft", "ppo")
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["reward: mean score"] == ("1.000 [0.500, 1.500]", "2.250 [1.750, 2.750]")
    assert rows["reward: wins over sft"] == ("–", "81.0 % [70.0, 90.0]")
    assert rows["reward: wins at equal length"] == ("–", "–")
    assert rows["reward: answers without a score"] == ("–", "3")
    assert rows["KL from sft, nats"] == ("–", "5.50 [5.00, 6.00]")


def test_the_fall_of_gold_is_told_by_means_and_not_by_the_luckiest_step() -> None:
    gold = [1.0, 2.0, 3.0, 9.0, 3.0, 2.0, 0.0, -1.0, -2.0, -3.0]
    records = [
        {"step": at + 1, "kl/mean": float(at), "reward/mean": 1.0, "gold/mean": one} for at, one in enumerate(gold)
    ]
    found = gold_plot(records)
    assert found is not None
    # Sums of five: 18, 19 (steps 2 to 6, KL 1 to 5), 17, 13, 2, -4.
    assert "gold was best at a KL of 3 nats" in found.note
    assert "at 3.8, and has fallen to -0.8 at 9 nats" in found.note
    rising = gold_plot([{**one, "gold/mean": float(at)} for at, one in enumerate(records)])
    assert rising is not None
    assert "was best" not in rising.note


def test_members_of_an_ensemble_are_drawn_side_by_side() -> None:
    records = [
        {"step": 3 * member + step, "train/member": member + 1, "train/member_step": step, "train/loss": loss}
        for member, losses in enumerate([(0.9, 0.7, 0.5), (0.8, 0.6, 0.4)])
        for step, loss in enumerate(losses, start=1)
    ]
    rows, members = side_by_side(records)
    assert members == (1, 2)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["train/loss of 2"] for row in rows] == [0.8, 0.6, 0.4]
    assert dict(names_of_members({"train/loss": "training"}, members)) == {
        "train/loss of 1": "training, member 1",
        "train/loss of 2": "training, member 2",
    }
    assert side_by_side([{"step": 1, "train/loss": 1.0}]) == ([{"step": 1, "train/loss": 1.0}], ())
