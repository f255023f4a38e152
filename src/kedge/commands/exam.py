"""What `kedge exam` does: which models and exams are meant, the exams taken, and their files written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kedge.commands.sample import find_model
from kedge.core.errors import ConfigError
from kedge.exams.catalogue import Listed, expanded, is_engine, listed, open_exam
from kedge.exams.exam import Template
from kedge.exams.public.fetching import Fetched, fetch_exam
from kedge.models.loading.load import DTypeName
from kedge.models.settings import AutoSize
from kedge.stages.exam.files import table_lines, write_exams
from kedge.stages.exam.take import Request, Taken, take_exams
from kedge.stages.rl.judge import find_judge
from kedge.stages.shared.device import checked_device

FILES = ("items.jsonl", "answers.jsonl", "exam.json")
"""What exams write into a folder."""


def take(
    models: Sequence[str],
    exams: Sequence[str],
    *,
    template: Template,
    limit: int | None,
    seed: int,
    rows: AutoSize,
    dtype: DTypeName,
    device: str,
    chat_template: str | None,
    say: Callable[[str], None],
    progress: Callable[[int], None],
) -> Taken:
    """The exams taken by the models, or read from the cache."""
    request = Request(
        exams=tuple(expanded(exams)),
        template=template,
        limit=limit,
        seed=seed,
        rows=rows,
        dtype=dtype,
        device=checked_device(device),
        chat_template=chat_template,
        say=say,
        progress=progress,
    )
    return take_exams(named_models(models), request)


def named_models(models: Sequence[str]) -> list[tuple[str, str]]:
    """Models with the names that results have: the stage or folder, and where two have the same, the whole path.

    >>> named_models(["tiny", "other/tiny"])
    [('tiny', 'tiny'), ('other/tiny', 'other/tiny')]
    """
    if twice := {model for model in models if list(models).count(model) > 1}:
        raise ConfigError(f"{', '.join(sorted(twice))}: named more than once, and results are told apart by names")
    short = [_short(model) for model in models]
    return [
        (name if short.count(name) == 1 else model, _place(model)) for name, model in zip(short, models, strict=True)
    ]


def refuse_exams(exams: Sequence[str], limit: int | None) -> None:
    """What cannot be opened is refused before a model is loaded."""
    for name in expanded(exams):
        if not is_engine(name):
            open_exam(name, limit=limit)


def _short(model: str) -> str:
    path = Path(model)
    if not path.is_dir():
        return model
    name = path.resolve().name
    return path.resolve().parent.name if name == "model" else name


def _place(model: str) -> str:
    """The folder of a language model or a reward model behind what was named."""
    try:
        return find_model(model)
    except ValueError as problem:
        try:
            return str(find_judge(model))
        except ValueError:
            raise problem from None


__all__ = [
    "FILES", "Fetched", "Listed", "fetch_exam", "listed", "named_models", "refuse_exams", "table_lines", "take",
    "write_exams",
]  # fmt: skip
