"""The answers of a round: drawn, scored, kept in a file, and summed up in metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

import orjson
import torch

from kedge.algorithms.best_of_n import best_of_weights
from kedge.core.records import Rollouts, to_device
from kedge.core.stats import best_of_kl
from kedge.data.batching import TokenSequence
from kedge.data.writing import row_writer
from kedge.models.training.preference_objectives import Reference
from kedge.rewards.failures import Reward
from kedge.rollout.shared import SharedGenerator
from kedge.stages.rl.divergence import log_ratios
from kedge.stages.rl.prompts import PromptDataset
from kedge.stages.rl.reward import decoded
from kedge.stages.rl.round_settings import RoundSettings
from kedge.stages.shared.context import Context

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROUNDS = 8
"""So many times the rows that are sampled at once go to the generator together, which keeps its rows full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswer:
    """One answer. `prompt` is the place of its prompt in the file, `number` its own among the answers to it."""

    prompt: int
    number: int
    tokens: tuple[int, ...]
    """All that was sampled, the token that ended it included."""
    text: str
    is_finished: bool
    score: float
    """NaN where it could not be scored."""
    gold: float | None
    kl: float | None
    """log p(answer) − log p(answer) of the model that the stage started from; None where it is not measured."""

    @property
    def is_scored(self) -> bool:
        return math.isfinite(self.score)


