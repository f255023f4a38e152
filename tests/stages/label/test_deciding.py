"""From verdicts to labels, without a judge."""

from __future__ import annotations

from random import Random

import pytest

from kedge.rewards.pairwise import BothOrders
from kedge.stages.label.deciding import Verdict, fit_panel, panel_agreement, settle, verdict_of


def says(preference: float | None, *, consistent: bool = True) -> Verdict:
    return Verdict(preference=preference, is_consistent=consistent)


def test_a_panel_believes_those_who_agree() -> None:
    """Two judges that are nearly always right outvote one that all but guesses, and their weights show it."""
    chance = Random(3)
    truth = [float(chance.random() < 0.5) for _ in range(150)]
    skills = (0.95, 0.95, 0.6)
    panel = [[says(value if chance.random() < skill else 1 - value) for value in truth] for skill in skills]
    accuracy = fit_panel(panel).accuracy
    assert accuracy[:2] == pytest.approx([0.95, 0.95], abs=0.05)
    assert accuracy[2] == pytest.approx(0.6, abs=0.1)
    labels = settle(panel, "dawid_skene", clamp=False)
    right = [label is not None and label.better == 1 - value for label, value in zip(labels, truth, strict=True)]
    assert sum(right) / len(right) > 0.93
    votes = settle(panel, "majority", clamp=False)
    assert {label.certainty for label in votes if label} == {0.666667, 1.0}
    agreement = panel_agreement(panel, list(range(150)))
    assert agreement is not None
    assert agreement.low < agreement.value < agreement.high


def test_who_cannot_be_read_has_no_vote() -> None:
    panel = [[says(1.0), says(None), says(None)], [says(1.0), says(0.0), says(None)]]
    first, second, third = settle(panel, "majority", clamp=False)
    assert first is not None
    assert (first.better, first.certainty) == (0, 1.0)
    assert second is not None
    assert second.better == 1
    assert third is None


def test_orders_that_disagree_make_a_panel_inconsistent() -> None:
    panel = [[says(0.5, consistent=False)], [says(1.0)], [says(1.0)]]
    (label,) = settle(panel, "majority", clamp=False)
    assert label is not None
    assert (label.better, label.consistent) == (0, False)


def test_a_verdict_against_its_own_probability_is_a_tie() -> None:
    (label,) = settle([[Verdict(preference=1.0, probability=0.4)]], "majority", clamp=False)
    assert label is not None
    assert (label.better, label.certainty) == (None, 0.5)


def test_votes_that_cannot_be_read_are_left_out_of_the_share() -> None:
    votes = [BothOrders(as_a=1.0, as_b=1.0), BothOrders(as_a=None, as_b=1.0), BothOrders(as_a=0.0, as_b=1.0)]
    assert verdict_of(votes) == Verdict(preference=1.0, is_consistent=False, probability=0.75)


def test_one_vote_without_log_probabilities_has_no_measured_certainty() -> None:
    assert verdict_of([BothOrders(as_a=0.0, as_b=0.0)]).probability is None
