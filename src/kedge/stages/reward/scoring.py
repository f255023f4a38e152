"""Scores of many texts, and the report on held-out preferences made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

from torch import Tensor

from kedge.core.world import ALONE, World
from kedge.data.encoding.store import LazyRows
from kedge.models.reward.ensemble import Member
from kedge.models.settings import Combine, UncertaintyWeighted
from kedge.report.reward import Combine as ReportCombine
from kedge.report.reward import RewardReport, ScoredPair, reward_report
from kedge.stages.reward.comparisons import EncodedComparison, folds
from kedge.stages.rl.scoring import score_sequences

MOST_TRAINED = 1000
"""Training comparisons that are scored to compare with the held-out ones."""
MOST_OUT_OF_FOLD = 20_000
"""Training comparisons that are scored out of fold, taken evenly: their accuracy is known to 0.7 points then."""

_IN_REPORTS: dict[str, ReportCombine] = {"mean": "mean", "worst_case": "worst", "uncertainty_weighted": "uncertainty"}


def report_on(
    members: Sequence[Member],
    held_out: Sequence[EncodedComparison],
    *,
    trained: Sequence[EncodedComparison],
    combine: Combine,
    facts: Mapping[str, str],
    groups: Mapping[str, Mapping[str, str]] = {},
    world: World = ALONE,
) -> RewardReport:
    """The report on `held_out`, with the accuracy on a part of `trained` beside it; `groups` has the value of each
    field by the place of a comparison."""
    how, coef = in_reports(combine)
    pairs = scored_pairs(members, held_out, world=world)
    return reward_report(
        pairs,
        groups={field: [values[pair.where] for pair in pairs] for field, values in groups.items()},
        combine=how,
        uncertainty_coef=coef,
        train_accuracy=_accuracy(scored_pairs(members, trained[:MOST_TRAINED], world=world)),
        facts=facts,
    )


def report_out_of_fold(
    members: Sequence[Member], items: LazyRows[EncodedComparison], *, seed: int, world: World = ALONE
) -> RewardReport:
    """A report on training comparisons, each scored by the one member of an ensemble that never saw its prompt.

    This is cross-validation of a member: the ensemble of all is not asked, and tends to be better.
    """
    items = items[:: -(-len(items) // MOST_OUT_OF_FOLD)]
    member_of = folds(items, members=len(members), seed=seed)
    unseen = [items.take(member_of == number) for number in range(len(members))]
    scored = [
        scored_pairs([member], part, world=world) for member, part in zip(members, unseen, strict=True) if len(part)
    ]
    return reward_report([pair for pairs in scored for pair in pairs])


def in_reports(combine: Combine) -> tuple[ReportCombine, float]:
    """How a report combines members, and its coefficient of uncertainty."""
    return _IN_REPORTS[combine.kind], combine.coef if isinstance(combine, UncertaintyWeighted) else 0.0


def scored_pairs(
    members: Sequence[Member], items: Sequence[EncodedComparison], *, world: World = ALONE
) -> list[ScoredPair]:
    """Every strict preference in `items` with the scores of its two answers under its own objective."""
    answers = [answer for item in items for answer in item.ranked.answers]
    scores_MNK = score_sequences(members, answers, world=world)
    pairs: list[ScoredPair] = []
    first = 0
    for item in items:
        scores_MA = scores_MNK[:, first : first + len(item.lengths), item.ranked.objective]
        first += len(item.lengths)
        for better, worse in permutations(range(len(item.lengths)), 2):
            if item.ranked.rank[better] < item.ranked.rank[worse] and not item.is_tie:
                pairs.append(_scored(item, scores_MA, better, worse))
    return pairs


def _scored(item: EncodedComparison, scores_MA: Tensor, better: int, worse: int) -> ScoredPair:
    return ScoredPair(
        chosen=tuple(scores_MA[:, better].tolist()),
        rejected=tuple(scores_MA[:, worse].tolist()),
        chosen_length=item.lengths[better],
        rejected_length=item.lengths[worse],
        margin=item.margin,
        where=item.where,
        prompt=item.prompt_text,
        chosen_text=item.answer_texts[better],
        rejected_text=item.answer_texts[worse],
    )


def _accuracy(pairs: Sequence[ScoredPair]) -> float | None:
    return sum(sum(pair.chosen) > sum(pair.rejected) for pair in pairs) / len(pairs) if pairs else None
