"""How batches are drawn for methods without a critic: groups that teach nothing, where the next batch begins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import pytest
import torch
from torch import Tensor

from kedge.core.records import Prompts, Rollouts
from kedge.core.seeds import item_at, seed_for
from kedge.data.examples import Message, Origin, Prompt
from kedge.runtime.local import Clock
from kedge.stages.group.dynamic_sampling import GroupSampler
from kedge.stages.rl.prompts import PromptDataset

BATCH = 2
PROMPTS = 5


class Echo:
    """Answers with as many tokens as the prompt's first token says; the token is 10 times the group plus the answer."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], int]] = []

    def submit(self, prompts: Prompts, seed: int) -> Future[Rollouts]:
        self.asked.append((prompts.group, seed))
        length_B = torch.tensor([1 + tokens[0] % 3 for tokens in prompts.tokens])
        index_T = torch.arange(int(length_B.max()) + 1)
        attention_BT = index_T < length_B[:, None] + 1
        rows = list(zip(prompts.group, prompts.answer, strict=True))
        future = Future[Rollouts]()
        future.set_result(
            Rollouts(
                tokens_BT=torch.tensor([[10 * group + answer] * len(index_T) for group, answer in rows]),
                attention_mask_BT=attention_BT,
                response_mask_BT=attention_BT & (index_T >= 1),
                behaviour_logp_BT=torch.zeros(attention_BT.shape),
                group_B=torch.tensor(prompts.group),
                finished_B=length_B < 3,
                version=0,
            )
        )
        return future

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        del weights, version


