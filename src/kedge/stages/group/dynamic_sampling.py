"""Batches of scored answers for methods without a critic: dynamic sampling, and greedy answers as a baseline.

Dynamic sampling (DAPO, Yu et al. 2025, section 3.2): a group whose scores are all equal teaches nothing, so it is left
out, and further prompts are answered until the batch is full. Then the next batch does not begin where its number says,
but behind the last prompt that was used: `position`, which is part of a run's state. Shape letters: B sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kedge.core.protocols import Generator, RewardSource
from kedge.core.records import Prompts, Rollouts, joined, num_rows, take
from kedge.runtime.local import Clock
from kedge.stages.rl.prompts import PromptDataset, RolloutStream, submit
from kedge.trainers.shared import GreedyBaseline, ScoredRollouts


class GroupSampler:
    """Samples and scores groups of answers in the order of the prompts; `position` is the group that comes next."""

    def __init__(
        self,
        prompts: PromptDataset,
        generator: Generator,
        reward: RewardSource,
        *,
        greedy: Generator | None,
        max_rounds: int | None,
        seed: int,
        clock: Clock,
        ahead: RolloutStream | None = None,
    ) -> None:
        """`ahead` samples batches before their turn; it fits where each is one round, which then is at the place that
        its number says."""
        self.position = 0
        self._prompts, self._generator, self._reward, self._greedy = prompts, generator, reward, greedy
        self._max_rounds, self._seed, self._clock, self._ahead = max_rounds, seed, clock, ahead

    def state(self) -> dict[str, Any]:
        return {"position": self.position}

    def load(self, state: Mapping[str, Any]) -> None:
        self.position = int(state["position"])

    def sample(self, number: int) -> ScoredRollouts:
        """The batch of iteration `number`; with `max_rounds`, groups of equal scores are left out and replaced."""
        parts = list[Rollouts]()
        scores = list[Tensor]()
        batch = self._prompts.batch
        while True:
            rollouts, scores_B = self._next_round(number)
            parts.append(rollouts)
            scores.append(scores_B)
            sampled, scores_B = joined(parts), torch.cat(scores)
            differs_B = ~is_equal(scores_B, sampled.group_B)
            useful = sampled.group_B[differs_B].unique().tolist()
            if self._max_rounds is None or len(useful) >= batch or len(parts) == self._max_rounds:
                break
        mean_score, zero_variance = scores_B.nanmean().item(), 1 - len(useful) / (len(parts) * batch)
        # Where all groups have equal scores, the first round is learnt from: the KL term and the metrics go on.
        chosen_B = sampled.group_B <= sampled.group_B[0] + batch - 1
        if self._max_rounds is not None and useful:
            useful = useful[:batch]
            chosen_B = differs_B & (sampled.group_B <= useful[-1])
            self.position = useful[-1] + 1 if len(useful) == batch else self.position
        rollouts = take(sampled, chosen_B)
        return ScoredRollouts(
            rollouts=rollouts,
            scores_B=scores_B[chosen_B],
            greedy=self._greedy_baseline(rollouts, number),
            mean_score=mean_score,
            zero_variance=zero_variance,
            rounds=len(parts),
        )

    def _next_round(self, number: int) -> tuple[Rollouts, Tensor]:
        """The answers to the next batch of prompts, and their scores."""
        groups = range(self.position, self.position + self._prompts.batch)
        self.position += self._prompts.batch
        if self._ahead is None:
            return self._scored_answers(self._generator, self._prompts.prompts_of(groups), number)
        with self._clock.lap("generate"):
            rollouts = self._ahead.take(number)
        return self._scored(rollouts)

    def _scored_answers(self, generator: Generator, prompts: Prompts, number: int) -> tuple[Rollouts, Tensor]:
        with self._clock.lap("generate"):
            rollouts = submit(generator, prompts, self._seed, number).result()
        return self._scored(rollouts)

    def _scored(self, rollouts: Rollouts) -> tuple[Rollouts, Tensor]:
        with self._clock.lap("judge"):
            return rollouts, self._reward.score(rollouts)

    def _greedy_baseline(self, rollouts: Rollouts, number: int) -> GreedyBaseline:
        """For each row, the score of the greedy answer to its prompt; each prompt is answered once."""
        if self._greedy is None:
            zero_B = torch.zeros(num_rows(rollouts), device=rollouts.group_B.device)
            return GreedyBaseline(scores_B=zero_B, finished_B=zero_B.bool(), length_B=zero_B.long())
        group_G, row_B = rollouts.group_B.unique(return_inverse=True)
        prompts = self._prompts.prompts_of(group_G.tolist(), answers=1)
        answers, scores_G = self._scored_answers(self._greedy, prompts, number)
        length_G = answers.response_mask_BT.sum(dim=1)
        return GreedyBaseline(scores_B=scores_G[row_B], finished_B=answers.finished_B[row_B], length_B=length_G[row_B])


def is_equal(scores_B: Tensor, group_B: Tensor) -> Tensor:
    """True on the rows of groups whose scores are all equal; rows without a score do not count.

    >>> nan = float("nan")
    >>> is_equal(torch.tensor([1., 0., 2., 2., nan, nan, 3.]), torch.tensor([7, 7, 4, 4, 4, 9, 7])).tolist()
    [False, False, True, True, True, True, False]
    """
    _, row_B, size_G = group_B.unique(return_inverse=True, return_counts=True)
    infinite_G = torch.full(size_G.shape, torch.inf, dtype=scores_B.dtype, device=scores_B.device)
    is_scored_B = ~scores_B.isnan()
    scored_B, row_of_scored_B = scores_B[is_scored_B], row_B[is_scored_B]
    lowest_G = infinite_G.scatter_reduce(0, row_of_scored_B, scored_B, "amin")
    highest_G = (-infinite_G).scatter_reduce(0, row_of_scored_B, scored_B, "amax")
    return (highest_G <= lowest_G)[row_B]