Groups = Sequence[Sequence[ScoredAnswer]]
"""The answers to each prompt, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSampler:
    """Draws answers from the policy as it is, and has them scored."""

    context: Context
    settings: RoundSettings
    round_metric: str
    """The metric that has the number of the round."""
    dataset: PromptDataset
    tokenizer: PreTrainedTokenizerBase
    generator: SharedGenerator
    refresh: Callable[[], object]
    """Brings the weights as they are now to the generator where it has a copy of them."""
    rows: int
    """Answers that a process samples at once."""
    reward: Reward
    gold: Reward | None
    reference: Reference
    """Opens the model that the stage started from."""

    def draw(self, answers: int, *, seed: int, is_start: bool) -> Groups:
        """So many answers to every prompt. At the start the policy is its own reference, and no KL is measured."""
        num_prompts = len(self.dataset.prompts)
        size = max(1, self.rows * self.context.world.size * _ROUNDS // answers)
        scored: list[ScoredAnswer] = []
        self.refresh()
        for at in range(0, num_prompts, size):
            groups = range(at, min(at + size, num_prompts))
            rollouts = self.generator.generate(self.dataset.prompts_of(groups, answers=answers), seed)
            scored += self._scored(
                rollouts, answers, [0.0] * len(rollouts.tokens_BT) if is_start else self.kl(rollouts)
            )
        return _grouped(scored)

    def kl(self, rollouts: Rollouts) -> list[float]:
        """The log-ratio of each answer to the model that the stage started from."""
        with self.reference() as opened:
            temperature, world = self.settings.sampling.temperature, self.context.world
            return log_ratios(opened.language_model, rollouts, temperature=temperature, world=world).tolist()

    def _scored(self, rollouts: Rollouts, answers: int, kl: Sequence[float]) -> list[ScoredAnswer]:
        scores, gold = self.reward.score(rollouts).tolist(), self.gold.score(rollouts).tolist() if self.gold else None
        on_cpu = to_device(rollouts, "cpu")
        scored: list[ScoredAnswer] = []
        for row, (tokens_T, mask_T) in enumerate(zip(on_cpu.tokens_BT, on_cpu.response_mask_BT, strict=True)):
            tokens, is_finished = tokens_T[mask_T].tolist(), bool(on_cpu.finished_B[row])
            scored.append(
                ScoredAnswer(
                    prompt=self.dataset.item(int(on_cpu.group_B[row])),
                    number=row % answers,
                    tokens=tuple(tokens),
                    text=decoded(self.tokenizer, tokens[:-1] if is_finished else tokens),
                    is_finished=is_finished,
                    score=scores[row],
                    gold=gold[row] if gold else None,
                    kl=kl[row] if self.settings.measures_kl else None,
                )
            )
        return scored


def write_answers(file: Path, groups: Groups) -> None:
    with row_writer(file) as write:
        for group in groups:
            for answer in group:
                write(asdict(answer))


def read_answers(file: Path) -> Groups:
    rows = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    return _grouped(
        [ScoredAnswer(**row | {"tokens": tuple(row["tokens"]), "score": _number(row["score"])}) for row in rows]
    )


def learnt_sequence(prompt: Sequence[int], answer: ScoredAnswer) -> TokenSequence:
    """Prompt and answer as they were sampled, token for token; the prompt is not learnt."""
    counted = [False] * len(prompt) + [True] * len(answer.tokens)
    return TokenSequence(tokens=[*prompt, *answer.tokens], counted=counted)


def best(group: Sequence[ScoredAnswer]) -> ScoredAnswer | None:
    """The first of those with the highest score: answers are drawn alike, so it is a random one of them."""
    scored = [answer for answer in group if answer.is_scored]
    return max(scored, key=lambda answer: answer.score) if scored else None


def chosen(groups: Groups, n: int) -> list[ScoredAnswer]:
    """The best of the first n answers to each prompt that has a scored one."""
    return [answer for group in groups if (answer := best(group[:n]))]


def round_metrics(groups: Groups, n: int) -> dict[str, float]:
    """`…/mean` is of all answers, `…/best` of the best of n to each prompt; with n = 1 there is no choice."""
    answers = [answer for group in groups for answer in group]
    scores = [answer.score for answer in answers if answer.is_scored]
    metrics = {
        "reward/mean": fmean(scores) if scores else math.nan,
        "reward/std": pstdev(scores) if scores else math.nan,
        "reward/unscored": 1 - len(scores) / len(answers),
        "length/mean": fmean(len(answer.tokens) for answer in answers),
        "length/truncated": fmean(not answer.is_finished for answer in answers),
        **_means("gold/mean", [answer.gold for answer in answers]),
        **_means("kl/mean", [answer.kl for answer in answers]),
    }
    best_answers = chosen(groups, n) if n > 1 else []
    if not best_answers:
        return metrics
    own_kl = _means("kl/best", [answer.kl for answer in best_answers])
    return metrics | {
        "reward/best": fmean(answer.score for answer in best_answers),
        "length/best": fmean(len(answer.tokens) for answer in best_answers),
        **_means("gold/best", [answer.gold for answer in best_answers]),
        **{name: value + best_of_kl(n) for name, value in own_kl.items()},
    }


def frontier(groups: Groups, n: int) -> dict[str, Any]:
    """Reward (and gold) of the best of 1, 2, 4, … n answers over its KL, all estimated from the same answers."""
    whole = [group for group in groups if all(answer.is_scored for answer in group)]
    sizes = sorted({2**power for power in range(n.bit_length()) if 2**power <= n} | {n}) if whole else []
    scores_GN = torch.tensor([[answer.score for answer in group] for group in whole], dtype=torch.float64)
    golds = [answer.gold for group in whole for answer in group]
    curve: list[dict[str, float]] = []
    for size in sizes:
        weights_GN = best_of_weights(scores_GN, n=size)
        point = {"n": size, "kl": best_of_kl(size), "reward": (weights_GN * scores_GN).sum(dim=1).mean().item()}
        if None not in golds:
            golds_GN = torch.tensor(golds, dtype=torch.float64).view_as(scores_GN)
            point["gold"] = (weights_GN * golds_GN).sum(dim=1).mean().item()
        curve.append(point)
    return {"n": n, "prompts": len(whole), "left_out": len(groups) - len(whole), "curve": curve}


def sample_record(answer: ScoredAnswer, prompt: str) -> Mapping[str, Any]:
    """A line of `samples.jsonl`."""
    return {
        "number": answer.prompt,
        "prompt": prompt,
        "answer": answer.text,
        "reward": answer.score if answer.is_scored else None,
        "gold": answer.gold,
        "kl": answer.kl,
        "length": len(answer.tokens),
        "finished": answer.is_finished,
    }


def _grouped(answers: Sequence[ScoredAnswer]) -> Groups:
    """Neighbours answer the same prompt."""
    return [list(group) for _, group in groupby(answers, key=lambda answer: answer.prompt)]


def _means(name: str, values: Sequence[float | None]) -> dict[str, float]:
    """A mean under its name; nothing where no value is known."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return {name: fmean(known)} if known else {}


def _number(value: float | None) -> float:
    return math.nan if value is None else value
