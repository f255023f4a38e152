"""A language model that answers batches of requests with the local generator, and gives log-probabilities of tokens.

An answer depends on the prompt, the seed, its number and the settings, not on what it is computed beside. Log-probs are
those of the model itself, at temperature 1 and among all tokens, from a forward pass over the finished text.
Shape letters: B rows, T positions, N predicted tokens, D width, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from kedge.algorithms.logprobs import logits_of
from kedge.core.batches import pad_tokens
from kedge.core.records import Prompts, cut, send
from kedge.core.seeds import seed_for
from kedge.data.template import stop_ids
from kedge.data.tokenizer import padding_id
from kedge.models.forward.heads import LanguageModel, language_model
from kedge.models.loading.describe import window_of
from kedge.models.loading.load import DTypeName, load_causal
from kedge.models.settings import AutoSize
from kedge.rollout.local import LocalGenerator
from kedge.rollout.rows import rows_at_once
from kedge.rollout.settings import SamplingSettings
from kedge.stages.rl.reward import decoded
from kedge.stages.shared.tokenizer import tokenizer_for

_PASS_TOKENS = 16_384
"""Tokens of one pass for log-probabilities."""
_LOGIT_ROWS = 512
"""Tokens whose logits are in memory at once."""
_UNKNOWN_WINDOW = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt of a request, and what is asked for."""

    tokens: tuple[int, ...]
    seed: int
    answers: int
    top: int | None = None
    """How many likeliest tokens are given with the log-probabilities; None: none of these are asked for."""
    with_prompt: bool = False
    """Log-probabilities of the prompt's tokens too."""


@dataclass(frozen=True, slots=True)
class TokenFacts:
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens there, with their log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    tokens: tuple[int, ...]
    """Without the token that ended it, if one did."""
    num_sampled: int
    """With it."""
    is_finished: bool
    facts: tuple[TokenFacts | None, ...] | None = None
    """Of each token, those of the prompt first where these were asked for; None of the first token of all."""


