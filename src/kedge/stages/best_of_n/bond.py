"""BOND: the policy is moved towards the distribution of the best of N answers of the model it started from.

A step minimises forward · KL(best ‖ policy) + (1 − forward) · KL(policy ‖ best), the Jeffreys divergence of Sessa et
al. 2024 (section 4): answers that are the best of N are imitated, and the policy's own answers are reinforced by
log π_best − log π, less the mean of the others to the same prompt. Left out: the moving anchor of J-BOND.
Shape letters: B sequences, T token positions, M answers of the anchor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from kedge.algorithms.best_of_n import best_of_log_ratio, best_of_weights
from kedge.core.batches import pad_rows, pad_tokens
from kedge.core.errors import DataError
from kedge.core.records import Rollouts, cut, to_device
from kedge.core.seeds import seed_for
from kedge.data.tokenizer import padding_id
from kedge.models.forward.heads import LanguageModel
from kedge.models.training.learner import Learner
from kedge.models.training.passes import Cut, PassSize
from kedge.models.training.train_step import TrainedWeights
from kedge.models.training.weighted_objective import WeightedAnswers, weighted_likelihood
from kedge.stages.best_of_n.settings import BestOfNSettings, Bond
from kedge.stages.rl.answers import AnswerSampler, Groups, ScoredAnswer, chosen
from kedge.stages.rl.rounds import draw_round, log_round
from kedge.stages.shared.context import Context
from kedge.stages.shared.interrupt import interruptible
from kedge.stages.shared.loop import TrainLoop, passes_for
from kedge.trainers.shared import sampled_tokens


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnAnswers:
    """The policy's answers of one step, on the CPU; `prompts` are places in the data set."""

    rollouts: Rollouts
    groups: Sequence[int]
    prompts: Sequence[int]
    scores_B: Tensor
    kl_B: Tensor
    gold_B: Tensor | None


def train_bond(
    sampler: AnswerSampler, settings: BestOfNSettings, method: Bond, trained: TrainedWeights, policy: LanguageModel
) -> tuple[list[ScoredAnswer], int]:
    """All steps, from where the run was; gives the best of N answers of the starting model, and the last step."""
    context, pad = sampler.context, padding_id(sampler.tokenizer)
    drawn = draw_round(sampler, 0)
    anchors = _anchors(context, drawn.groups, settings.n)
    objective = weighted_likelihood(policy, temperature=settings.sampling.temperature)
    steps = min(method.steps, settings.max_steps or method.steps)
    learner = Learner(
        trained,
        policy.backbone,
        objective,
        settings.optimiser,
        total_steps=steps,
        passes=passes_for(context, settings.micro_batch),
    )
    loop = TrainLoop(context, learner, checkpoints=settings.checkpoints)
    if not loop.is_resumed:
        log_round(sampler, drawn, 0)
    prompts_of_steps = sampler.dataset.batches(learner.step, steps)
    with interruptible(context.stop, context.say):
        for number, prompts in loop.steps(enumerate(prompts_of_steps, start=learner.step)):
            sampler.refresh()
            rollouts = sampler.generator.generate(prompts, seed_for(context.seed, "own", number))
            answers = _score(sampler, to_device(rollouts, "cpu"))
            rows = [*_best_rows(sampler, method, anchors, answers), *_own_rows(sampler, method, anchors, answers)]
            metrics = loop.update(_batches(rows, pad))
            if metrics is not None:
                loop.finish({**metrics, **_metrics(answers)})
    return chosen(drawn.groups, settings.n), loop.step


def _score(sampler: AnswerSampler, rollouts: Rollouts) -> _OwnAnswers:
    scores_B, kl_B = sampler.reward.score(rollouts).cpu(), torch.tensor(sampler.kl(rollouts))
    groups: list[int] = rollouts.group_B.tolist()
    return _OwnAnswers(
        rollouts=rollouts,
        groups=groups,
        prompts=[sampler.dataset.item(group) for group in groups],
        scores_B=scores_B,
        kl_B=kl_B,
        gold_B=sampler.gold.score(rollouts) if sampler.gold else None,
    )


