"""The stub does what it is told to: other tests find its biases again."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kedge.rewards.context import RewardContext
from kedge.rewards.pairwise import BothOrders, Panelist, TwoAnswers
from kedge.rewards.settings import PairwiseJudge
from kedge.testing.stub_judge import StubJudge


def compare(judge: StubJudge, count: int, *, logprobs: bool = False, retries: int = 3) -> list[BothOrders]:
    settings = PairwiseJudge(
        kind="judge", url=judge.url, model="stub", logprobs=logprobs, retries=retries, backoff_s=0.001
    )
    panelist = Panelist(settings, RewardContext(folder=Path(), seed=1))
    prompts = [(("user", f"Question {number}?"),) for number in range(count)]
    return panelist.compare([TwoAnswers(prompt=prompt, first="(worth 2)", second="(worth 1)") for prompt in prompts])


def test_without_a_bias_it_says_the_truth_in_both_orders() -> None:
    with StubJudge() as judge:
        assert compare(judge, 5) == [BothOrders(as_a=1.0, as_b=1.0)] * 5
        assert judge.calls == 10
        assert set(judge.paid.values()) == {1}


def test_position_and_garbage_come_at_their_shares() -> None:
    with StubJudge(position=0.2, garbage=0.1) as judge:
        results = compare(judge, 300)
    replies = [reply for result in results for reply in (result.as_a, result.as_b)]
    assert sum(reply is None for reply in replies) / 600 == pytest.approx(0.1, abs=0.04)
    shown_b = [result.as_b for result in results if result.as_b is not None]
    assert sum(reply == 0.0 for reply in shown_b) / len(shown_b) == pytest.approx(0.4, abs=0.1)
    assert all(result.as_a in (1.0, None) for result in results)


def test_its_log_probabilities_are_those_that_it_draws_with() -> None:
    with StubJudge(strength=1.0, logprobs=True) as judge:
        results = compare(judge, 20, logprobs=True)
    assert [result.probability for result in results] == pytest.approx([1 / (1 + math.exp(-1))] * 20)


def test_429_the_first_time_and_a_crash_until_it_is_revived() -> None:
    with StubJudge(too_many=0.5) as judge:
        compare(judge, 20)
        assert 40 < judge.calls < 80
        assert len(judge.paid) == 40 == judge.paid.total()
    with StubJudge(crash_at=11) as judge:
        failed = [result.reason for result in compare(judge, 20, retries=0)]
        assert judge.paid.total() == 10
        assert any(failed)
        judge.revive()
        assert not any(result.reason for result in compare(judge, 20))


def test_it_obeys_when_it_should() -> None:
    with StubJudge(obeys=r"worth 1\)") as judge:
        assert compare(judge, 1) == [BothOrders(as_a=0.0, as_b=0.0)]