class Table:
    """The scores of the answers to each group; 1 for all of a group that is not in it."""

    def __init__(self, scores: Mapping[int, Sequence[float]]) -> None:
        self.scores = scores

    def score(self, rollouts: Rollouts) -> Tensor:
        rows = rollouts.tokens_BT[:, 0].tolist()
        return torch.tensor([self.scores.get(row // 10, [1.0, 1.0])[row % 10] for row in rows])


def sampler_of(
    scores: Mapping[int, Sequence[float]], *, max_rounds: int | None, greedy: Echo | None = None
) -> tuple[GroupSampler, Echo]:
    prompts = [
        Prompt(prompt=(Message("user", str(number)),), origin=Origin("p.jsonl", number + 1))
        for number in range(PROMPTS)
    ]
    tokens = [[number, 7] for number in range(PROMPTS)]
    book = PromptDataset(prompts=prompts, tokens=tokens, batch=BATCH, answers=2, seed=3)
    echo = Echo()
    table = Table(scores)
    return GroupSampler(book, echo, table, greedy=greedy, max_rounds=max_rounds, seed=9, clock=Clock()), echo


UNLIKE = [0.0, 1.0]


def unlike(*groups: int) -> dict[int, list[float]]:
    return dict.fromkeys(groups, UNLIKE)


def test_without_dynamic_sampling_every_group_is_learnt_from() -> None:
    sampler, echo = sampler_of({1: UNLIKE, 2: UNLIKE}, max_rounds=None)
    found = [sampler.sample(number) for number in (0, 1)]
    assert [one.rollouts.group_B.tolist() for one in found] == [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert [one.scores_B.tolist() for one in found] == [[1, 1, 0, 1], [0, 1, 1, 1]]
    assert [(one.rounds, one.zero_variance, one.mean_score) for one in found] == [(1, 0.5, 0.75)] * 2
    # as PPO does, so that both sample the same answers: one seed an iteration
    assert echo.asked == [((0, 0, 1, 1), seed_for(9, "rollout", 0)), ((2, 2, 3, 3), seed_for(9, "rollout", 1))]


def test_further_prompts_are_asked_until_the_batch_is_full() -> None:
    """Groups 0, 2 and 4 have equal scores: 1 and 3 fill the first batch, in two rounds; 5 and 6 the second."""
    sampler, echo = sampler_of(unlike(1, 3, 5, 6, 7), max_rounds=5)
    first, second = sampler.sample(0), sampler.sample(1)
    assert first.rollouts.group_B.tolist() == [1, 1, 3, 3]
    assert first.scores_B.tolist() == [0, 1, 0, 1]
    assert (first.rounds, first.zero_variance, first.mean_score) == (2, 0.5, 0.75)
    assert second.rollouts.group_B.tolist() == [5, 5, 6, 6]
    # 7 was answered in vain, and comes again: nothing of the data is lost
    assert [groups for groups, _ in echo.asked] == [(0, 0, 1, 1), (2, 2, 3, 3), (4, 4, 5, 5), (6, 6, 7, 7)]
    assert sampler.state() == {"position": 7}
    assert first.rollouts.tokens_BT[:, 0].tolist() == [10, 11, 30, 31]


def test_rows_of_unlike_rounds_are_joined_as_they_were() -> None:
    sampler, _ = sampler_of(unlike(1, 3), max_rounds=5)
    found = sampler.sample(0)
    lengths = {group: 1 + item_at(group, PROMPTS, 3) % 3 for group in (1, 3)}
    assert found.rollouts.response_mask_BT.sum(dim=1).tolist() == [lengths[1], lengths[1], lengths[3], lengths[3]]


def test_it_takes_what_there_is_after_the_last_round() -> None:
    sampler, echo = sampler_of({1: UNLIKE}, max_rounds=3)
    found = sampler.sample(0)
    assert found.rollouts.group_B.tolist() == [1, 1]
    assert (found.rounds, found.zero_variance) == (3, pytest.approx(5 / 6))
    assert len(echo.asked) == 3
    assert sampler.position == 6


def test_where_all_groups_are_alike_the_first_round_goes_on() -> None:
    sampler, _ = sampler_of({}, max_rounds=2)
    found = sampler.sample(0)
    assert found.rollouts.group_B.tolist() == [0, 0, 1, 1]
    assert (found.rounds, found.zero_variance, found.mean_score, sampler.position) == (2, 1.0, 1.0, 4)


def test_a_row_without_a_score_makes_no_difference() -> None:
    sampler, _ = sampler_of({0: [math.nan, 1.0], 1: [math.nan, math.nan], 2: UNLIKE, 3: UNLIKE}, max_rounds=5)
    found = sampler.sample(0)
    assert found.rollouts.group_B.tolist() == [2, 2, 3, 3]
    assert found.mean_score == pytest.approx((1 + 0 + 1 + 0 + 1) / 5)


def test_a_resumed_sampler_goes_on_where_it_was() -> None:
    scores = unlike(1, 3, 5, 6)
    whole, _ = sampler_of(scores, max_rounds=5)
    whole.sample(0)
    expected = whole.sample(1)
    first, _ = sampler_of(scores, max_rounds=5)
    first.sample(0)
    again, _ = sampler_of(scores, max_rounds=5)
    again.load(first.state())
    found = again.sample(1)
    assert found.rollouts.tokens_BT.tolist() == expected.rollouts.tokens_BT.tolist()


def test_the_likeliest_answer_is_asked_once_a_prompt_and_stands_beside_all_of_its_rows() -> None:
    greedy = Echo()
    sampler, _ = sampler_of({0: [5.0, 6.0], 1: [7.0, 8.0]}, max_rounds=None, greedy=greedy)
    found = sampler.sample(0)
    assert greedy.asked == [((0, 1), seed_for(9, "rollout", 0))]
    assert found.greedy.scores_B.tolist() == [5.0, 5.0, 7.0, 7.0]  # answer 0 of each group
    lengths = [1 + item_at(group, PROMPTS, 3) % 3 for group in (0, 0, 1, 1)]
    assert found.greedy.length_B.tolist() == lengths
    assert found.greedy.finished_B.tolist() == [length < 3 for length in lengths]
    assert found.known_B.tolist() == [5.0, 6.0, 7.0, 8.0]