class TextModel:
    """The model, its tokenizer and one generator, which is kept while the settings stay the same."""

    def __init__(
        self, place: str, *, device: str, dtype: DTypeName, chat_template: str | None = None, rows: AutoSize = "auto"
    ) -> None:
        self.tokenizer = tokenizer_for(place, chat_template)
        # The generator looks for stop strings in a thread of its own, and a tokenizer is not for two threads at once.
        self._own_tokenizer = tokenizer_for(place, chat_template)
        self._model = load_causal(place, dtype=dtype, device=device)
        self._language_model: LanguageModel = language_model(self._model)
        self.window = window_of(self._model.config) or sys.maxsize
        self.vocabulary = len(self._language_model.head())
        longest = _UNKNOWN_WINDOW if self.window == sys.maxsize else self.window
        self.rows = rows_at_once(self._model, rows, longest=longest, total=1024)
        self.fingerprint = f"{self._model.device.type}-{str(self._model.dtype).removeprefix('torch.')}"
        self._stop_ids, self._pad = stop_ids(self.tokenizer), padding_id(self.tokenizer)
        self._kept: tuple[SamplingSettings, LocalGenerator] | None = None

    def compute(self, settings: SamplingSettings | None, batch: Sequence[Sequence[Question]]) -> list[list[Answered]]:
        """The answers to each request's questions, in order; without settings nothing is sampled, only read."""
        questions = [question for request in batch for question in request]
        answered = self._read_only(questions) if settings is None else self._sampled(settings, questions)
        with_facts = iter(self._with_facts(questions, answered))
        return [list(islice(with_facts, sum(question.answers for question in request))) for request in batch]

    def _sampled(self, settings: SamplingSettings, questions: Sequence[Question]) -> list[Answered]:
        # Equal questions with equal seeds have equal answers: each is sampled once.
        rows: dict[tuple[int, int], tuple[int, ...]] = {}
        places: list[tuple[int, int]] = []
        for question in questions:
            group = seed_for(question.seed, str(question.tokens))
            for number in range(question.answers):
                rows[group, number] = question.tokens
                places.append((group, number))
        prompts = Prompts(
            tokens=tuple(rows.values()), group=tuple(row[0] for row in rows), answer=tuple(row[1] for row in rows)
        )
        rollouts = self._generator(settings).generate(prompts, seed=0)
        tokens = [
            row_T[mask_T].tolist() for row_T, mask_T in zip(rollouts.tokens_BT, rollouts.response_mask_BT, strict=True)
        ]
        answers = {
            place: Answered(
                tokens=tuple(sampled[:-1] if self._ends(sampled) else sampled),
                num_sampled=len(sampled),
                is_finished=is_finished,
            )
            for place, sampled, is_finished in zip(rows, tokens, rollouts.finished_B.tolist(), strict=True)
        }
        return [answers[place] for place in places]

    def _ends(self, sampled: Sequence[int]) -> bool:
        return sampled[-1] in self._stop_ids

    def _read_only(self, questions: Sequence[Question]) -> list[Answered]:
        nothing = Answered(tokens=(), num_sampled=0, is_finished=False)
        return [nothing for question in questions for _ in range(question.answers)]

    def _generator(self, settings: SamplingSettings) -> LocalGenerator:
        if self._kept is not None and self._kept[0] == settings:
            return self._kept[1]
        self._kept = None  # its cache is free before the next is allocated
        generator = LocalGenerator(
            self._model,
            settings,
            stop_ids=self._stop_ids,
            pad=self._pad,
            max_rows=self.rows,
            decode=partial(decoded, self._own_tokenizer),
        )
        self._kept = settings, generator
        return generator

    def _with_facts(self, questions: Sequence[Question], answered: Sequence[Answered]) -> list[Answered]:
        """The answers with log-probabilities where their question asks for them."""
        asked = [question for question in questions for _ in range(question.answers)]
        read = {
            row: (asked[row].tokens + answer.tokens, 0 if asked[row].with_prompt else len(asked[row].tokens))
            for row, answer in enumerate(answered)
            if asked[row].top is not None
        }
        facts = self.token_facts(list(read.values()), top=max((asked[row].top or 0 for row in read), default=0))
        by_row = dict(zip(read, facts, strict=True))
        return [
            Answered(
                tokens=answer.tokens,
                num_sampled=answer.num_sampled,
                is_finished=answer.is_finished,
                facts=tuple(fact and _cut(fact, asked[row].top or 0) for fact in by_row[row])
                if row in by_row
                else None,
            )
            for row, answer in enumerate(answered)
        ]

    @torch.no_grad()
    def token_facts(self, texts: Sequence[tuple[tuple[int, ...], int]], *, top: int) -> list[list[TokenFacts | None]]:
        """Of each text's tokens from a place on; None for the first token of a text, which nothing predicts."""
        facts: dict[int, list[TokenFacts | None]] = {}
        rows = [row for row, (tokens, start) in enumerate(texts) if len(tokens) > max(start, 1)]
        with self._language_model.active():
            for part in cut(rows, length=lambda row: len(texts[row][0]), tokens=_PASS_TOKENS):
                facts |= dict(zip(part, self._pass([texts[row] for row in part], top=top), strict=True))
        return [facts.get(row, [None] if start == 0 else []) for row, (_, start) in enumerate(texts)]

    def _pass(self, texts: Sequence[tuple[tuple[int, ...], int]], *, top: int) -> Iterator[list[TokenFacts | None]]:
        tokens_BT, mask_BT = pad_tokens([tokens for tokens, _ in texts], pad=self._pad)
        start_B1 = torch.tensor([[max(start, 1)] for _, start in texts])
        only_BT = mask_BT & (torch.arange(tokens_BT.shape[1]) >= start_B1)
        hidden_ND, predicted = self._language_model.hidden(
            send(tokens_BT, self._language_model.device), mask_BT, only_BT
        )
        target_N = predicted.of(send(tokens_BT, self._language_model.device))
        found = iter(self._read(hidden_ND, target_N, top=top))
        for tokens, start in texts:
            first: list[TokenFacts | None] = [None] if start == 0 else []
            yield [*first, *islice(found, len(tokens) - max(start, 1))]

    def _read(self, hidden_ND: Tensor, target_N: Tensor, *, top: int) -> Iterator[TokenFacts]:
        head_VD = self._language_model.head()
        for at in range(0, len(target_N), _LOGIT_ROWS):
            logp_NV = logits_of(hidden_ND[at : at + _LOGIT_ROWS], head_VD).log_softmax(-1)
            own_N = logp_NV.gather(1, target_N[at : at + _LOGIT_ROWS, None])[:, 0].tolist()
            best_NK, token_NK = logp_NV.topk(min(top, logp_NV.shape[1]))
            for own, best_K, token_K in zip(own_N, best_NK.tolist(), token_NK.tolist(), strict=True):
                yield TokenFacts(own, tuple(zip(token_K, best_K, strict=True)))


def _cut(facts: TokenFacts, top: int) -> TokenFacts:
    return TokenFacts(facts.logprob, facts.top[:top])
