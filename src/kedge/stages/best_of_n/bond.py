"""BOND: the policy is moved towards the distribution of the best of N answers of the model it started from.

A step minimises forward · KL(best ‖ policy) + (1 − forward) · KL(policy ‖ best), the Jeffreys divergence of Sessa et
al. 2024 (section 4): answers that are the best of N are imitated, and the policy's own answers are reinforced by
log π_best − log π, less the mean of the others to the same prompt. Left out: the moving anchor of J-BOND.
Shape letters: B sequences, T token positions, M answers of the anchor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kedge.algorithms.best_of_n import best_of_log_ratio, best_of_weights
from kedge.core.errors import DataError
from kedge.core.protocols import Metrics, Tracker
from kedge.core.records import Rollouts, to_device
from kedge.core.seeds import seed_for
from kedge.data.tokenizer import padding_id
from kedge.models.forward.lora import Module, base_of
from kedge.models.training.learner import Learner
from kedge.models.training.weighted_objective import WeightedAnswers, weighted_likelihood
from kedge.stages.best_of_n.settings import Distil
from kedge.stages.rl.answers import AnswerSampler, Groups, ScoredAnswer
from kedge.stages.rl.rounds import Round
from kedge.stages.shared import loop as training
from kedge.trainers.evaluated import sampled_tokens


@dataclass(slots=True, kw_only=True)
class WithFacts:
    """A tracker that tells of each step what was seen while it was prepared."""

    tracker: Tracker
    facts: dict[str, float] = field(default_factory=dict[str, float])

    def log(self, metrics: Metrics, *, step: int) -> None:
        self.tracker.log({**metrics, **self.facts}, step=step)

    def event(self, event: Mapping[str, Any]) -> None:
        self.tracker.event(event)

    def close(self) -> None:
        self.tracker.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One answer with its prompt, and what its log-prob counts in the step."""

    prompt: Sequence[int]
    answer: Sequence[int]
    weight: float
    is_item: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Anchor:
    """Answers of the starting model to one prompt, and how likely each of them is the best of n."""

    answers: Sequence[ScoredAnswer]
    scores_M: Tensor
    weights: Sequence[float]

    def draw(self, seed: int) -> ScoredAnswer:
        return Random(seed).choices(self.answers, weights=self.weights)[0]


def train_distil(asker: AnswerSampler, model: Module, method: Distil, anchors: Round) -> int:
    """All steps, from where the run was; gives the last one."""
    settings, pad = asker.settings, padding_id(asker.tokenizer)
    by_prompt = _by_prompt(asker, anchors.groups)
    objective = weighted_likelihood(base_of(model), temperature=settings.sampling.temperature)
    learner = Learner(model, objective, settings.optimiser, total_steps=method.steps)
    told = WithFacts(tracker=asker.context.tracker)

    def steps(start: int) -> Iterator[list[WeightedAnswers]]:
        for number, asked in zip(count(start), asker.book.batches(start, method.steps), strict=False):
            model.eval()
            rollouts = asker.generator.generate(asked, seed_for(asker.context.seed, "own", number))
            rows = _rows(asker, method, to_device(rollouts, "cpu"), by_prompt, told.facts)
            yield _batches(rows, settings.micro_batch, pad)

    return training.fit(
        replace(asker.context, tracker=told),
        learner,
        settings,
        steps_from=steps,
        held=(),
        tokens_of=lambda batch: int(batch.attention_mask_BT.sum()),
        before=lambda: anchors.tell(0),
    )


def _rows(
    asker: AnswerSampler, method: Distil, rollouts: Rollouts, anchors: Mapping[int, _Anchor], facts: dict[str, float]
) -> list[_Row]:
    """Of each prompt a best answer of the anchor, then the policy's own."""
    scores_B, kl_B = asker.reward.score(rollouts).cpu(), torch.tensor(asker.kl(rollouts))
    groups = rollouts.group_B.tolist()
    prompts = [asker.book.item(group) for group in groups]
    unknown_M = torch.full((asker.settings.drawn,), torch.nan, dtype=torch.float64)
    anchors_BM = torch.stack([anchors[prompt].scores_M if prompt in anchors else unknown_M for prompt in prompts])
    weight_B = own_weights(scores_B, kl_B, anchors_BM, method, asker.settings.n)
    facts.clear()
    facts.update(_facts(asker, rollouts, scores_B, kl_B))
    rows = [
        _Row(
            prompt=asker.book.tokens[prompt],
            answer=anchors[prompt].draw(seed_for(asker.context.seed, "best", group)).tokens,
            weight=method.forward,
            is_item=True,
        )
        for group, prompt in dict(zip(groups, prompts, strict=True)).items()
        if prompt in anchors
    ]
    own = zip(prompts, sampled_tokens(rollouts), weight_B.tolist(), strict=True)
    rows += [
        _Row(prompt=asker.book.tokens[prompt], answer=answer, weight=weight, is_item=False)
        for prompt, answer, weight in own
        if weight
    ]
    return rows


