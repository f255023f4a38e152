"""Sources that check an answer against something known: exact, numeric, regular expression, JSON and its schema.

They give 1 or 0. A part that is not there (no \\boxed{…}, no number) is a wrong answer; a row without a known solution
has no score. Mathematics is in `maths`, code in `unit_tests`.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from kedge.core.answers import Answer
from kedge.core.errors import ConfigError, PluginError
from kedge.rewards.context import Context
from kedge.rewards.extract import extract_all
from kedge.rewards.matching import Found, find_all
from kedge.rewards.numeric import are_equal, last_number
from kedge.rewards.settings import ExactSource, Extract, JsonSource, NumericSource, RegexSource
from kedge.rewards.verdicts import Source, Verdict, needs_solution, unscored


def make_exact(settings: ExactSource, context: Context) -> Source:
    def is_right(found: str, solution: str) -> bool:
        return plain(found, settings) == plain(solution, settings)

    return needs_solution(_comparing(settings.extract, is_right))


def make_numeric(settings: NumericSource, context: Context) -> Source:
    def judge(answers: Sequence[Answer], solutions: list[str]) -> list[Verdict]:
        found = extract_all([answer.text for answer in answers], settings.extract)
        return [_numeric(one, solution, settings) for one, solution in zip(found, solutions, strict=True)]

    return needs_solution(judge)


def make_regex(settings: RegexSource, context: Context) -> Source:
    def judge(answers: Sequence[Answer]) -> list[Verdict]:
        texts = [answer.text for answer in answers]
        found = find_all(settings.pattern, texts, must=settings.must, timeout_s=settings.timeout_s)
        return [_verdict(one, lambda text: True) for one in found]

    return Source(judge)


def make_json(settings: JsonSource, context: Context) -> Source:
    fits = _schema_check(settings)

    def is_right(text: str) -> bool:
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return False
        return fits(value)

    def judge(answers: Sequence[Answer]) -> list[Verdict]:
        found = extract_all([answer.text for answer in answers], settings.extract)
        return [_verdict(one, is_right) for one in found]

    return Source(judge)


def plain(text: str, settings: ExactSource) -> str:
    """
    >>> plain("  The\\tÉclair! ", ExactSource(kind="exact", ignore_punctuation=True))
    'the éclair'
    """
    text = unicodedata.normalize("NFKC", text)
    if settings.ignore_case:
        text = text.casefold()
    if settings.ignore_punctuation:
        text = "".join(char for char in text if not unicodedata.category(char).startswith("P"))
    return " ".join(text.split()) if settings.ignore_spaces else text


def _comparing(
    how: Extract, is_right: Callable[[str, str], bool]
) -> Callable[[Sequence[Answer], list[str]], list[Verdict]]:
    def judge(answers: Sequence[Answer], solutions: list[str]) -> list[Verdict]:
        found = extract_all([answer.text for answer in answers], how)
        return [
            _verdict(one, lambda text, solution=solution: is_right(text, solution))
            for one, solution in zip(found, solutions, strict=True)
        ]

    return judge


def _numeric(found: Found, solution: str, settings: NumericSource) -> Verdict:
    wanted = last_number(solution)
    if wanted is None:
        return unscored(f"the solution has no number: {solution[:80]!r}")

    def is_right(text: str) -> bool:
        number = last_number(text)
        return number is not None and are_equal(number, wanted, relative=settings.relative, absolute=settings.absolute)

    return _verdict(found, is_right)


def _verdict(found: Found, is_right: Callable[[str], bool]) -> Verdict:
    if found.failure:
        return unscored(found.failure)
    return Verdict(float(found.text is not None and is_right(found.text)))


def _schema_check(settings: JsonSource) -> Callable[[Any], bool]:
    if settings.fits is None:
        return lambda value: True
    try:
        from jsonschema.exceptions import SchemaError  # pyright: ignore[reportMissingModuleSource]
        from jsonschema.validators import validator_for  # pyright: ignore[reportMissingModuleSource]
    except ModuleNotFoundError as error:
        raise PluginError(
            "reward 'json_schema' with a schema needs 'jsonschema': pip install 'kedge[jsonschema]'"
        ) from error
    kind = validator_for(settings.fits)
    try:
        kind.check_schema(settings.fits)
    except SchemaError as error:
        raise ConfigError(f"json_schema: `schema` is not a JSON schema: {error.message}") from error
    return kind(settings.fits).is_valid


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
