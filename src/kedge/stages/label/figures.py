"""What is told of judges that labelled: readable, consistent, swayed by place or length; and by principle, who wins."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kedge.exams.refusal import classify
from kedge.feedback.clustered import Measured, clustered_share
from kedge.feedback.judge_bias import Shown, length_bias, longer_wins, position_bias
from kedge.label.incoming import Draft
from kedge.label.settle import Settled
from kedge.stages.label.deciding import side_of
from kedge.stages.label.judging import Comparison, Judged, text_of


def prompt_numbers(drafts: Sequence[Draft]) -> list[int]:
    """A number for each task's prompt: tasks of one prompt are not independent."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(draft.prompt, len(numbers)) for draft in drafts]


def judge_figures(judged: Judged, drafts: Sequence[Draft], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Shares with intervals over prompts; None where nothing can be told."""
    prompts = prompt_numbers(drafts)
    shown = list(_shown(judged, drafts, comparisons, prompts))
    verdicts = list(zip(judged.verdicts, comparisons, strict=True))
    readable = [(verdict, prompts[one.task]) for verdict, one in verdicts if verdict.preference is not None]
    clusters = [prompt for _, prompt in readable]
    length = length_bias(shown)
    return {
        "comparisons": len(comparisons),
        "failed": judged.failed,
        "unreadable": _share(
            [verdict.preference is None for verdict, _ in verdicts], [prompts[one.task] for _, one in verdicts]
        ),
        "unreadable_replies": _share([one.reply is None for one in shown], [one.prompt for one in shown]),
        "inconsistent": _share([not verdict.is_consistent for verdict, _ in readable], clusters),
        "ties": _share([verdict.preference == 0.5 for verdict, _ in readable], clusters),
        "position": _plain(position_bias(shown)),
        "longer_wins": _plain(longer_wins(shown)),
        "length": _plain(length.alone) if length else None,
        "length_sd": length.sd if length else None,
    }


def by_principle(
    panel: Sequence[Judged],
    drafts: Sequence[Draft],
    comparisons: Sequence[Comparison],
    settled: Sequence[Settled | None],
) -> dict[str, dict[str, Any]]:
    """Under each principle: how often each model wins, ties half, and how often a refusal is preferred."""
    rows: dict[str, list[tuple[Comparison, Settled]]] = {}
    # A principle is drawn by the comparison: judges with the same constitution have the same one.
    principled = next((judged.principles for judged in panel if judged.judge.principles), [None] * len(comparisons))
    for principle, comparison, label in zip(principled, comparisons, settled, strict=True):
        if principle is not None and label is not None:
            rows.setdefault(principle, []).append((comparison, label))
    return {principle: _under(own, drafts) for principle, own in sorted(rows.items())}


def _under(rows: Sequence[tuple[Comparison, Settled]], drafts: Sequence[Draft]) -> dict[str, Any]:
    prompts = prompt_numbers(drafts)
    wins: dict[str, list[tuple[float, int]]] = {}
    refused: dict[str, list[bool]] = {"chosen": [], "rejected": []}
    refusal_wins: list[float] = []
    for comparison, label in rows:
        answers = [drafts[comparison.task].answers[place] for place in (comparison.first, comparison.second)]
        won = [0.5, 0.5] if label.better is None else [1.0 - label.better, float(label.better)]
        is_refusal = [classify(text_of(answer.text)) != "none" for answer in answers]
        models = [answer.model for answer in answers]
        if models[0] != models[1]:
            for model, value in zip(models, won, strict=True):
                if model is not None:
                    wins.setdefault(model, []).append((value, prompts[comparison.task]))
        if label.better is not None:
            refused["chosen"].append(is_refusal[label.better])
            refused["rejected"].append(is_refusal[1 - label.better])
        if is_refusal[0] != is_refusal[1]:
            refusal_wins.append(won[0] if is_refusal[0] else won[1])
    return {
        "comparisons": len(rows),
        "ties": sum(label.better is None for _, label in rows),
        "win_rate": {model: sum(value for value, _ in own) / len(own) for model, own in sorted(wins.items())},
        "refusal": {side: sum(own) / len(own) if own else None for side, own in refused.items()},
        "refusal_wins": sum(refusal_wins) / len(refusal_wins) if refusal_wins else None,
        "against_refusal": len(refusal_wins),
    }


def _shown(
    judged: Judged, drafts: Sequence[Draft], comparisons: Sequence[Comparison], prompts: Sequence[int]
) -> Iterator[Shown]:
    for number, comparison in enumerate(comparisons):
        answers = [drafts[comparison.task].answers[place] for place in (comparison.first, comparison.second)]
        lengths = [len(text_of(answer.text)) for answer in answers]
        for vote in judged.votes[number]:
            if vote.reason:
                continue
            for is_first_a, preference in ((True, vote.as_a), (False, vote.as_b)):
                yield Shown(
                    item=number,
                    prompt=prompts[comparison.task],
                    people=(),
                    longer=lengths[0] - lengths[1],
                    models=(answers[0].model, answers[1].model),
                    is_first_a=is_first_a,
                    reply=side_of(preference),
                )


def _share(hits: Sequence[bool], clusters: Sequence[Hashable]) -> Mapping[str, float] | None:
    return _plain(clustered_share(hits, clusters))


def _plain(measured: Measured | None) -> dict[str, float] | None:
    return None if measured is None else asdict(measured)