def _best_rows(
    sampler: AnswerSampler, method: Bond, anchors: Mapping[int, _Anchor], answers: _OwnAnswers
) -> Iterator[_Row]:
    """One of the anchor's answers to each prompt, drawn as the best of n would be."""
    for group, prompt in dict(zip(answers.groups, answers.prompts, strict=True)).items():
        if prompt in anchors:
            best = anchors[prompt].draw(seed_for(sampler.context.seed, "best", group))
            prompt_tokens = sampler.dataset.tokens[prompt]
            yield _Row(prompt=prompt_tokens, answer=best.tokens, weight=method.forward, is_item=True)


def _own_rows(
    sampler: AnswerSampler, method: Bond, anchors: Mapping[int, _Anchor], answers: _OwnAnswers
) -> Iterator[_Row]:
    """The policy's own answers, each with its advantage."""
    unknown_M = torch.full((sampler.settings.answers,), torch.nan, dtype=torch.float64)
    anchors_BM = torch.stack(
        [anchors[prompt].scores_M if prompt in anchors else unknown_M for prompt in answers.prompts]
    )
    weight_B = own_weights(answers.scores_B, answers.kl_B, anchors_BM, method, sampler.settings.n)
    sampled = zip(answers.prompts, sampled_tokens(answers.rollouts), weight_B.tolist(), strict=True)
    for prompt, tokens, weight in sampled:
        if weight:
            yield _Row(prompt=sampler.dataset.tokens[prompt], answer=tokens, weight=weight, is_item=False)


def own_weights(scores_B: Tensor, kl_B: Tensor, anchors_BM: Tensor, method: Bond, n: int) -> Tensor:
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


def _anchors(context: Context, groups: Groups, n: int) -> dict[int, _Anchor]:
    """By prompt, for those with enough scored answers to choose from; nothing is learnt from the others."""
    anchors = {group[0].prompt: _anchor(group, n) for group in groups if sum(answer.is_scored for answer in group) >= n}
    if num_lost := len(groups) - len(anchors):
        message = (
            f"{num_lost:,} of {len(groups):,} prompts have fewer than {n} answers with a score: nothing is learnt from "
            "them"
        )
        if not anchors:
            raise DataError(f"{message}; mend the reward source")
        context.event("warning", "best_of_n.few_scores", message)
    return anchors


def _anchor(group: Sequence[ScoredAnswer], n: int) -> _Anchor:
    scores_M = torch.tensor([answer.score for answer in group], dtype=torch.float64)
    return _Anchor(answers=group, scores_M=scores_M, weights=best_of_weights(scores_M[None], n=n)[0].tolist())


def _metrics(answers: _OwnAnswers) -> dict[str, float]:
    rollouts = answers.rollouts
    length_B = rollouts.response_mask_BT.sum(dim=1).float()
    metrics = {
        "reward/mean": torch.nanmean(answers.scores_B).item(),
        "reward/unscored": answers.scores_B.isnan().float().mean().item(),
        "kl/mean": answers.kl_B.mean().item(),
        "length/mean": length_B.mean().item(),
        "length/truncated": (~rollouts.finished_B).float().mean().item(),
    }
    return metrics if answers.gold_B is None else metrics | {"gold/mean": torch.nanmean(answers.gold_B).item()}


def _batches(rows: Sequence[_Row], pad: int) -> Cut[WeightedAnswers]:
    def batches(size: PassSize) -> list[WeightedAnswers]:
        parts = cut(
            rows,
            length=lambda row: len(row.prompt) + len(row.answer),
            rows=size.rows,
            tokens=size.tokens,
            shares=size.shares,
        )
        return [_lay_out(part, pad) for part in parts]

    return batches


def _lay_out(rows: Sequence[_Row], pad: int) -> WeightedAnswers:
    tokens_BT, attention_mask_BT = pad_tokens([[*row.prompt, *row.answer] for row in rows], pad=pad)
    return WeightedAnswers(
        tokens_BT=tokens_BT,
        attention_mask_BT=attention_mask_BT,
        response_mask_BT=pad_rows([[False] * len(row.prompt) + [True] * len(row.answer) for row in rows], False),
        weight_B=torch.tensor([row.weight for row in rows]),
        item_B=torch.tensor([row.is_item for row in rows]),
    )
