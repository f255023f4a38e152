"""The pairs that could be asked, and what a reward model thinks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from kedge.core.batches import pad_tokens
from kedge.core.errors import ModelError
from kedge.core.records import send
from kedge.core.seeds import seed_for
from kedge.core.stats import Floats, Ints, sigmoid
from kedge.core.world import ALONE, World
from kedge.data.auditing.minhash import Sketches
from kedge.data.auditing.neighbours import clusters
from kedge.data.examples import Message, Messages, Pair, Prompt
from kedge.data.tokenizer import padding_id
from kedge.feedback.choice import AtRandom, Criterion, DOptimal, Ensemble, Uncertain, laplace_covariance, projected
from kedge.models.reward.reward_model import RewardModel
from kedge.models.training.passes import InferenceSize
from kedge.stages.rl.judge import Judge

MOST_PAIRS = 8
"""Of one prompt: with many answers their pairs, drawn at random, are enough to choose from."""
_NEAR = 0.8
"""Jaccard similarity from which on two prompts are nearly the same."""
_PRECISION = 1.0
"""Of the head's prior, for features whose mean square is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer to a prompt."""

    text: str
    model: str
    seed: int
    scores: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPair:
    """Two unlike answers to a prompt, by their numbers; `drawn` is the probability that it is in the pool."""

    prompt: int
    first: int
    second: int
    drawn: float


def pairs_of(answers: Sequence[Sequence[Answer]], *, seed: int) -> list[PoolPair]:
    """Of each prompt, pairs of answers with unlike texts, at most `MOST_PAIRS`."""
    pool: list[PoolPair] = []
    for prompt, own in enumerate(answers):
        different = [(a, b) for a, b in combinations(range(len(own)), 2) if own[a].text != own[b].text]
        rng = np.random.default_rng(seed_for(seed, "pairs", prompt))
        taken = rng.permutation(len(different))[:MOST_PAIRS]
        pool += [
            PoolPair(prompt=prompt, first=a, second=b, drawn=len(taken) / len(different))
            for a, b in (different[place] for place in sorted(taken.tolist()))
        ]
    return pool


def near_prompts(prompts: Sequence[Prompt]) -> list[int]:
    """For each prompt the group of those that are nearly the same."""
    sketches = Sketches(seed=0)
    for prompt in prompts:
        sketches.add("\n".join(message.content for message in prompt.prompt))
    return [int(label) for label in clusters(sketches.sketched(), _NEAR)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Opinion:
    """What a reward model says of answers, by prompt and number: scores of each member, and what its head reads."""

    score_MA: Floats
    hidden_AD: Floats | None
    start: tuple[int, ...]
    """The place of each prompt's first answer."""

    def places(self, pool: Sequence[PoolPair]) -> tuple[Ints, Ints]:
        first = np.array([self.start[pair.prompt] + pair.first for pair in pool], dtype=np.int64)
        return first, np.array([self.start[pair.prompt] + pair.second for pair in pool], dtype=np.int64)


def opinion(
    judge: Judge, prompts: Sequence[Prompt], answers: Sequence[Sequence[Answer]], *, hidden: bool, world: World
) -> Opinion:
    texts = [
        (prompt.prompt, (Message("assistant", answer.text),))
        for prompt, own in zip(prompts, answers, strict=True)
        for answer in own
    ]
    start = np.cumsum([0, *(len(own) for own in answers)])[:-1].tolist()
    score_MA, hidden_AD = _read(judge, texts, hidden=hidden, world=world)
    return Opinion(score_MA=score_MA, hidden_AD=hidden_AD, start=tuple(start))


def _read(
    judge: Judge, texts: Sequence[tuple[Messages, Messages]], *, hidden: bool, world: World
) -> tuple[Floats, Floats | None]:
    """Raw scores of all members, the mean over objectives; and the last hidden states of the first member."""
    sequences = [judge.encoder.tokens(prompt, answer) for prompt, answer in texts]
    member = judge.members[0]
    if hidden and not isinstance(member, RewardModel):
        raise ModelError(f"{judge.place}: choose: d_optimal reads the hidden states of a reward model")
    pad, device = padding_id(member.tokenizer), member.device

    def read(rows: list[int]) -> Tensor:
        tokens_BT, mask_BT = pad_tokens([sequences[row] for row in rows], pad=pad)
        tokens_BT = send(tokens_BT, device)
        scores_BM = torch.stack(
            [one.score_tokens(tokens_BT, mask_BT, normalised=False).mean(dim=1) for one in judge.members], dim=1
        )
        if not hidden or not isinstance(member, RewardModel):
            return scores_BM
        return torch.cat([scores_BM, member.last_hidden(tokens_BT, mask_BT)], dim=1)

    result_AE = InferenceSize(device, world=world).by_length([len(tokens) for tokens in sequences], read)
    table_AE: Floats = result_AE.double().cpu().numpy()
    members = len(judge.members)
    return table_AE[:, :members].T, table_AE[:, members:] if hidden else None


def criterion_of(
    kind: str, pool: Sequence[PoolPair], view: Opinion | None, judge: Judge | None, asked: Sequence[Pair], *, seed: int
) -> Criterion:
    """How pairs are chosen: without an opinion at random."""
    if view is None or judge is None or kind == "random":
        return AtRandom(pairs=len(pool))
    first, second = view.places(pool)
    p_MN = sigmoid(view.score_MA[:, first] - view.score_MA[:, second])
    match kind:
        case "ensemble":
            if len(p_MN) < 2:
                raise ModelError(f"{judge.place}: choose: ensemble needs a reward model with members: 2 or more")
            return Ensemble(p_MN=p_MN)
        case "uncertain":
            return Uncertain(p_N=p_MN.mean(axis=0))
        case _:
            assert view.hidden_AD is not None
            return _d_optimal(
                view.hidden_AD[first] - view.hidden_AD[second], p_MN.mean(axis=0), judge, asked, seed=seed
            )


def _d_optimal(difference_ND: Floats, p_N: Floats, judge: Judge, asked: Sequence[Pair], *, seed: int) -> DOptimal:
    features_ND = projected(difference_ND, seed=seed)
    scale = float(np.sqrt(np.square(features_ND).mean())) or 1.0
    size = features_ND.shape[1]
    covariance_DD = np.eye(size) / _PRECISION
    if asked:
        texts = [(pair.prompt, answer) for pair in asked for answer in (pair.chosen, pair.rejected)]
        score_MA, hidden_AD = _read(judge, texts, hidden=True, world=ALONE)
        assert hidden_AD is not None
        before_ND = projected(hidden_AD[0::2] - hidden_AD[1::2], seed=seed) / scale
        p_before_N = sigmoid((score_MA[:, 0::2] - score_MA[:, 1::2]).mean(axis=0))
        covariance_DD = laplace_covariance(before_ND, p_before_N, precision=_PRECISION)
    return DOptimal(features_ND=features_ND / scale, covariance_DD=covariance_DD, p_N=p_N)
