"""A reward model or an ensemble as a source: on the sampled tokens themselves, or on text where tokenizers differ.

Shape letters: B sequences, T token positions, K objectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kedge.core.answers import Answer
from kedge.core.errors import ConfigError, DataError
from kedge.core.records import Rollouts
from kedge.core.suggest import did_you_mean
from kedge.rewards.failures import Tally
from kedge.rewards.settings import ModelSource
from kedge.rewards.verdicts import Source, Verdict, unscored


class Scorer(Protocol):
    """The part of `kedge.models.reward.ensemble.Scorer` that is needed here: without it, no transformers."""

    @property
    def objectives(self) -> tuple[str, ...]: ...
    def score_tokens(self, tokens_BT: Tensor, attention_mask_BT: Tensor, *, normalised: bool = True) -> Tensor: ...


class OnTokens:
    """Scores what was sampled, token by token as it was sampled: for a reward model with the policy's tokenizer."""

    def __init__(self, scorer: Scorer, settings: ModelSource, tally: Tally) -> None:
        self._scorer = scorer
        self._objective = objective_index(scorer, settings)
        self._rows = settings.rows
        self._tally = tally

    def score(self, rollouts: Rollouts) -> Tensor:
        tokens_BT, mask_BT = rollouts.tokens_BT, rollouts.attention_mask_BT
        parts = [
            _scores(self._scorer, tokens_BT[at : at + self._rows], mask_BT[at : at + self._rows], self._objective)
            for at in range(0, tokens_BT.shape[0], self._rows)
        ]
        scores_B = torch.cat(parts) if parts else torch.empty(0)
        scores_B = torch.where(scores_B.isfinite(), scores_B, torch.nan)
        self._tally.add([_verdict(score) for score in scores_B.tolist()])
        return scores_B.to(tokens_BT.device)


def on_text(scorer: Scorer, settings: ModelSource, encode: Callable[[Answer], Sequence[int]]) -> Source:
    """Scores the text as `encode` renders it: a DataError of `encode` (an answer too long) costs that row its score."""
    objective = objective_index(scorer, settings)

    def judge(answers: Sequence[Answer]) -> list[Verdict]:
        verdicts: dict[int, Verdict] = {}
        rows: list[tuple[int, Sequence[int]]] = []
        for index, answer in enumerate(answers):
            try:
                rows.append((index, encode(answer)))
            except DataError as error:
                verdicts[index] = unscored(str(error))
        for at in range(0, len(rows), settings.rows):
            part = rows[at : at + settings.rows]
            scores_B = _scores(scorer, *_padded([tokens for _, tokens in part]), objective)
            verdicts |= {index: _verdict(score) for (index, _), score in zip(part, scores_B.tolist(), strict=True)}
        return [verdicts[index] for index in range(len(answers))]

    return Source(judge)


def objective_index(scorer: Scorer, settings: ModelSource) -> int:
    wanted, known = settings.objective, scorer.objectives
    if wanted is None and len(known) == 1:
        return 0
    if wanted in known:
        return known.index(wanted)
    found = f"'{wanted}'{did_you_mean(wanted, known)}" if wanted else "none named"
    raise ConfigError(f"{settings.place}: the reward model has the objectives {', '.join(known)}; objective: {found}")


def _scores(scorer: Scorer, tokens_BT: Tensor, mask_BT: Tensor, objective: int) -> Tensor:
    return scorer.score_tokens(tokens_BT, mask_BT)[:, objective].float()


def _padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Padded on the right with 0, which the mask hides."""
    longest = max(map(len, rows))
    tokens_BT = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.int64)
    length_B = torch.tensor([len(row) for row in rows])
    return tokens_BT, torch.arange(longest)[None, :] < length_B[:, None]


def _verdict(score: float) -> Verdict:
    verdict = Verdict(score)
    return verdict if verdict.is_scored else unscored(f"the reward model gave {score}")
