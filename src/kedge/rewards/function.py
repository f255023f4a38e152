"""A reward in Python: `file.py:function` of the user's, one that a script handed over, or an installed plugin.

It runs in this process, with everything that the user may do: it is the user's code. How it is called is described in
`kedge.rewards.callables`. None is no score. An exception costs the rows it was called with their score; a wrong kind of
result is an error.
"""

from __future__ import annotations

import importlib.util
import inspect
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from kedge.core import plugins
from kedge.core.answers import Answer, TextSource
from kedge.core.errors import ConfigError, RewardError
from kedge.core.suggest import did_you_mean
from kedge.rewards.callables import Parameters, parameters_of
from kedge.rewards.context import RewardContext
from kedge.rewards.failures import ScoreResult, Source, per_answer, unscored
from kedge.rewards.settings import TEXT_KINDS, CallableSource, FunctionSource


def make(settings: FunctionSource, context: RewardContext) -> TextSource:
    file, colon, name = settings.path.rpartition(":")
    if settings.path in TEXT_KINDS:
        raise ConfigError(f"function.path: '{settings.path}' is a kind of its own; write `kind: {settings.path}`")
    if not colon:
        return plugins.find("rewards", settings.path)(settings.options, context)
    function = load_function(context.folder / file, name)
    return source(function, name=settings.path, options=settings.options, fields=context.fields)


def make_callable(settings: CallableSource, context: RewardContext) -> TextSource:
    return source(settings.function, name=settings.name, options=settings.options, fields=context.fields)


def source(
    function: Callable[..., Any],
    *,
    name: str,
    options: Mapping[str, Any] | None = None,
    fields: Collection[str] | None = None,
) -> Source:
    """A source over a Python function; `name` is what error messages call it."""
    parameters = parameters_of(function, name=name, options=options or {}, fields=fields)
    if parameters.takes == "answers":
        return Source(partial(_judge_all, function, parameters, name))
    return per_answer(partial(_judge_one, function, parameters, name))


def _judge_all(
    function: Callable[..., Any], parameters: Parameters, name: str, answers: Sequence[Answer]
) -> list[ScoreResult]:
    lacking = [parameters.missing(answer) for answer in answers]
    complete = [answer for answer, missing in zip(answers, lacking, strict=True) if not missing]
    results = iter(_scored_together(function, parameters, name, complete) if complete else ())
    return [_incomplete(missing) if missing else next(results) for missing in lacking]


def _scored_together(
    function: Callable[..., Any], parameters: Parameters, name: str, answers: Sequence[Answer]
) -> list[ScoreResult]:
    try:
        scores = parameters.call_all(function, answers)
    except Exception as error:
        return [_failure(error)] * len(answers)
    if not hasattr(scores, "__len__") or not hasattr(scores, "__iter__"):
        raise RewardError(f"{name} returned a {type(scores).__name__}, expected a list of {len(answers)} numbers")
    if len(scores) != len(answers):
        raise RewardError(f"{name} returned {len(scores)} scores for {len(answers)} answers; one for each is needed")
    return [_result(score, name) for score in scores]


def _judge_one(function: Callable[..., Any], parameters: Parameters, name: str, answer: Answer) -> ScoreResult:
    if missing := parameters.missing(answer):
        return _incomplete(missing)
    try:
        score = parameters.call_one(function, answer)
    except Exception as error:
        return _failure(error)
    return _result(score, name)


def _incomplete(missing: Sequence[str]) -> ScoreResult:
    return unscored(f"the prompt's record has no field {', '.join(missing)}")


def _result(score: Any, name: str) -> ScoreResult:
    if score is None:
        return unscored("the function gave None")
    if hasattr(score, "item"):  # a scalar of torch or numpy
        score = score.item()
    if not isinstance(score, Real):
        raise RewardError(f"{name} returned {score!r} as a score, a {type(score).__name__}; expected a number or None")
    result = ScoreResult(float(score))
    return result if result.is_scored else unscored(f"the function gave {float(score)}")


def _failure(error: Exception) -> ScoreResult:
    return unscored(f"{type(error).__name__}: {error}")


def load_function(file: Path, name: str) -> Callable[..., Any]:
    """A function of the user's file, which is imported now."""
    module = _module(file)
    function = vars(module).get(name)
    if callable(function):
        return function
    own = [
        key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    raise ConfigError(f"{file} has no function '{name}'{did_you_mean(name, own)}; it has: {', '.join(own) or 'none'}")


def _import_failure(error: Exception, file: Path) -> str:
    """The error, and the line of the user's file that it came from."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f"line {error.lineno}: SyntaxError: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    place = f"line {lines[-1]}: " if lines else ""
    return f"{place}{type(error).__name__}: {error}"


def _module(file: Path) -> ModuleType:
    if not file.is_file():
        raise ConfigError(f"function.path: no file {file}; expected `file.py:function`, relative to the recipe")
    spec = importlib.util.spec_from_file_location(f"kedge_user_reward_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"function.path: {file} is not a Python file; expected `file.py:function`")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"function.path: {file} cannot be imported: {_import_failure(error, file)}") from error
    return module
