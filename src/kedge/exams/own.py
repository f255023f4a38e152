"""Anybody's own exam: a YAML file that says how it is asked, and JSON Lines with the items (docs/exams.md).

The small exams that ship with Kedge have the same form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

from pydantic import Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from kedge.core.errors import ConfigError
from kedge.core.files import hash_json
from kedge.core.quoting import one_line, quoted
from kedge.core.settings import Section
from kedge.core.suggest import did_you_mean
from kedge.exams.checks import CHECKS, Check, is_right, problem_of
from kedge.exams.choice import ChoiceExam, ChoiceItem, Form, choice_item
from kedge.exams.exam import Dialogue, Exam, Metric, OpenQuestion, OpenReply, Score
from kedge.exams.ifeval import exam_of
from kedge.exams.items import Row, evenly, read_rows, unique_ids

EXAM_FILE: Final = "exam.yaml"
_LARGEST = 1 << 20
_GRADING = 1


class OwnSettings(Section):
    """An exam of one's own."""

    kedge_exam: Literal[1]
    """The version of this form."""
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=60)]
    """What results and rules call it."""
    title: str = ""
    licence: str = "own"
    kind: Literal["choice", "open", "instructions"]
    """Choices, answers that are written and compared, or answers that follow instructions, as in IFEval."""
    items: str
    """The questions, a JSON Lines file beside this one."""
    shots: str | None = None
    """Solved examples before each question in the form of letters: a file of the same form as the items."""
    header: str = ""
    """What is said before the first question or example."""
    forms: tuple[Form, ...] = Field(default=("letter", "cloze"), min_length=1)
    """How choices are asked."""
    check: Check = "contains"
    """How a written answer is checked, unless an item says otherwise."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Longest written answer."""
    groups: list[str] = Field(default_factory=list[str])
    """Fields of the items that results are told by."""
    cluster: str | None = None
    """The field that is equal where items are not independent: a passage, a source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenItem:
    item: str
    question: str
    wanted: tuple[str, ...]
    check: Check
    cluster: str
    groups: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenExam:
    name: str
    title: str
    licence: str
    items_hash: str
    items: tuple[OpenItem, ...]
    max_new_tokens: int
    header: str = ""
    metrics: Mapping[str, Metric] = field(
        default_factory=lambda: {"correct": Metric(better="more", summary="answers that pass their check")}
    )

    def take(self, seed: int) -> Dialogue:
        del seed  # the likeliest token each time
        replies = yield [
            OpenQuestion(item=item.item, turns=(("user", self._asked(item)),), max_new_tokens=self.max_new_tokens)
            for item in self.items
        ]
        scores: list[Score] = []
        for item, reply in zip(self.items, replies, strict=True):
            assert isinstance(reply, OpenReply)
            (text,) = reply.texts
            right = float(is_right(item.check, item.wanted, text))
            scores.append(
                Score(
                    item=item.item, metric="correct", score=right, answer=text, cluster=item.cluster, groups=item.groups
                )
            )
        return scores

    def _asked(self, item: OpenItem) -> str:
        return f"{self.header}\n\n{item.question}" if self.header else item.question


def own_exam(file: Path, *, limit: int | None = None) -> Exam:
    """The exam of a YAML file. What is wrong is told with the file, the line and the field."""
    settings = _settings(file)
    source = file.parent / settings.items
    rows = read_rows(source)
    if limit is not None:
        rows = evenly(rows, limit)
    ids = _ids(rows)
    shots = _shots(file.parent / settings.shots) if settings.shots is not None else ()
    identity = hash_json(
        [
            _GRADING,
            settings.model_dump(mode="json", exclude={"title", "licence", "items", "shots"}),
            [dict(row.fields) for row in rows],
            [[shot.question, shot.choices, shot.answer] for shot in shots],
        ]
    )
    title, cluster = settings.title or settings.name, settings.cluster
    if settings.kind == "choice":
        return ChoiceExam(
            name=settings.name,
            title=title,
            licence=settings.licence,
            items_hash=identity,
            items=tuple(
                choice_item(row, item, groups=settings.groups, cluster=row.text(cluster) if cluster else "")
                for row, item in zip(rows, ids, strict=True)
            ),
            forms=tuple(dict.fromkeys(settings.forms)),
            shots={"": shots},
            headers={"": settings.header},
        )
    if settings.kind == "instructions":
        tokens = settings.max_new_tokens
        return exam_of(
            rows, ids, name=settings.name, title=title, licence=settings.licence, tokens=tokens, items_hash=identity
        )
    return OpenExam(
        name=settings.name,
        title=title,
        licence=settings.licence,
        items_hash=identity,
        items=tuple(_open_item(row, item, settings) for row, item in zip(rows, ids, strict=True)),
        max_new_tokens=settings.max_new_tokens,
        header=settings.header,
    )


def shipped(folder: Path) -> Exam:
    """An exam of Kedge's own: its folder holds the YAML file and the items."""
    return own_exam(folder / EXAM_FILE)


