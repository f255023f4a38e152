"""Asks the judges of an evaluation: each model's answers against the baseline's, in both orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from kedge.data.examples import Prompt
from kedge.data.writing import row_writer
from kedge.evaluate.answers import ModelAnswer
from kedge.evaluate.judged import Judged
from kedge.models.loading.cache import cache_root
from kedge.rewards.context import RewardContext
from kedge.rewards.pairwise import Panelist, ledger_of
from kedge.stages.evaluate.settings import EvaluateSettings
from kedge.stages.rl.comparing import compared
from kedge.stages.shared.context import Context

Judgements = Mapping[str, Mapping[str, Sequence[Judged]]]
"""Comparisons by judge, then by model."""


def open_panel(context: Context, settings: EvaluateSettings) -> list[Panelist]:
    """The judges, ready to be asked: a rubric or a key that is wrong is refused before anything is sampled."""
    known = RewardContext(folder=context.recipe_folder, seed=context.seed, note=partial(context.event, "warning"))
    return [
        Panelist(judge, known, cache=cache_root() / "judge", ledger=ledger_of(context.folder, judge, number))
        for number, judge in enumerate(settings.machines)
    ]


def judge_answers(
    context: Context,
    panel: Sequence[Panelist],
    answers: Sequence[ModelAnswer],
    prompts: Sequence[Prompt],
    *,
    max_failed: float,
) -> Judgements:
    """What each judge says of each model's answers beside the baseline's with the same number; asked by process 0."""
    by_model = {model: list(own) for model, own in groupby(answers, key=lambda answer: answer.model)}
    baseline, *others = by_model
    judged: dict[str, dict[str, list[Judged]]] = {}
    for judge in panel:
        judged[judge.name] = {}
        for model in others:
            pairs = list(zip(by_model[model], by_model[baseline], strict=True))
            context.say(f"  {judge.name} compares {len(pairs):,} answers of {model} with those of {baseline}")
            comparisons = compared(judge, pairs, prompts, max_failed=max_failed) if context.world.rank == 0 else []
            judged[judge.name][model] = context.world.same(comparisons)
            _report_unreadable(context, judge.name, model, judged[judge.name][model])
        if context.world.rank == 0:
            context.say(f"  {judge.name}: {judge.calls.spent.in_words()}")
    return judged


def _report_unreadable(context: Context, judge: str, model: str, comparisons: Sequence[Judged]) -> None:
    unreadable = sum(not comparison.is_readable for comparison in comparisons)
    if unreadable:
        what = "no win rate" if unreadable == len(comparisons) else "left out of the win rate"
        message = f"{judge}: {unreadable:,} of {len(comparisons):,} comparisons of {model} name no winner: {what}"
        context.event("warning", "evaluate.judge", message)


def write_judgements(file: Path, judged: Judgements, answers: int) -> Path:
    """Every comparison, a line each: what the judge preferred in each order, 1 for the model and 0 for the baseline."""
    with row_writer(file) as write:
        for judge, by_model in judged.items():
            for model, comparisons in by_model.items():
                for row, comparison in enumerate(comparisons):
                    write(
                        {
                            "judge": judge,
                            "id": f"{model}-{comparison.prompt}-{row % answers}",
                            "model": model,
                            "prompt": comparison.prompt,
                            "as_first": comparison.as_first,
                            "as_second": comparison.as_second,
                            "preference": comparison.preference,
                            "probability": comparison.probability,
                            "length": comparison.length,
                            "baseline_length": comparison.baseline_length,
                        }
                    )
    return file
