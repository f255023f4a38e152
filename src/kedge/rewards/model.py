"""A reward model or an ensemble as a source: on the sampled tokens themselves, or on text where tokenizers differ.

Shape letters: B sequences, T token positions, K objectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from kedge.core.answers import Answer
from kedge.core.batches import pad_tokens
from kedge.core.errors import ConfigError, DataError
from kedge.core.records import Rollouts, send
from kedge.core.suggest import did_you_mean
from kedge.core.world import ALONE, World
from kedge.models.training.passes import InferenceSize
from kedge.rewards.failures import FailureCounter, ScoreResult, Source, unscored
from kedge.rewards.settings import ModelSource


class Scorer(Protocol):
    """What is used of `kedge.models.reward.ensemble.Scorer`, so that this module does not import transformers."""

    @property
    def objectives(self) -> tuple[str, ...]: ...
    @property
    def device(self) -> torch.device: ...
    def score_tokens(self, tokens_BT: Tensor, attention_mask_BT: Tensor, *, normalised: bool = True) -> Tensor: ...


class OnTokens:
    """Scores the sampled tokens as they are: for a reward model with the policy's tokenizer."""

    def __init__(self, scorer: Scorer, settings: ModelSource, counter: FailureCounter, *, world: World = ALONE) -> None:
        """The processes of `world` share the rows."""
        self._scorer = scorer
        self._objective = objective_index(scorer, settings)
        self._inference = InferenceSize(scorer.device, settings.rows, world=world)
        self._counter = counter

    def score(self, rollouts: Rollouts) -> Tensor:
        return self.counted(self.all_scores(rollouts))

    def all_scores(self, rollouts: Rollouts) -> Tensor:
        """`scores_BK`, all that the reward model says of each row, in their order and on their device."""
        tokens_BT = rollouts.tokens_BT
        # On the host, where passes are laid out: the only wait for the device before the scores are read.
        mask_BT = rollouts.attention_mask_BT.cpu()
        # Up to the last token, wherever a row begins.
        width_B: list[int] = (mask_BT * torch.arange(1, mask_BT.shape[1] + 1)).amax(dim=1).tolist()

        def score(rows: list[int]) -> Tensor:
            index_R, width = torch.tensor(rows), max(width_B[row] for row in rows)
            tokens_RT = tokens_BT.index_select(0, send(index_R, tokens_BT.device))[:, :width]
            return self._scorer.score_tokens(tokens_RT, mask_BT[index_R, :width]).float()

        if not width_B:
            return torch.empty(0, self._objective + 1, device=tokens_BT.device)
        return self._inference.by_length(width_B, score).to(tokens_BT.device)

    def counted(self, scores_BK: Tensor) -> Tensor:
        """`scores_B` of the objective; what is no number is NaN, and counted as a failure."""
        scores_B = scores_BK[:, self._objective]
        scores_B = torch.where(scores_B.isfinite(), scores_B, torch.nan)
        self._counter.add([_result(score) for score in scores_B.tolist()])
        return scores_B


def on_text(
    scorer: Scorer,
    settings: ModelSource,
    encode: Callable[[Answer], Sequence[int]],
    *,
    turn: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Source:
    """Scores answers as the tokens that `encode` gives; a row for which it raises a DataError has no score. `turn` is
    entered around all that the scorer is asked of one batch."""
    objective = objective_index(scorer, settings)
    inference = InferenceSize(scorer.device, settings.rows)

    def judge(answers: Sequence[Answer]) -> list[ScoreResult]:
        results: dict[int, ScoreResult] = {}
        rows: list[tuple[int, Sequence[int]]] = []
        for index, answer in enumerate(answers):
            try:
                rows.append((index, encode(answer)))
            except DataError as error:
                results[index] = unscored(str(error))

        def score(part: list[int]) -> Tensor:
            tokens_BT, mask_BT = pad_tokens([rows[row][1] for row in part], pad=0)
            return scorer.score_tokens(send(tokens_BT, scorer.device), mask_BT)[:, objective].float()

        with turn():
            scores_B = inference.by_length([len(tokens) for _, tokens in rows], score) if rows else torch.empty(0)
        results |= {index: _result(score) for (index, _), score in zip(rows, scores_B.tolist(), strict=True)}
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


def _result(score: float) -> ScoreResult:
    result = ScoreResult(score)
    return result if result.is_scored else unscored(f"the reward model gave {score}")