def _ids(rows: Sequence[Row]) -> list[str]:
    """By the field `id`, or `key` as in IFEval; where no item has one, by line."""
    name = next((name for name in ("id", "key") if any(name in row.fields for row in rows)), None)
    return [row.where.rpartition(":")[2] for row in rows] if name is None else unique_ids(rows, name)


def _shots(file: Path) -> tuple[ChoiceItem, ...]:
    return tuple(choice_item(row, row.text("id", row.where)) for row in read_rows(file))


def _open_item(row: Row, item: str, settings: OwnSettings) -> OpenItem:
    check = cast(Check, row.one_of("check", CHECKS, settings.check))
    value = row.fields.get("answer")
    wanted = row.texts("answer") if isinstance(value, list) else (row.text("answer"),)
    for answer in wanted:
        if problem := problem_of(check, answer):
            raise row.problem("answer", f"{problem}, to be checked by {check}", answer)
    return OpenItem(
        item=item,
        question=row.text("question").strip(),
        wanted=wanted,
        check=check,
        cluster=row.text(settings.cluster) if settings.cluster else "",
        groups={name: row.text(name) for name in settings.groups},
    )


def _settings(file: Path) -> OwnSettings:
    tree = _tree(file)
    try:
        return OwnSettings.model_validate(dict(tree))
    except ValidationError as error:
        lines = [_problem(tree, detail["loc"], detail["msg"], detail["input"]) for detail in error.errors()]
        raise ConfigError(f"{file}: not an exam\n  " + "\n  ".join(lines)) from error


def _tree(file: Path) -> CommentedMap:
    try:
        if file.stat().st_size > _LARGEST:
            raise ConfigError(f"{file}: larger than 1 MiB; the items of an exam are in a file of their own")
        tree = YAML(typ="rt", pure=True).load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: there is no such exam; its form is in docs/exams.md") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as text: {error}") from error
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{file}:{line}: not valid YAML: {one_line(str(error.problem))}") from error
    except (YAMLError, ValueError) as error:
        raise ConfigError(f"{file}: not valid YAML: {one_line(str(error))}") from error
    if not isinstance(tree, CommentedMap):
        raise ConfigError(f"{file}: an exam is a mapping of settings; its form is in docs/exams.md")
    return tree


def _problem(tree: CommentedMap, path: tuple[int | str, ...], message: str, value: Any) -> str:
    name = str(path[0]) if path else ""
    if name not in tree:
        return f"{name}: {message}"
    if name not in OwnSettings.model_fields:
        near = did_you_mean(name, OwnSettings.model_fields)
        return f"line {_line(tree, name)}: {name}: there is no such setting{near}"
    return f"line {_line(tree, name)}: {'.'.join(map(str, path))}: {message}, found {quoted(value)}"


def _line(tree: CommentedMap, name: str) -> int:
    lines: Any = tree.lc
    return int(lines.key(name)[0]) + 1


__all__ = ["EXAM_FILE", "OpenExam", "OwnSettings", "own_exam", "shipped"]
