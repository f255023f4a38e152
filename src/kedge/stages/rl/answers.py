"""The answers of a best-of-N round: drawn, scored, kept in a file, and told in numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

import orjson
import torch

from kedge.algorithms.best_of_n import best_of_weights
from kedge.core.records import Rollouts, repeated, to_device
from kedge.core.stats import best_of_kl
from kedge.data.writing import row_writer
from kedge.models.training.preference_objectives import Reference
from kedge.rewards.failures import Reward
from kedge.rollout.local import LocalGenerator
from kedge.stages.best_of_n.settings import BestOfNSettings
from kedge.stages.rl.divergence import log_ratios
from kedge.stages.rl.prompts import PromptDataset
from kedge.stages.rl.reward import decoded
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
    settings: BestOfNSettings
    book: PromptDataset
    tokenizer: PreTrainedTokenizerBase
    generator: LocalGenerator
    reward: Reward
    gold: Reward | None
    reference: Reference
    """Opens the model that the stage started from."""

    def draw(self, answers: int, *, seed: int, is_start: bool) -> Groups:
        """So many answers to every prompt. At the start the policy is its own reference, and no KL is measured."""
        size = max(1, self.settings.rows * _ROUNDS // answers)
        found: list[ScoredAnswer] = []
        for at in range(0, len(self.book.prompts), size):
            groups = range(at, min(at + size, len(self.book.prompts)))
            asked = [self.book.tokens[self.book.item(group)] for group in groups]
            rollouts = self.generator.generate(repeated(asked, ids=groups, answers=answers), seed)
            found += self._judged(rollouts, answers, [0.0] * len(rollouts.tokens_BT) if is_start else self.kl(rollouts))
        return [list(group) for _, group in groupby(found, key=lambda one: one.prompt)]

    def kl(self, rollouts: Rollouts) -> list[float]:
        with self.reference() as model:
            return log_ratios(model, rollouts, temperature=self.settings.sampling.temperature).tolist()

    def _judged(self, rollouts: Rollouts, answers: int, kl: Sequence[float]) -> list[ScoredAnswer]:
        scores, gold = self.reward.score(rollouts).tolist(), self.gold.score(rollouts).tolist() if self.gold else None
        on_cpu = to_device(rollouts, "cpu")
        made: list[ScoredAnswer] = []
        for row, (tokens_T, mask_T) in enumerate(zip(on_cpu.tokens_BT, on_cpu.response_mask_BT, strict=True)):
            tokens, is_finished = tokens_T[mask_T].tolist(), bool(on_cpu.finished_B[row])
            made.append(
                ScoredAnswer(
                    prompt=self.book.item(int(on_cpu.group_B[row])),
                    number=row % answers,
                    tokens=tuple(tokens),
                    text=decoded(self.tokenizer, tokens[:-1] if is_finished else tokens),
                    is_finished=is_finished,
                    score=scores[row],
                    gold=gold[row] if gold else None,
                    kl=kl[row] if self.settings.measures_kl else None,
                )
            )
        return made


def kept(file: Path, draw: Callable[[], Groups]) -> tuple[Groups, float | None]:
    """The answers in `file`, or new ones that are written there; and the seconds that drawing took, if it was done."""
    if file.exists():
        rows = [orjson.loads(line) for line in file.read_bytes().splitlines()]
        found = [ScoredAnswer(**row | {"tokens": tuple(row["tokens"]), "score": _number(row["score"])}) for row in rows]
        return [list(group) for _, group in groupby(found, key=lambda one: one.prompt)], None
    since = time.perf_counter()
    groups = draw()
    with row_writer(file) as write:
        for one in (one for group in groups for one in group):
            write(asdict(one))
    return groups, time.perf_counter() - since


def best(group: Sequence[ScoredAnswer]) -> ScoredAnswer | None:
    """The first of those with the highest score: answers are drawn alike, so it is a random one of them."""
    scored = [one for one in group if one.is_scored]
    return max(scored, key=lambda one: one.score) if scored else None


def chosen(groups: Groups, n: int) -> list[ScoredAnswer]:
    """The best of the first n answers to each prompt that has a scored one."""
    return [found for group in groups if (found := best(group[:n]))]


def facts_of(groups: Groups, n: int) -> dict[str, float]:
    """`…/mean` is of all answers, `…/best` of the best of n to each prompt; with n = 1 there is no choice."""
    answers = [one for group in groups for one in group]
    scores = [one.score for one in answers if one.is_scored]
    facts = {
        "reward/mean": fmean(scores) if scores else math.nan,
        "reward/std": pstdev(scores) if scores else math.nan,
        "reward/unscored": 1 - len(scores) / len(answers),
        "length/mean": fmean(len(one.tokens) for one in answers),
        "length/truncated": fmean(not one.is_finished for one in answers),
        **_means("gold/mean", [one.gold for one in answers]),
        **_means("kl/mean", [one.kl for one in answers]),
    }
    taken = chosen(groups, n) if n > 1 else []
    if not taken:
        return facts
    further = _means("kl/best", [one.kl for one in taken])
    return facts | {
        "reward/best": fmean(one.score for one in taken),
        "length/best": fmean(len(one.tokens) for one in taken),
        **_means("gold/best", [one.gold for one in taken]),
        **{name: value + best_of_kl(n) for name, value in further.items()},
    }


def frontier(groups: Groups, n: int) -> dict[str, Any]:
    """Reward (and gold) of the best of 1, 2, 4, … n answers over its KL, all estimated from the same answers."""
    whole = [group for group in groups if all(one.is_scored for one in group)]
    sizes = sorted({2**power for power in range(n.bit_length()) if 2**power <= n} | {n}) if whole else []
    scores_GN = torch.tensor([[one.score for one in group] for group in whole], dtype=torch.float64)
    golds = [one.gold for group in whole for one in group]
    curve: list[dict[str, float]] = []
    for size in sizes:
        weights_GN = best_of_weights(scores_GN, n=size)
        point = {"n": size, "kl": best_of_kl(size), "reward": (weights_GN * scores_GN).sum(dim=1).mean().item()}
        if None not in golds:
            golds_GN = torch.tensor(golds, dtype=torch.float64).view_as(scores_GN)
            point["gold"] = (weights_GN * golds_GN).sum(dim=1).mean().item()
        curve.append(point)
    return {"n": n, "prompts": len(whole), "left_out": len(groups) - len(whole), "curve": curve}


def sample_of(one: ScoredAnswer, prompt: str) -> Mapping[str, Any]:
    """What `samples.jsonl` says of an answer."""
    told = {"prompt": prompt, "answer": one.text, "reward": one.score if one.is_scored else None, "gold": one.gold}
    return {"number": one.prompt, **told, "kl": one.kl, "length": len(one.tokens), "finished": one.is_finished}


def _means(name: str, values: Sequence[float | None]) -> dict[str, float]:
    """A mean under its name, where there is anything to tell."""
    given = [value for value in values if value is not None and math.isfinite(value)]
    return {name: fmean(given)} if given else {}


def _number(value: float | None) -> float:
    return math.nan if value is None else value
