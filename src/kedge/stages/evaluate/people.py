"""People as a judge of an evaluation: its answers become items of their project, and the run waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from kedge.core.errors import Waiting
from kedge.data.examples import Message, Prompt
from kedge.evaluate.answers import ModelAnswer
from kedge.evaluate.judged import Judged
from kedge.stages.evaluate.settings import PeopleJudge
from kedge.stages.shared.context import Context
from kedge.stages.shared.people import open_people


def ask_people(
    context: Context, judge: PeopleJudge, answers: Sequence[ModelAnswer], prompts: Sequence[Prompt]
) -> dict[str, list[Judged]]:
    """By model, what people say of its answers beside the baseline's; equal answers are ties, which nobody is asked."""
    by_model = {model: list(own) for model, own in groupby(answers, key=lambda answer: answer.model)}
    baseline, *others = by_model
    pairs = {model: list(zip(by_model[model], by_model[baseline], strict=True)) for model in others}
    verdicts = iter(
        context.once(lambda: _verdicts(context, judge, [pair for own in pairs.values() for pair in own], prompts))
    )
    return {
        model: [
            Judged(
                prompt=own.prompt,
                as_first=value,
                as_second=value,
                length=len(own.tokens),
                baseline_length=len(other.tokens),
                probability=probability,
            )
            for (own, other), (value, probability) in zip(group, verdicts, strict=False)
        ]
        for model, group in pairs.items()
    }


def _verdicts(
    context: Context, judge: PeopleJudge, pairs: Sequence[tuple[ModelAnswer, ModelAnswer]], prompts: Sequence[Prompt]
) -> list[tuple[float | None, float | None]]:
    folder: Path = context.recipe_folder
    with open_people(judge.address(folder)) as store:
        from kedge.label.incoming import Draft, DraftAnswer
        from kedge.label.items import add_items
        from kedge.label.progress import progress_of
        from kedge.label.projects import find_project
        from kedge.label.verdicts import preferences

        project = find_project(store, judge.project)
        drafts = [
            Draft(
                prompt=prompts[own.prompt].prompt,
                answers=tuple(
                    DraftAnswer(text=(Message("assistant", answer.text),), model=answer.model)
                    for answer in (own, other)
                ),
                is_heldout=True,
                origin=str(context.folder),
            )
            for own, other in pairs
        ]
        asked = [draft for draft in drafts if draft.answers[0].text != draft.answers[1].text]
        wanted = replace(project.settings, wanted=judge.wanted, overlap_share=0.0)
        added = add_items(store, replace(project, settings=wanted), asked, origin=str(context.folder))
        if added.items:
            context.event("info", "evaluate.people", f"{added.items:,} pairs are added to project {project.name}")
        progress = progress_of(store, project, asked)
        if progress.share < judge.enough:
            raise Waiting(
                f"waiting for people: {progress.given:,} of {progress.wanted:,} comparisons of project {project.name} "
                f"are there. `kedge label status {project.name}` tells more; when they are done, "
                "`kedge run RECIPE --resume` goes on"
            )
        told = preferences(store, project, drafts, progress, judge.settle)
    return [
        (0.5, 0.5)
        if draft.answers[0].text == draft.answers[1].text
        else (None, None)
        if preference is None
        else (preference.value, preference.probability)
        for draft, preference in zip(drafts, told, strict=True)
    ]
