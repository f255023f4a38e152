"""IFEval (Zhou et al. 2023): prompts with instructions that a rule can check, by prompt and by instruction.

Strict takes the answer as it is. Loose takes it as followed if one of eight variants follows: as it is, without its
first line, its last, or both, each with and without stars. A prompt counts if all of its instructions are followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from kedge.core.errors import DataError
from kedge.core.instructions.following import complaint_about, follows, follows_loosely, needs_language
from kedge.core.instructions.languages import require_langdetect
from kedge.exams.exam import Metric, OpenQuestion, OpenReply, Score
from kedge.exams.items import ITEMS, Row, hash_of_files, read_rows, unique_ids
from kedge.exams.written import WrittenExam

METRICS: Final[Mapping[str, Metric]] = {
    "prompt_strict": Metric(better="more", summary="prompts of which every instruction is followed"),
    "prompt_loose": Metric(better="more", summary="the same, where a greeting, a last line or stars do not count"),
    "instruction_strict": Metric(better="more", summary="instructions that are followed"),
    "instruction_loose": Metric(better="more", summary="the same, where a greeting, a last line or stars do not count"),
}
_GRADING = 1
"""Counts up when the same answers are graded in another way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    prompt: str
    instructions: tuple[tuple[str, Mapping[str, Any]], ...]
    """Kinds with their arguments."""


def exam(folder: Path) -> WrittenExam:
    """IFEval from `items.jsonl`: key, prompt, instruction_id_list, kwargs."""
    return _exam(
        folder, name="ifeval", title="IFEval: instructions a rule can check", licence="Apache-2.0", tokens=1280
    )


def instructions(folder: Path) -> WrittenExam:
    """Our own small set of the same form, which ships."""
    title = "Instructions: short tasks with a form to keep"
    return _exam(folder, name="instructions", title=title, licence="Apache-2.0 (Kedge)", tokens=256)


def _exam(folder: Path, *, name: str, title: str, licence: str, tokens: int) -> WrittenExam:
    rows = read_rows(folder / ITEMS)
    identity = hash_of_files(folder, grading=_GRADING, tokens=tokens)
    ids = unique_ids(rows, "key")
    return exam_of(rows, ids, name=name, title=title, licence=licence, tokens=tokens, items_hash=identity)


def exam_of(
    rows: Sequence[Row], ids: Sequence[str], *, name: str, title: str, licence: str, tokens: int, items_hash: str
) -> WrittenExam:
    """An exam of rows with `prompt`, `instruction_id_list` and `kwargs`."""
    tasks = {item: _task(row) for item, row in zip(ids, rows, strict=True)}
    if needs_language(kind for task in tasks.values() for kind, _ in task.instructions):
        require_langdetect(f"the exam {name} (instructions on the language of an answer)")
    return WrittenExam(
        name=name,
        title=title,
        licence=licence,
        metrics=METRICS,
        items_hash=items_hash,
        questions=tuple(
            OpenQuestion(item=item, turns=(("user", task.prompt),), max_new_tokens=tokens)
            for item, task in tasks.items()
        ),
        grade=partial(_grade, tasks),
    )


def _task(row: Row) -> Task:
    kinds = row.texts("instruction_id_list")
    kwargs = row.fields.get("kwargs")
    if not isinstance(kwargs, list) or len(cast(list[Any], kwargs)) != len(kinds):
        raise row.problem("kwargs", f"a list of {len(kinds)} objects, one for each instruction", kwargs)
    pairs = tuple(zip(kinds, cast(list[Any], kwargs), strict=True))
    for kind, arguments in pairs:
        if not isinstance(arguments, dict):
            raise row.problem("kwargs", "an object with the arguments of each instruction", arguments)
        if complaint := complaint_about(kind, cast(dict[str, Any], arguments)):
            raise DataError(f"{row.where}: {complaint}")
    return Task(prompt=row.text("prompt"), instructions=pairs)


def _grade(tasks: Mapping[str, Task], item: str, reply: OpenReply) -> Iterator[Score]:
    task, answer = tasks[item], reply.texts[0]
    for strictness, rule in (("strict", follows), ("loose", follows_loosely)):
        is_followed = [rule(kind, arguments, task.prompt, answer) for kind, arguments in task.instructions]
        yield Score(item=item, metric=f"prompt_{strictness}", score=float(all(is_followed)), answer=answer)
        for number, ((kind, _), followed) in enumerate(zip(task.instructions, is_followed, strict=True)):
            yield Score(
                item=f"{item}:{number}",
                metric=f"instruction_{strictness}",
                score=float(followed),
                answer=answer,
                cluster=item,
                groups={"kind": kind},
            )
