"""Scores of many texts, and the report on held-out preferences made from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations

import torch
from torch import Tensor

from kedge.data.tokenizer import padding_id
from kedge.models.reward.ensemble import Member
from kedge.models.settings import Combine, UncertaintyWeighted
from kedge.report.reward import Combine as ReportCombine
from kedge.report.reward import RewardReport, ScoredPair, reward_report
from kedge.stages.reward.comparisons import Judged, fold_of

TOKENS_AT_ONCE = 16_384
"""Tokens, padding counted, in one forward pass of scoring."""
MOST_TRAINED = 1000
"""Training comparisons that are scored to compare with the held-out ones."""

_IN_REPORTS: dict[str, ReportCombine] = {"mean": "mean", "worst_case": "worst", "uncertainty_weighted": "uncertainty"}


def score_sequences(
    members: Sequence[Member],
    sequences: Sequence[Sequence[int]],
    *,
    normalised: bool = True,
    progress: Callable[[int], None] = lambda _: None,
) -> Tensor:
    """`scores_MNK` of N token sequences in their order, computed longest first in batches of similar length."""
    order = sorted(range(len(sequences)), key=lambda at: -len(sequences[at]))
    pad = padding_id(members[0].tokenizer)
    parts: list[Tensor] = []
    start = 0
    while start < len(order):
        width = len(sequences[order[start]])
        rows = order[start : start + max(1, TOKENS_AT_ONCE // width)]
        tokens_BT = torch.full((len(rows), width), pad)
        mask_BT = torch.zeros((len(rows), width), dtype=torch.bool)
        for b, at in enumerate(rows):
            tokens_BT[b, : len(sequences[at])] = torch.tensor(sequences[at])
            mask_BT[b, : len(sequences[at])] = True
        each = [member.score_tokens(tokens_BT, mask_BT, normalised=normalised).cpu() for member in members]
        parts.append(torch.stack(each))
        start += len(rows)
        progress(start)
    return torch.cat(parts, dim=1)[:, torch.tensor(order).argsort()]


def report_on(
    members: Sequence[Member],
    held: Sequence[Judged],
    *,
    trained: Sequence[Judged],
    combine: Combine,
    facts: Mapping[str, str],
) -> RewardReport:
    """The report on `held`, with the accuracy on a part of `trained` beside it."""
    how, coef = in_reports(combine)
    return reward_report(
        scored_pairs(members, held),
        combine=how,
        uncertainty_coef=coef,
        train_accuracy=_accuracy(scored_pairs(members, trained[:MOST_TRAINED])),
        facts=facts,
    )


def report_out_of_fold(members: Sequence[Member], items: Sequence[Judged], *, seed: int) -> RewardReport:
    """A report on training comparisons, each scored by the one member of an ensemble that never saw its prompt.

    This is cross-validation of a member: the ensemble of all is not asked, and tends to be better.
    """
    parts: list[list[Judged]] = [[] for _ in members]
    for one in items:
        parts[fold_of(one, members=len(members), seed=seed)].append(one)
    scored = [scored_pairs([member], own) for member, own in zip(members, parts, strict=True) if own]
    return reward_report([pair for pairs in scored for pair in pairs])


def in_reports(combine: Combine) -> tuple[ReportCombine, float]:
    """How a report combines members, and its coefficient of uncertainty."""
    return _IN_REPORTS[combine.kind], combine.coef if isinstance(combine, UncertaintyWeighted) else 0.0


def scored_pairs(members: Sequence[Member], items: Sequence[Judged]) -> list[ScoredPair]:
    """Every strict preference in `items` with the scores of its two answers under its own objective."""
    scores_MNK = score_sequences(members, [answer for one in items for answer in one.ranked.answers])
    found: list[ScoredPair] = []
    first = 0
    for one in items:
        own_MA = scores_MNK[:, first : first + len(one.lengths), one.ranked.objective]
        first += len(one.lengths)
        for better, worse in permutations(range(len(one.lengths)), 2):
            if one.ranked.rank[better] < one.ranked.rank[worse]:
                found.append(_scored(one, own_MA, better, worse))
    return found


def _scored(one: Judged, scores_MA: Tensor, better: int, worse: int) -> ScoredPair:
    return ScoredPair(
        chosen=tuple(scores_MA[:, better].tolist()),
        rejected=tuple(scores_MA[:, worse].tolist()),
        chosen_length=one.lengths[better],
        rejected_length=one.lengths[worse],
        margin=one.margin,
        where=one.where,
        prompt=one.prompt_text,
        chosen_text=one.answer_texts[better],
        rejected_text=one.answer_texts[worse],
    )


def _accuracy(pairs: Sequence[ScoredPair]) -> float:
    return sum(sum(pair.chosen) > sum(pair.rejected) for pair in pairs) / len(pairs)