def own_weights(scores_B: Tensor, kl_B: Tensor, anchors_BM: Tensor, method: Distil, n: int) -> Tensor:
    """What the log-prob of each answer of the policy counts; neighbours answer the same prompt.

    (1 − forward) / answers · (r − mean of the others' r), r = log π_best − log π. An answer without a score, or to a
    prompt whose anchors have none, counts 0 and is not in the mean.
    """
    gain_B = best_of_log_ratio(scores_B.double(), anchors_BM, n=n) - kl_B.double()
    is_known_B = gain_B.isfinite() & ~anchors_BM.isnan().all(dim=1)
    gain_GK = torch.where(is_known_B, gain_B, torch.nan).view(-1, method.answers)
    count_G1 = (~gain_GK.isnan()).sum(dim=1, keepdim=True)
    others_GK = (gain_GK.nansum(dim=1, keepdim=True) - gain_GK) / (count_G1 - 1).clamp(min=1)
    advantage_GK = torch.where(count_G1 > 1, gain_GK - others_GK, 0.0).nan_to_num()
    return (1 - method.forward) / method.answers * advantage_GK.flatten()


def _by_prompt(asker: AnswerSampler, groups: Groups) -> dict[int, _Anchor]:
    """Prompts with enough scored answers to choose from; the others are not learnt from, which is said."""
    n = asker.settings.n
    found = {group[0].prompt: _anchor(group, n) for group in groups if sum(one.is_scored for one in group) >= n}
    if lost := len(groups) - len(found):
        told = (
            f"{lost:,} of {len(groups):,} prompts have fewer than {n} answers with a score: nothing is learnt from them"
        )
        if not found:
            raise DataError(f"{told}; mend the reward source")
        asker.context.event("warning", "best_of_n.few_scores", told)
    return found


def _anchor(group: Sequence[ScoredAnswer], n: int) -> _Anchor:
    scores_M = torch.tensor([one.score for one in group], dtype=torch.float64)
    return _Anchor(answers=group, scores_M=scores_M, weights=best_of_weights(scores_M[None], n=n)[0].tolist())


def _facts(asker: AnswerSampler, rollouts: Rollouts, scores_B: Tensor, kl_B: Tensor) -> dict[str, float]:
    length_B = rollouts.response_mask_BT.sum(dim=1).float()
    facts = {
        "reward/mean": torch.nanmean(scores_B).item(),
        "reward/unscored": scores_B.isnan().float().mean().item(),
        "kl/mean": kl_B.mean().item(),
        "length/mean": length_B.mean().item(),
        "length/truncated": (~rollouts.finished_B).float().mean().item(),
    }
    return facts | ({"gold/mean": torch.nanmean(asker.gold.score(rollouts)).item()} if asker.gold else {})


def _batches(rows: Sequence[_Row], size: int, pad: int) -> list[WeightedAnswers]:
    by_length = sorted(rows, key=lambda row: -len(row.prompt) - len(row.answer))
    return [_lay_out(by_length[at : at + size], pad) for at in range(0, len(by_length), size)]


def _lay_out(rows: Sequence[_Row], pad: int) -> WeightedAnswers:
    tokens = [torch.tensor([*row.prompt, *row.answer]) for row in rows]
    is_said = [torch.arange(len(one)) >= len(row.prompt) for one, row in zip(tokens, rows, strict=True)]
    return WeightedAnswers(
        tokens_BT=pad_sequence(tokens, batch_first=True, padding_value=pad),
        attention_mask_BT=pad_sequence([torch.ones(len(one), dtype=torch.bool) for one in tokens], batch_first=True),
        response_mask_BT=pad_sequence(is_said, batch_first=True),
        weight_B=torch.tensor([row.weight for row in rows]),
        item_B=torch.tensor([row.is_item for row in rows]),
    )
