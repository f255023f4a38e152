"""A reward model beside the one before it, on pairs that neither has learnt from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np

from kedge.core.stats import Floats, spearman
from kedge.data.examples import Messages, Pair, Ranking, text_of
from kedge.data.reading import read
from kedge.models.reward.ensemble import combined
from kedge.report.reward import ScoredPair, reward_report
from kedge.stages.drift.settings import DriftStageSettings
from kedge.stages.rl.judge import Judge, load_judge
from kedge.stages.rl.scoring import score_sequences
from kedge.stages.shared.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class _Preference:
    prompt: Messages
    chosen: Messages
    rejected: Messages
    where: str


def reward_figures(context: Context, settings: DriftStageSettings) -> dict[str, Any]:
    """Accuracy on the held-out labels of every round, calibration, and how the anchor's pairs are ordered now."""
    judge = load_judge(context.input("reward"), device=context.device)
    sources = context.inputs("heldout")
    held_out = {
        name: list(_preferences(source))
        for name, source in zip(names_of(settings.heldout, context.round), sources, strict=True)
    }
    reports = {name: _report(context, judge, pairs) for name, pairs in held_out.items() if pairs}
    figures: dict[str, Any] = {"heldout": {name: report for name, (report, _) in reports.items()}}
    if reports:
        figures["ece"] = list(reports.values())[-1][1]
    if context.inputs("anchor") and context.inputs("previous_reward"):
        before = load_judge(context.input("previous_reward"), device=context.device)
        pairs = list(_preferences(context.input("anchor")))
        if pairs:
            figures["anchor"] = changes_of_order(_scores(context, before, pairs), _scores(context, judge, pairs))
    return figures


def names_of(entries: Sequence[str], number: int) -> list[str]:
    """The round of each set of held-out labels.

    >>> names_of(["round-1.label.heldout", "label.heldout"], 2), names_of(["heldout.jsonl"], 3)
    (['round-1', 'round-2'], ['round-1'])
    """
    own = f"round-{number}" if len(entries) > 1 else "round-1"
    return [entry.partition(".")[0] if entry.startswith("round-") else own for entry in entries]


def changes_of_order(old_N2: Floats, new_N2: Floats) -> dict[str, Any]:
    """How alike two reward models order answers: the rank correlation of all scores, and the share of the pairs that
    the new one turns round.

    >>> import numpy as np
    >>> old, new = np.array([[2.0, 1.0], [4.0, 3.0]]), np.array([[2.0, 1.0], [3.0, 4.0]])
    >>> changes_of_order(old, new)
    {'pairs': 2, 'spearman': 0.8, 'flips': 0.5}
    """
    turned_N = np.sign(old_N2[:, 0] - old_N2[:, 1]) != np.sign(new_N2[:, 0] - new_N2[:, 1])
    rank = spearman(old_N2.ravel(), new_N2.ravel())
    return {
        "pairs": len(old_N2),
        "spearman": None if rank is None else round(rank, 12),
        "flips": float(turned_N.mean()),
    }


def _preferences(source: str) -> Iterator[_Preference]:
    """Every strict preference of a file of pairs or rankings."""
    for example in read(source):
        if isinstance(example, Pair) and not example.is_tie:
            first, second = example.chosen, example.rejected
            if example.certainty is not None and example.certainty < 0.5:
                first, second = second, first
            yield _Preference(prompt=example.prompt, chosen=first, rejected=second, where=str(example.origin))
        elif isinstance(example, Ranking):
            for better, worse in permutations(range(len(example.rank)), 2):
                if example.rank[better] < example.rank[worse]:
                    chosen, rejected = example.answers[better], example.answers[worse]
                    yield _Preference(
                        prompt=example.prompt, chosen=chosen, rejected=rejected, where=str(example.origin)
                    )


def _scores(context: Context, judge: Judge, pairs: Sequence[_Preference]) -> Floats:
    """`scores_N2` of the chosen and the rejected answer of every pair; the mean over objectives."""
    sequences = [judge.encoder.tokens(pair.prompt, answer) for pair in pairs for answer in (pair.chosen, pair.rejected)]
    scores_MAK = score_sequences(judge.members, sequences, world=context.world)
    scores_A = combined(scores_MAK, judge.combine).mean(dim=-1)
    table: Floats = scores_A.double().numpy().reshape(-1, 2)
    return table


def _report(context: Context, judge: Judge, pairs: Sequence[_Preference]) -> tuple[dict[str, Any], float]:
    """Accuracy with its interval, and the expected calibration error."""
    scored = [
        ScoredPair(
            chosen=(float(chosen),),
            rejected=(float(rejected),),
            chosen_length=len(text_of(pair.chosen)),
            rejected_length=len(text_of(pair.rejected)),
            margin=None,
            where=pair.where,
            prompt=text_of(pair.prompt),
            chosen_text=text_of(pair.chosen),
            rejected_text=text_of(pair.rejected),
        )
        for pair, (chosen, rejected) in zip(pairs, _scores(context, judge, pairs), strict=True)
    ]
    report = reward_report(scored)
    share = report.accuracy
    figures = {"accuracy": share.value, "low": share.low, "high": share.high, "pairs": report.pairs}
    return figures, report.calibration.error
