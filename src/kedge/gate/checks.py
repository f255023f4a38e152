"""What a good answer to a badcase must do: a word, a pattern, a number, a refusal, an instruction, a judge, a reward.

The checks that need a text alone are done here. A judge and a reward source are asked by whoever replays the cases.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, cast

import regex
from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from kedge.core.errors import ConfigError, DataError
from kedge.core.instructions.following import complaint_about, follows
from kedge.core.settings import Section
from kedge.core.yaml import problems
from kedge.core.yaml.source import tree_of
from kedge.exams.checks import is_right
from kedge.exams.refusal import Refusal, classify


def _texts(given: Any) -> Any:
    """YAML reads 4 as a number; what is looked for in an answer is text."""
    listed = cast("list[Any]", given) if isinstance(given, list) else [given]
    return [str(text) if isinstance(text, int | float) and not isinstance(text, bool) else text for text in listed]


Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1), BeforeValidator(_texts)]


class Instruction(Section):
    """One of the instructions of IFEval."""

    id: str
    """`punctuation:no_comma`, say."""
    kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Its arguments."""

    @model_validator(mode="after")
    def _is_known(self) -> Instruction:
        if complaint := complaint_about(self.id, self.kwargs):
            raise ValueError(complaint)
        return self


class Check(Section):
    """Exactly one of these."""

    contains: Texts | None = None
    """The answer has this text in it, or all of these, as whole words; capitals do not count."""
    lacks: Texts | None = None
    """The answer has none of these in it."""
    regex: str | None = None
    """A pattern is found in the answer."""
    number: float | None = None
    """The last number of the answer is this one."""
    refusal: Annotated[list[Refusal], Field(min_length=1), BeforeValidator(_texts)] | None = None
    """How far the answer refuses: full, partial or none, or one of several."""
    instruction: Instruction | None = None
    """The answer follows an instruction of IFEval."""
    judge: dict[str, Any] | None = None
    """A judge's grade is at least `at_least`: url, model, rubric and the other settings of `{kind: judge}`."""
    beats: str | dict[str, Any] | None = None
    """A reward gives the answer a higher score than the bad one: a reward model's folder, or any reward source."""

    @field_validator("regex")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            regex.compile(pattern or "")
        except regex.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return pattern

    @model_validator(mode="after")
    def _is_one(self) -> Check:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"one check, found {', '.join(given) or 'none'}; there are: {', '.join(self.kinds())}")
        return self

    @property
    def kind(self) -> str:
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @classmethod
    def kinds(cls) -> list[str]:
        return list(cls.model_fields)

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True)


def parse_check(values: Any, *, where: str) -> Check:
    """A check as a mapping says it; what is wrong with it is told, and where it stood."""
    try:
        return Check.model_validate(values)
    except ValidationError as error:
        texts = [text for _, text in problems.placed_lines(error, Check, tree_of(values))]
        raise ConfigError(f"{where}: {'; '.join(texts)}") from None


def passes(check: Check, prompt: str, answer: str) -> bool | None:
    """Whether an answer is good by a check of its text; None where the check needs somebody to be asked.

    >>> passes(Check(contains=["4"]), "What is 2 + 2?", "It is 4."), passes(Check(lacks=["5"]), "", "five")
    (True, True)
    """
    match check.kind:
        case "contains":
            return all(is_right("contains", [text], answer) for text in check.contains or ())
        case "lacks":
            return not any(is_right("contains", [text], answer) for text in check.lacks or ())
        case "regex":
            return _is_found(check.regex or "", answer)
        case "number":
            return is_right("number", [format(Decimal(repr(check.number)), "f")], answer)
        case "refusal":
            return classify(answer) in (check.refusal or ())
        case "instruction" if check.instruction is not None:
            return follows(check.instruction.id, check.instruction.kwargs, prompt, answer)
        case _:
            return None


def _is_found(pattern: str, answer: str) -> bool:
    """A pattern that takes too long is not found: an answer that cannot be checked is no good one."""
    try:
        return is_right("regex", [pattern], answer)
    except DataError:
        return False
