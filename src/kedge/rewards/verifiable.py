"""Sources that check an answer against something known: exact, numeric, regular expression, JSON and its schema, and
the instructions of its prompt.

They give 1 or 0, instructions also the share that is followed. A part that is not there (no \\boxed{…}, no number) is a
wrong answer; a row without a known solution has no score. Mathematics is in `maths`, code in `unit_tests`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from kedge.core.answers import Answer
from kedge.core.errors import ConfigError, PluginError
from kedge.core.instructions.following import complaint_about, follows, follows_loosely, needs_language
from kedge.core.instructions.languages import require_langdetect
from kedge.core.stats import places_of
from kedge.core.suggest import did_you_mean
from kedge.core.text_measures import repetition
from kedge.rewards.context import RewardContext
from kedge.rewards.extraction import Extracted, are_equal, extract_all, last_number, match_all
from kedge.rewards.failures import ScoreResult, Source, needs_solution, unscored
from kedge.rewards.settings import ExactSource, Extract, InstructionsSource, JsonSource, NumericSource, RegexSource

KINDS, ARGUMENTS, REQUEST = "instruction_id_list", "kwargs", "request"
_WORD: Final = re.compile(r"[^\W_]+")
_STEM = 5
"""Letters of a word that count: "gardens" and "gardening" are about the same."""
_LEAST_LETTERS = 4
"""Words of a request with fewer letters say little of what it is about."""
_COMMON: Final = (
    "about after also another because been before being between both could does down each else explain from gave give "
    "have here into just know like list made make many more most much name need only other over please short should "
    "some such take tell than that their them then there these they this those through very want were what when where "
    "which while will with would write your yours"
)
_COMMON_WORDS: Final = frozenset(_COMMON.split())


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


@dataclass(frozen=True, slots=True)
class Instructed:
    """What a prompt's record asks for."""

    instructions: tuple[tuple[str, Mapping[str, Any]], ...]
    request: str
    """The request without its instructions; empty where the record does not have it."""


def make_instructions(settings: InstructionsSource, context: RewardContext) -> Source:
    if context.fields is not None and KINDS not in context.fields:
        near = did_you_mean(KINDS, context.fields)
        raise ConfigError(
            f"reward 'instructions': the prompts' records have no field '{KINDS}'{near}; "
            "`kedge data instructions` writes prompts that have it (docs/rewards.md)"
        )

    def judge(answers: Sequence[Answer]) -> list[ScoreResult]:
        return [_instructed_result(answer, settings) for answer in answers]

    return Source(judge)


def _instructed_result(answer: Answer, settings: InstructionsSource) -> ScoreResult:
    record = read_record(answer.extra)
    if isinstance(record, str):
        return unscored(record)
    if shortcoming(answer.text, record, settings):
        return ScoreResult(0.0)
    prompt = next((content for role, content in reversed(answer.prompt) if role == "user"), "")
    rule = follows_loosely if settings.loose else follows
    is_followed = [rule(kind, arguments, prompt, answer.text) for kind, arguments in record.instructions]
    return ScoreResult(float(all(is_followed)) if settings.give == "all" else sum(is_followed) / len(is_followed))


def read_record(extra: Mapping[str, Any]) -> Instructed | str:
    """The instructions of a prompt, or what is wrong with them.

    >>> read_record({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}).instructions
    (('punctuation:no_comma', {}),)
    >>> read_record({"instruction_id_list": []})
    'the prompt has no instructions: `instruction_id_list` is empty or missing'
    """
    kinds, arguments = extra.get(KINDS), extra.get(ARGUMENTS)
    if not isinstance(kinds, list) or not kinds:
        return f"the prompt has no instructions: `{KINDS}` is empty or missing"
    names = cast("list[Any]", kinds)
    each = cast("list[Any]", arguments) if isinstance(arguments, list) else [{}] * len(names)
    if len(each) != len(names) or not all(isinstance(one, Mapping) for one in each):
        return f"`{ARGUMENTS}` of the prompt is not a list of {len(names)} objects, one for each instruction"
    pairs = tuple((str(name), cast("Mapping[str, Any]", given)) for name, given in zip(names, each, strict=True))
    for name, given in pairs:
        if complaint := complaint_about(name, given):
            return complaint
    if needs_language(name for name, _ in pairs):
        require_langdetect("reward 'instructions' (instructions on the language of an answer)")
    request = extra.get(REQUEST)
    return Instructed(pairs, request if isinstance(request, str) else "")


def shortcoming(text: str, record: Instructed, settings: InstructionsSource) -> str:
    """Why an answer is none, whatever instructions it follows; empty where it is one."""
    words = _WORD.findall(text.lower())
    if len(words) < settings.min_words:
        return "too short"
    if repetition(places_of(words).tolist()) > settings.max_repetition:
        return "repeats itself"
    if settings.relevant and record.request and not _is_in_another_language(record):
        topic = topic_of(record.request)
        if topic and topic.isdisjoint(word[:_STEM] for word in words):
            return "not about the request"
    return ""


def topic_of(request: str) -> frozenset[str]:
    """The first letters of the words that say what a request is about.

    >>> sorted(topic_of("How do I get red wine out of a carpet?"))
    ['carpe', 'wine']
    """
    words = _WORD.findall(request.lower())
    return frozenset(word[:_STEM] for word in words if len(word) >= _LEAST_LETTERS and word not in _COMMON_WORDS)


def _is_in_another_language(record: Instructed) -> bool:
    return any(kind == "language:response_language" for kind, _ in record.instructions)
