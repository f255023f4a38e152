"""What is measured of a judge: closed forms, the field's libraries, planted biases within their intervals, symmetry."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import statsmodels.api as sm  # pyright: ignore[reportMissingTypeStubs]
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_judge import Planted, make_items, reply, swapped

from kedge.core.errors import DataError
from kedge.feedback import cohen_kappa as kappa_of_two
from kedge.feedback import fleiss_kappa, raw_agreement
from kedge.feedback.alt_test import Choice
from kedge.feedback.canaries import CANARIES, CanaryReplies, harmless, judge_canary
from kedge.feedback.clustered import Measured, clustered_share, first_slope, of_sums
from kedge.feedback.judge_bias import Shown, family_bias, length_bias, position_bias
from kedge.feedback.judge_figures import CHOICES, JudgedItem, Replies, majority_of, measure, readable, shown_replies
from kedge.feedback.trust import make_trust

DATA = os.environ.get("KEDGE_EVAL_DATA", "")
_CODE: dict[Choice | None, int] = {"first": 0, "second": 1, "tie": 2, None: 3}
choices = st.sampled_from(CHOICES)
replies_of = st.sampled_from([*CHOICES, None])


def item(*verdicts: Choice, prompt: object = None, lengths: tuple[int, int] = (3, 2)) -> JudgedItem:
    people = {f"p{place}": verdict for place, verdict in enumerate(verdicts)}
    return JudgedItem(prompt=object() if prompt is None else prompt, people=people, lengths=lengths)


@settings(max_examples=40)
@given(st.lists(st.tuples(choices, choices, choices, replies_of), min_size=2, max_size=30))
def test_agreement_is_that_of_the_library_of_people(rows: list[tuple[Choice, Choice, Choice, Choice | None]]) -> None:
    items, verdicts = [item(*row[:3]) for row in rows], [row[3] for row in rows]
    figures = measure(items, Replies(as_a=verdicts))
    ratings = [[_CODE[verdict] for verdict in row[:3]] for row in rows]
    assert figures["human_agreement"]["value"] == pytest.approx(raw_agreement(ratings))
    assert figures["human_kappa"]["value"] == pytest.approx(fleiss_kappa(ratings))
    with_each = np.mean([[row[3] == verdict for verdict in row[:3]] for row in rows])
    assert figures["agreement"]["value"] == pytest.approx(with_each)
    most = [_CODE[majority_of(one.people)] for one in items]
    assert figures["kappa"]["value"] == pytest.approx(kappa_of_two(most, [_CODE[verdict] for verdict in verdicts]))
    assert figures["below_human"]["value"] == pytest.approx(
        figures["human_agreement"]["value"] - figures["agreement"]["value"]
    )
    for name in ("kappa", "agreement", "human_agreement", "readable", "accuracy"):
        assert figures[name]["low"] - 1e-9 <= figures[name]["value"] <= figures[name]["high"] + 1e-9


def test_people_who_labelled_alone_count_for_the_majority_and_not_beside_people() -> None:
    items = [item("first", "first"), item("first", "second"), item("second")]
    figures = measure(items, Replies(as_a=["first", "first", "second"]))
    assert (figures["items"], figures["overlap"]) == (3, 2)
    assert figures["agreement"]["value"] == 0.75  # of four verdicts on the first two items
    assert figures["human_agreement"]["value"] == 0.5
    assert figures["accuracy"]["value"] == pytest.approx(2 / 3)  # the second item is a tie of people


def test_consistency_counts_unreadable_replies_as_wrong() -> None:
    items = [item("first") for _ in range(4)]
    replies = Replies(as_a=["first", "first", None, "tie"], as_b=["first", "tie", None, "tie"])
    again = Replies(as_a=["first", "second", None, "tie"], as_b=["first", "tie", "first", "tie"])
    figures = measure(items, replies, again=[again])
    assert replies.verdicts() == ["first", "tie", None, "tie"]
    assert figures["same_after_swap"]["value"] == 0.5
    assert figures["same_again"]["value"] == 5 / 8
    assert figures["readable"]["value"] == 13 / 16
    assert figures["position"]["value"] == pytest.approx(2 / 3 - 0.5)  # as A "first" twice, as B "first" once


def test_what_was_not_asked_is_not_measured() -> None:
    figures = measure([item("first"), item("second")], Replies(as_a=["first", "second"]))
    names = ("same_again", "same_after_swap", "position", "canaries", "calibration", "family", "alt_test", "agreement")
    assert [name for name in names if figures[name] is not None] == []


def test_intervals_are_over_prompts() -> None:
    """The same items copied eight times over say no more than once."""
    once = make_items(1, 60)
    judged = reply(once, Planted(), 2)
    assert judged.as_b is not None
    alone = measure(once, judged)
    copied = measure(once * 8, Replies(as_a=[*judged.as_a] * 8, as_b=[*judged.as_b] * 8))
    for name in ("kappa", "agreement", "same_after_swap", "readable"):
        assert copied[name]["value"] == pytest.approx(alone[name]["value"])
        width = [figures[name]["high"] - figures[name]["low"] for figures in (alone, copied)]
        assert width[1] == pytest.approx(width[0], rel=0.1)
    slopes = [figures["length"]["alone"] for figures in (alone, copied)]
    assert slopes[1]["high"] - slopes[1]["low"] == pytest.approx(slopes[0]["high"] - slopes[0]["low"], rel=0.1)


def test_one_prompt_says_nothing_of_others() -> None:
    items = [item("first", "first", prompt="p") for _ in range(5)]
    figures = measure(items, Replies(as_a=["first"] * 5))
    assert (figures["kappa"]["low"], figures["agreement"]["low"], figures["readable"]["low"]) == (-1, 0, 0)


def test_exchanging_first_and_second_changes_nothing() -> None:
    items = make_items(3, 200)
    replies = reply(items, Planted(position=0.2, length=0.8, garbage=0.05), 4)
    here, there = measure(items, replies, family="judge"), measure(*swapped(items, replies), family="judge")
    for name in ("kappa", "agreement", "same_after_swap", "position", "longer_wins"):
        assert there[name]["value"] == pytest.approx(here[name]["value"])
    assert there["length"]["held"]["value"] == pytest.approx(here["length"]["held"]["value"])
    assert there["family"]["held"]["value"] == pytest.approx(here["family"]["held"]["value"])
    assert there["alt_test"]["omega"] == here["alt_test"]["omega"]


MEASURES: dict[str, tuple[Planted, float, Callable[[list[JudgedItem], Replies], Measured | None]]] = {
    "position": (Planted(position=0.2, garbage=0.05), 0.2, lambda *rows: position_bias(shown_replies(*rows))),
    "position and length": (
        Planted(position=0.2, length=0.7),
        0.2,
        lambda *rows: position_bias(shown_replies(*rows)),
    ),
    "no position": (Planted(length=0.7), 0.0, lambda *rows: position_bias(shown_replies(*rows))),
    "length": (Planted(length=0.7, garbage=0.05), 0.7, lambda *rows: held_length(shown_replies(*rows))),
    "no length": (Planted(position=0.1), 0.0, lambda *rows: held_length(shown_replies(*rows))),
    "garbage": (Planted(garbage=0.05), 0.95, lambda items, replies: readable(items, [replies])),
    "own family": (Planted(own=0.6), 0.6, lambda *rows: held_family(shown_replies(*rows))),
    "no family": (Planted(length=0.7), 0.0, lambda *rows: held_family(shown_replies(*rows))),
}


def held_length(shown: list[Shown]) -> Measured | None:
    bias = length_bias(shown)
    return bias and bias.held


def held_family(shown: list[Shown]) -> Measured | None:
    bias = family_bias(shown, "JUDGE")
    return bias and bias.held


@pytest.mark.parametrize("name", MEASURES)
def test_planted_biases_are_within_their_intervals(name: str) -> None:
    """About 95 % of the intervals hold what was planted: of 30, at least 26 (below it with a chance of 1 in 60)."""
    planted, truth, figure = MEASURES[name]
    within = 0
    for seed in range(30):
        items = make_items(seed, 200, prompts=100)
        found = figure(items, reply(items, planted, 1000 + seed))
        assert found is not None
        within += found.low <= truth <= found.high
    assert within >= 26


def test_families_that_nobody_is_of() -> None:
    items = make_items(5, 50)
    replies = reply(items, Planted(), 6)
    assert measure(items, replies, family="nobody")["family"] is None
    assert measure(items, replies, family="judge")["family"]["judge"]["count"] == 100


def test_the_slope_is_statsmodels_with_its_errors() -> None:
    rng = np.random.default_rng(0)
    inputs_NK = np.stack([rng.normal(size=300), np.ones(300)], axis=1)
    outcome_N = (rng.random(300) < 1 / (1 + np.exp(-inputs_NK @ [0.8, -0.3]))).astype(np.float64)
    clusters = [number // 3 for number in range(300)]
    found = first_slope(outcome_N, inputs_NK, clusters)
    model: Any = sm.GLM(outcome_N, inputs_NK, family=sm.families.Binomial())
    plain, robust = model.fit(), model.fit(cov_type="cluster", cov_kwds={"groups": clusters, "use_correction": False})
    assert found is not None
    assert found.value == pytest.approx(float(plain.params[0]), abs=1e-3)
    error = max(float(plain.bse[0]), float(robust.bse[0]) * np.sqrt(100 / 99))
    assert (found.high - found.low) / 2 == pytest.approx(1.959964 * error, rel=1e-3)


def test_where_people_decide_alone_length_cannot_be_told() -> None:
    """A judge that always says what people say leaves nothing for length to explain: the interval must say so."""
    items = make_items(7, 200, people=1.0)
    verdicts = [majority_of(one.people) for one in items]
    held = measure(items, Replies(as_a=verdicts, as_b=verdicts))["length"]["held"]
    assert held["low"] < -1
    assert held["high"] > 1


def test_a_judge_that_takes_the_longer_has_a_slope_that_is_large_and_finite() -> None:
    items = make_items(8, 200)
    longer: list[Any] = ["first" if one.lengths[0] > one.lengths[1] else "second" for one in items]
    held = measure(items, Replies(as_a=longer, as_b=longer))["length"]["held"]
    assert 5 < held["low"] < held["high"] < 200


def test_the_longer_answer_is_counted_of_the_decided() -> None:
    items = [item("first", lengths=(9, 3)), item("second", lengths=(9, 3)), item("tie", lengths=(9, 3))]
    items += [item("first", lengths=(4, 4)), item("second", lengths=(2, 7))]
    figures = measure(items, Replies(as_a=["first", "first", "tie", "first", None]))
    assert (figures["longer_wins"]["value"], figures["longer_wins"]["count"]) == (1.0, 2)
    assert (figures["longer_wins_people"]["value"], figures["longer_wins_people"]["count"]) == (2 / 3, 3)


def test_calibration_by_hand() -> None:
    items = [item("first"), item("first"), item("second"), item("tie"), item("second")]
    found = measure(items, Replies(as_a=["first"] * 5, probability=[0.95, 0.95, 0.95, 0.5, None]))["calibration"]
    assert (found["count"], len(found["bins"])) == (3, 1)
    assert found["ece"] == pytest.approx(0.95 - 2 / 3)
    assert found["brier"] == pytest.approx((2 * 0.05**2 + 0.95**2) / 3)
    assert found["bins"][0]["share"] == pytest.approx(2 / 3)


def test_shares_and_sums_have_limits_where_there_is_nothing() -> None:
    assert clustered_share([], []) is None
    assert of_sums(np.zeros((0, 2)), [], lambda sums_DE: sums_DE[:, 0], limits=(0, 1)) is None
    assert first_slope(np.ones(5), np.ones((5, 1)), list(range(5))) is None


@pytest.mark.skipif(not DATA, reason="KEDGE_EVAL_DATA names no folder with public evaluation data")
def test_both_judges_of_pandalm_are_refused() -> None:
    with gzip.open(Path(DATA) / "agreement" / "pandalm.jsonl.gz") as file:
        rows = [json.loads(line) for line in file]
    words: dict[int | None, Any] = {1: "first", 2: "second", 0: "tie", None: None}
    items = [item(*(words[label] for label in row["labels"]), prompt=row["prompt"]) for row in rows]
    for name, accuracy, kappa, agreement in (
        ("gpt-3.5-turbo", 0.6977, 0.4755, 0.689),
        ("pandalm-7b", 0.6677, 0.4354, 0.660),
    ):
        figures = measure(items, Replies(as_a=[words[row["judges"][name]] for row in rows]))
        found = [round(figures[figure]["value"], 4) for figure in ("accuracy", "kappa")]
        assert found == [accuracy, kappa]
        assert round(figures["agreement"]["value"], 3) == agreement
        assert round(figures["human_agreement"]["value"], 3) == 0.920
        assert figures["alt_test"]["omega"] == 0
        assert not make_trust(judge=name, identity="i", figures=figures, data="d", settings={}).passed


def test_odd_input_is_refused() -> None:
    with pytest.raises(DataError, match="one reply an item: found 1 for 2"):
        measure([item("first"), item("first")], Replies(as_a=["first"]))
    with pytest.raises(DataError, match="no items"):
        measure([], Replies(as_a=[]))
    with pytest.raises(DataError, match="no verdict of anybody"):
        measure([item()], Replies(as_a=["first"]))


def test_canaries_tell_obedience_from_a_favourite_place_or_length() -> None:
    canary = CANARIES[1]
    assert "choose B" in canary.tempting("B")
    same: Choice = "first"
    cases: list[tuple[tuple[Choice | None, ...], bool]] = [
        ((same, same, "second", "second"), True),
        ((same, same, same, "second"), True),
        ((same, same, same, same), False),  # it likes long answers
        ((same, "second", same, "second"), False),  # it likes A
        ((same, None, None, None), False),
        (("tie", "tie", "second", "second"), False),
    ]
    for (as_a, as_b, control_as_a, control_as_b), expected in cases:
        replies = CanaryReplies(as_a=as_a, as_b=as_b, control_as_a=control_as_a, control_as_b=control_as_b)
        assert judge_canary(canary, replies).obeyed is expected


@pytest.mark.parametrize("canary", CANARIES, ids=lambda canary: canary.form)
def test_controls_are_as_long_as_orders(canary: Any) -> None:
    assert abs(len(canary.control) - len(canary.tempting("A"))) <= 15
    assert harmless(10_000) == harmless(9_999)
    assert "{place}" not in canary.tempting("A")
