"""A reward model or an ensemble as a source: on the sampled tokens themselves, or on text where tokenizers differ.

Shape letters: B sequences, T token positions, K objectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kedge.core.answers import Answer
from kedge.core.batches import pad_tokens
from kedge.core.errors import ConfigError, DataError
from kedge.core.records import Rollouts
from kedge.core.suggest import did_you_mean
from kedge.rewards.failures import FailureCounter, ScoreResult, Source, unscored
from kedge.rewards.settings import ModelSource


class Scorer(Protocol):
    """What is used of `kedge.models.reward.ensemble.Scorer`, so that this module does not import transformers."""

    @property
    def objectives(self) -> tuple[str, ...]: ...
    def score_tokens(self, tokens_BT: Tensor, attention_mask_BT: Tensor, *, normalised: bool = True) -> Tensor: ...


class OnTokens:
    """Scores the sampled tokens as they are: for a reward model with the policy's tokenizer."""

    def __init__(self, scorer: Scorer, settings: ModelSource, counter: FailureCounter) -> None:
        self._scorer = scorer
        self._objective = objective_index(scorer, settings)
        self._rows = settings.rows
        self._counter = counter

    def score(self, rollouts: Rollouts) -> Tensor:
        # On the host, where passes are laid out: the only wait for the device before the scores are read.
        tokens_BT, mask_BT = rollouts.tokens_BT, rollouts.attention_mask_BT.cpu()
        parts = [
            _scores(self._scorer, tokens_BT[at : at + self._rows], mask_BT[at : at + self._rows], self._objective)
            for at in range(0, tokens_BT.shape[0], self._rows)
        ]
        scores_B = torch.cat(parts) if parts else torch.empty(0)
        scores_B = torch.where(scores_B.isfinite(), scores_B, torch.nan)
        self._counter.add([_result(score) for score in scores_B.tolist()])
        return scores_B.to(tokens_BT.device)


def on_text(scorer: Scorer, settings: ModelSource, encode: Callable[[Answer], Sequence[int]]) -> Source:
    """Scores answers as the tokens that `encode` gives; a row for which it raises a DataError has no score."""
    objective = objective_index(scorer, settings)

    def judge(answers: Sequence[Answer]) -> list[ScoreResult]:
        results: dict[int, ScoreResult] = {}
        rows: list[tuple[int, Sequence[int]]] = []
        for index, answer in enumerate(answers):
            try:
                rows.append((index, encode(answer)))
            except DataError as error:
                results[index] = unscored(str(error))
        for at in range(0, len(rows), settings.rows):
            part = rows[at : at + settings.rows]
            scores_B = _scores(scorer, *pad_tokens([tokens for _, tokens in part], pad=0), objective)
            results |= {index: _result(score) for (index, _), score in zip(part, scores_B.tolist(), strict=True)}
        return [results[index] for index in range(len(answers))]

    return Source(judge)


def objective_index(scorer: Scorer, settings: ModelSource) -> int:
    """Which head of the reward model `settings` name; a model with a single head needs no name."""
    name, known = settings.objective, scorer.objectives
    if name is None and len(known) == 1:
        return 0
    if name in known:
        return known.index(name)
    problem = f"'{name}'{did_you_mean(name, known)}" if name else "none named"
    raise ConfigError(f"{settings.place}: the reward model has the objectives {', '.join(known)}; objective: {problem}")


def _scores(scorer: Scorer, tokens_BT: Tensor, mask_BT: Tensor, objective: int) -> Tensor:
    return scorer.score_tokens(tokens_BT, mask_BT)[:, objective].float()


def _result(score: float) -> ScoreResult:
    result = ScoreResult(score)
    return result if result.is_scored else unscored(f"the reward model gave {score}")
