"""The numbers of an evaluation for each group of prompts: a language, a source, a category.

What is lost in one group must not hide in the mean of all. Intervals are those of the group's own prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.evaluate.answers import ModelAnswer
from kedge.evaluate.evaluation import Evaluation, evaluate
from kedge.evaluate.judged import Judged, JudgedRates, as_dict, judged_rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The prompts with one value of a field."""

    evaluation: Evaluation
    judges: JudgedRates

    def as_dict(self) -> dict[str, Any]:
        return self.evaluation.as_dict() | {"judges": as_dict(self.judges)}


Groups = Mapping[str, Mapping[str, Group]]
"""By field, then by value."""


def by_group(
    answers: Sequence[ModelAnswer],
    values: Mapping[str, Sequence[str]],
    judged: Mapping[str, Mapping[str, Sequence[Judged]]],
    *,
    tie: float,
    seed: int,
) -> dict[str, dict[str, Group]]:
    """An evaluation of each group; `values` has the value of every prompt for each field, and `judged` the comparisons
    by judge and model."""
    return {
        field: {
            value: _group(answers, judged, {prompt for prompt, own in enumerate(of_prompt) if own == value}, tie, seed)
            for value in sorted(set(of_prompt))
        }
        for field, of_prompt in values.items()
    }


def _group(
    answers: Sequence[ModelAnswer],
    judged: Mapping[str, Mapping[str, Sequence[Judged]]],
    prompts: set[int],
    tie: float,
    seed: int,
) -> Group:
    own = {
        judge: {model: [one for one in rows if one.prompt in prompts] for model, rows in by_model.items()}
        for judge, by_model in judged.items()
    }
    return Group(
        evaluation=evaluate([answer for answer in answers if answer.prompt in prompts], tie=tie, seed=seed),
        judges=judged_rates(own),
    )


def group_lines(groups: Groups) -> list[str]:
    """A line of text for each group, model and source or judge: the win rate over the baseline, or else the length."""
    lines: list[str] = []
    for field, by_value in groups.items():
        for value, group in by_value.items():
            evaluation = group.evaluation
            for model in evaluation.models:
                facts = list(_facts(group, model))
                if facts:
                    count = f"{evaluation.prompts:,} prompt{'' if evaluation.prompts == 1 else 's'}"
                    lines.append(f"{field} {value} ({count}), {model}: {'; '.join(facts)}")
    return lines


def _facts(group: Group, model: str) -> Sequence[str]:
    evaluation = group.evaluation
    rates = [
        (source, comparison.win_rate.rate, comparison.win_rate.low, comparison.win_rate.high)
        for source, comparison in evaluation.comparisons.get(model, {}).items()
    ]
    rates += [(judge, rate.rate, rate.low, rate.high) for judge, rate in group.judges.get(model, {}).items()]
    wins = [f"{source} wins {rate:.1%} [{low:.1%}, {high:.1%}]" for source, rate, low, high in rates]
    means = [
        f"{source} {scores.mean.mean:.3f} [{scores.mean.low:.3f}, {scores.mean.high:.3f}]"
        for source, scores in evaluation.models[model].scores.items()
        if scores.mean is not None
    ]
    return [*means, *wins]
