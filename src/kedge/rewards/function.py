"""A reward in Python: `file.py:function` of the user's, one that a script handed over, or an installed plugin.

It runs in this process, with everything that the user may do: it is the user's code. How it is called is described in
`kedge.rewards.callables`. None is no score. An exception, SystemExit included, costs the rows it was called with their
score; a wrong kind of result is an error (`kedge.rewards.failures`).
"""

from __future__ import annotations

import importlib.util
import inspect
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from kedge.core import plugins
from kedge.core.answers import Answer, TextSource
from kedge.core.errors import ConfigError
from kedge.core.suggest import did_you_mean
from kedge.rewards.callables import Parameters, parameters_of
from kedge.rewards.context import RewardContext
from kedge.rewards.failures import ScoreResult, Source, failure, read_score, read_scores, unscored
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
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{name} is an `async def`; a reward function gives its scores when it is called: use `def`")
    parameters = parameters_of(function, name=name, options=options or {}, fields=fields)
    score = _score_all if parameters.takes == "answers" else _score_each
    return Source(partial(_judge, partial(score, function, parameters, name), parameters))


def _judge(
    score: Callable[[Sequence[Answer]], list[ScoreResult]], parameters: Parameters, answers: Sequence[Answer]
) -> list[ScoreResult]:
    """Only answers whose record has all that the function needs are given to it."""
    lacking = [parameters.missing(answer) for answer in answers]
    complete = [answer for answer, missing in zip(answers, lacking, strict=True) if not missing]
    results = iter(score(complete) if complete else ())
    return [_incomplete(missing) if missing else next(results) for missing in lacking]


def _score_all(
    function: Callable[..., Any], parameters: Parameters, name: str, answers: Sequence[Answer]
) -> list[ScoreResult]:
    try:
        scores = parameters.call_all(function, answers)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return [failure(error)] * len(answers)
    return read_scores(scores, len(answers), name=name)


def _score_each(
    function: Callable[..., Any], parameters: Parameters, name: str, answers: Sequence[Answer]
) -> list[ScoreResult]:
    results: list[ScoreResult] = []
    for row, answer in enumerate(answers, start=1):
        try:
            score = parameters.call_one(function, answer)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            results.append(failure(error))
        else:
            results.append(read_score(score, name=name, row=row, rows=len(answers)))
    return results


def _incomplete(missing: Sequence[str]) -> ScoreResult:
    return unscored(f"the prompt's record has no field {', '.join(missing)}")


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


def _import_failure(error: BaseException, file: Path) -> str:
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
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a script that ends itself is no module of functions
        raise ConfigError(f"function.path: {file} cannot be imported: {_import_failure(error, file)}") from error
    return module
