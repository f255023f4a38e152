"""`kedge label rates`: win rates of models by what people said of their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kedge.core.errors import DataError
from kedge.data.sources import rows
from kedge.evaluate.judged import Judged, JudgedRate, judged_lines, judged_rates

if TYPE_CHECKING:
    from kedge.label.database import Store
    from kedge.label.projects import Project
    from kedge.label.settle import SettleKind

PEOPLE = "people"


def people_rates(
    store: Store, project: Project, source: str, *, baseline: str | None, settle: SettleKind
) -> tuple[str, Mapping[str, Mapping[str, JudgedRate]]]:
    """The baseline, and by model the win rate over it; from the answers of an evaluation that people have compared."""
    from kedge.label.incoming import answer_pairs
    from kedge.label.progress import progress_of
    from kedge.label.verdicts import preferences

    lengths = _lengths(source)
    first, pairs = answer_pairs(source, baseline)
    prompts = {prompt: number for number, prompt in enumerate(dict.fromkeys(draft.prompt for _, draft in pairs))}
    drafts = [draft for _, draft in pairs]
    told = preferences(store, project, drafts, progress_of(store, project, drafts), settle)
    if not any(told):
        raise DataError(
            f"{source}: people of {project.name} have compared none of these answers; "
            f"`kedge label add {project.name} {source}` asks them"
        )
    judged: dict[str, list[Judged]] = {}
    for (model, draft), preference in zip(pairs, told, strict=True):
        # The model's answer is the second one of the pair, beside the baseline's.
        value = None if preference is None else 1 - preference.value
        length, other = (lengths[answer.text[0].content] for answer in reversed(draft.answers))
        judged.setdefault(model, []).append(
            Judged(
                prompt=prompts[draft.prompt],
                as_first=value,
                as_second=value,
                length=length,
                baseline_length=other,
                probability=None if preference is None else 1 - preference.probability,
            )
        )
    return first, judged_rates({PEOPLE: judged})


def _lengths(source: str) -> dict[str, int]:
    """Of each answer: its tokens as the evaluation counted them, else its words."""
    fields: list[Mapping[str, Any]] = [row.fields for row in rows(source) if row.fields]
    return {
        str(row.get("answer", "")): row["length"]
        if isinstance(row.get("length"), int)
        else len(str(row["answer"]).split())
        for row in fields
    }


def rate_lines(first: str, rates: Mapping[str, Mapping[str, JudgedRate]]) -> Sequence[str]:
    return judged_lines(rates, first)
