"""IFEval (Zhou et al. 2023): prompts with instructions that a rule can check, by prompt and by instruction.

Strict takes the answer as it is. Loose takes it as followed if one of eight variants follows: as it is, without its
first line, its last, or both, each with and without stars. A prompt counts if all of its instructions are followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from kedge.core.errors import ConfigError, DataError
from kedge.core.quoting import quoted
from kedge.core.suggest import did_you_mean
from kedge.exams.exam import Metric, OpenQuestion, OpenReply, Score
from kedge.exams.instructions.checkers import INSTRUCTIONS, RELATIONS, ArgumentKind
from kedge.exams.instructions.languages import require_langdetect
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
_WANTED: Final[Mapping[ArgumentKind, str]] = {
    "count": "a whole number, 0 or more",
    "text": "a text",
    "texts": "a list of texts",
    "relation": " or ".join(f"'{relation}'" for relation in RELATIONS),
}


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
    tasks = {item: _task(row) for item, row in zip(unique_ids(rows, "key"), rows, strict=True)}
    kinds = {kind for task in tasks.values() for kind, _ in task.instructions}
    if any(INSTRUCTIONS[kind].needs_language for kind in kinds):
        require_langdetect(f"the exam {name} (instructions on the language of an answer)")
    return WrittenExam(
        name=name,
        title=title,
        licence=licence,
        metrics=METRICS,
        items_hash=hash_of_files(folder, grading=_GRADING, tokens=tokens),
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


def follows(instruction_id: str, kwargs: Mapping[str, Any], prompt: str, answer: str) -> bool:
    """Whether an answer follows one instruction, strictly. An unknown kind or a wrong argument is a ConfigError.

    >>> follows("punctuation:no_comma", {}, "Say hello.", "Hello there")
    True
    >>> follows("detectable_format:number_bullet_lists", {"num_bullets": 2}, "Name two.", "* one\\n* two")
    True
    """
    if complaint := complaint_about(instruction_id, kwargs):
        raise ConfigError(complaint)
    return bool(answer.strip()) and INSTRUCTIONS[instruction_id].follows(kwargs, prompt, answer)


def follows_loosely(instruction_id: str, kwargs: Mapping[str, Any], prompt: str, answer: str) -> bool:
    return any(follows(instruction_id, kwargs, prompt, variant) for variant in variants(answer))


def variants(answer: str) -> list[str]:
    """The answer, and what is left of it without its first line, its last, or both, each without stars too.

    >>> variants("Sure!\\n*yes*")
    ['Sure!\\n*yes*', 'Sure!\\nyes', '*yes*', 'yes', 'Sure!', 'Sure!', '', '']
    """
    lines = answer.split("\n")
    cut = [answer, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [text for shorter in cut for text in (shorter, shorter.replace("*", ""))]


def complaint_about(instruction_id: str, kwargs: Mapping[str, Any]) -> str:
    """What is wrong with an instruction and its arguments; empty where nothing is. An argument of null is none.

    >>> complaint_about("punctuation:no_coma", {})
    "no instruction named 'punctuation:no_coma' (did you mean 'punctuation:no_comma'?)"
    >>> complaint_about("length_constraints:number_words", {"num_words": 5})
    "length_constraints:number_words: relation: expected 'at least' or 'less than', found None"
    """
    if instruction_id not in INSTRUCTIONS:
        return f"no instruction named {quoted(instruction_id)}{did_you_mean(instruction_id, INSTRUCTIONS)}"
    required, optional = INSTRUCTIONS[instruction_id].arguments, INSTRUCTIONS[instruction_id].optional
    given = {name: value for name, value in kwargs.items() if value is not None}
    for name, kind in required.items():
        if not _is_a(kind, given.get(name)):
            return f"{instruction_id}: {name}: expected {_WANTED[kind]}, found {quoted(given.get(name))}"
    for name, value in given.items():
        if name in optional and not _is_a(optional[name], value):
            return f"{instruction_id}: {name}: expected {_WANTED[optional[name]]}, found {quoted(value)}"
        if name not in required and name not in optional:
            allowed = ", ".join((*required, *optional)) or "none"
            return f"{instruction_id}: no argument {quoted(name)}{did_you_mean(name, required)}; it takes {allowed}"
    return ""


def _is_a(kind: ArgumentKind, value: Any) -> bool:
    match kind:
        case "count":
            return isinstance(value, int) and not isinstance(value, bool) and value >= 0
        case "text":
            return isinstance(value, str) and bool(value.strip())
        case "texts":
            values = cast(list[Any], value) if isinstance(value, list | tuple) else []
            return bool(values) and all(isinstance(text, str) and bool(text.strip()) for text in values)
        case "relation":
            return value in RELATIONS
