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
from kedge.rewards.context import RewardContext
from kedge.rewards.extraction import Extracted, extract_all, match_all
from kedge.rewards.failures import ScoreResult, Source, needs_solution, unscored
from kedge.rewards.numeric import are_equal, last_number
from kedge.rewards.settings import ExactSource, Extract, JsonSource, NumericSource, RegexSource


def make_exact(settings: ExactSource, context: RewardContext) -> Source:
    def is_right(part: str, solution: str) -> bool:
        return plain(part, settings) == plain(solution, settings)

    return needs_solution(_comparing(settings.extract, is_right))


def make_numeric(settings: NumericSource, context: RewardContext) -> Source:
    def judge(answers: Sequence[Answer], solutions: list[str]) -> list[ScoreResult]:
        parts = extract_all([answer.text for answer in answers], settings.extract)
        return [_numeric(part, solution, settings) for part, solution in zip(parts, solutions, strict=True)]

    return needs_solution(judge)


def make_regex(settings: RegexSource, context: RewardContext) -> Source:
    def judge(answers: Sequence[Answer]) -> list[ScoreResult]:
        texts = [answer.text for answer in answers]
        matches = match_all(settings.pattern, texts, must=settings.must, timeout_s=settings.timeout_s)
        return [_result(match, lambda text: True) for match in matches]

    return Source(judge)


def make_json(settings: JsonSource, context: RewardContext) -> Source:
    fits = _schema_check(settings)

    def is_right(text: str) -> bool:
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return False
        return fits(value)

    def judge(answers: Sequence[Answer]) -> list[ScoreResult]:
        parts = extract_all([answer.text for answer in answers], settings.extract)
        return [_result(part, is_right) for part in parts]

    return Source(judge)


def plain(text: str, settings: ExactSource) -> str:
    """Text as `exact` compares it.

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
    extract: Extract, is_right: Callable[[str, str], bool]
) -> Callable[[Sequence[Answer], list[str]], list[ScoreResult]]:
    def judge(answers: Sequence[Answer], solutions: list[str]) -> list[ScoreResult]:
        parts = extract_all([answer.text for answer in answers], extract)
        return [
            _result(part, lambda text, solution=solution: is_right(text, solution))
            for part, solution in zip(parts, solutions, strict=True)
        ]

    return judge


def _numeric(part: Extracted, solution: str, settings: NumericSource) -> ScoreResult:
    expected = last_number(solution)
    if expected is None:
        return unscored(f"the solution has no number: {solution[:80]!r}")

    def is_right(text: str) -> bool:
        number = last_number(text)
        return number is not None and are_equal(
            number, expected, relative=settings.relative, absolute=settings.absolute
        )

    return _result(part, is_right)


def _result(part: Extracted, is_right: Callable[[str], bool]) -> ScoreResult:
    if part.failure:
        return unscored(part.failure)
    return ScoreResult(float(part.text is not None and is_right(part.text)))


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
