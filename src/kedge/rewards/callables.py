"""Reward functions of the user's: what identifies one, and where the values of its parameters come from.

A function takes `answer` (one, a number back) or `answers` (a list, a list of numbers back). Every other parameter is
filled by name: from the options of the source, else from the record of the prompt (`solution`, and any other field of
its row), else its default stands. With `answers`, a value from the records is a list with one item an answer.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import dedent
from types import CodeType, FunctionType, MethodType
from typing import Any, Literal, cast

from kedge.core.answers import Answer
from kedge.core.errors import ConfigError
from kedge.core.files import hash_json
from kedge.core.suggest import did_you_mean

Function = Callable[..., Any]

_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """How a function is called."""

    takes: Literal["answer", "answers"]
    is_positional: bool
    """Whether it is given the answer by position, as the first argument."""
    fixed: Mapping[str, Any]
    """Values from the options."""
    required: tuple[str, ...]
    """Fields that a record must have."""
    optional: Mapping[str, Any]
    """Fields that a record may have, with the value that stands where it has none."""
    takes_rest: bool
    """`**kwargs`: every other field of the record is passed as well."""

    def missing(self, answer: Answer) -> list[str]:
        """The required fields that the record of this answer's prompt lacks."""
        record = record_of(answer)
        return [name for name in self.required if name not in record]

    def call_one(self, function: Function, answer: Answer) -> Any:
        record = record_of(answer)
        names = self._names([record])
        return self._call(function, answer, {name: record.get(name, self.optional.get(name)) for name in names})

    def call_all(self, function: Function, answers: Sequence[Answer]) -> Any:
        records = [record_of(answer) for answer in answers]
        names = self._names(records)
        columns = {name: [record.get(name, self.optional.get(name)) for record in records] for name in names}
        return self._call(function, list(answers), columns)

    def _names(self, records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """The fields that are passed. An optional one that no record has keeps the function's own default."""
        named = dict.fromkeys(name for record in records for name in record)
        yield from self.required
        yield from (name for name in self.optional if name in named)
        if self.takes_rest:
            taken = {self.takes, *self.fixed, *self.required, *self.optional}
            yield from (name for name in named if name not in taken)

    def _call(self, function: Function, given: Any, fields: Mapping[str, Any]) -> Any:
        if self.is_positional:
            return function(given, **self.fixed, **fields)
        return function(**{self.takes: given}, **self.fixed, **fields)


def record_of(answer: Answer) -> dict[str, Any]:
    """What is known of an answer's prompt, by field."""
    solution = {} if answer.solution is None else {"solution": answer.solution}
    return {**answer.extra, **solution}


def parameters_of(
    function: Function, *, name: str, options: Mapping[str, Any], fields: Collection[str] | None
) -> Parameters:
    """How to call `function`, which error messages call `name`.

    `fields` are the fields that the prompts' records have, where they are known before anything is scored: a
    parameter that nothing can fill is an error then.
    """
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: its parameters cannot be read ({error}); wrap it in a function of yours") from error
    takes = [key for key in found if key in ("answer", "answers")]
    if len(takes) != 1:
        raise ConfigError(
            f"{name}: found parameters ({', '.join(found)}), expected `answers` (a list, a list of numbers back) or "
            "`answer` (one, a number back); others are filled by name from the options and the prompt's record"
        )
    (own,) = takes
    others = {key: parameter for key, parameter in found.items() if key != own}
    takes_rest = any(parameter.kind is parameter.VAR_KEYWORD for parameter in others.values())
    by_name = {key: parameter for key, parameter in others.items() if parameter.kind not in _VARIADIC}
    _refuse_what_cannot_be_filled(name, by_name, options, fields, takes_rest=takes_rest)
    bound = function.keywords if isinstance(function, partial) else {}
    free = {key: parameter for key, parameter in by_name.items() if key not in options and key not in bound}
    return Parameters(
        takes=cast("Literal['answer', 'answers']", own),
        is_positional=next(iter(found)) == own and found[own].kind is not inspect.Parameter.KEYWORD_ONLY,
        fixed=dict(options),
        required=tuple(key for key, parameter in free.items() if parameter.default is parameter.empty),
        optional={key: each.default for key, each in free.items() if each.default is not each.empty},
        takes_rest=takes_rest,
    )


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _refuse_what_cannot_be_filled(
    name: str,
    parameters: Mapping[str, inspect.Parameter],
    options: Mapping[str, Any],
    fields: Collection[str] | None,
    *,
    takes_rest: bool,
) -> None:
    for key, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(f"{name}: parameter `{key}` cannot be given by name; leave out the `/` of its signature")
        if parameter.default is not parameter.empty or key in options or fields is None or key in fields:
            continue
        available = [
            f"the prompts' records have {', '.join(sorted(fields)) or 'no other fields'}",
            f"the options have {', '.join(options) or 'nothing'}",
        ]
        raise ConfigError(
            f"{name}: nothing fills its parameter `{key}`{did_you_mean(key, [*fields, *options])}: "
            f"{'; '.join(available)}. Put it into one of them, or give it a default"
        )
    unknown = [] if takes_rest else [key for key in options if key not in parameters]
    if unknown:
        known = f"it has {', '.join(parameters)}" if parameters else "it has none but the answer"
        raise ConfigError(
            f"{name}: options.{unknown[0]} is no parameter of the function"
            f"{did_you_mean(unknown[0], parameters)}; {known}"
        )


def identity_of(function: Function) -> dict[str, Any]:
    """What a run's manifest holds of a function: its name, a hash of its source, and whether it can be imported.

    The hash covers the text of the function and the plain values that it is bound to (closures, partial arguments,
    attributes of a callable object). Left out: other functions that it calls by a global name.
    """
    named: Any = function.func if isinstance(function, partial) else function
    if not hasattr(named, "__qualname__"):
        named = type(named)
    module, qualname = str(named.__module__), str(named.__qualname__)
    return {
        "name": f"{module}.{qualname}",
        "source": hash_json(_fingerprint(function, frozenset())),
        "importable": named is function and _is_importable(module, qualname, function),
    }


def _is_importable(module: str, qualname: str, function: Function) -> bool:
    """Another process can get the same object by `from module import qualname`."""
    place: Any = sys.modules.get(module)
    for part in qualname.split("."):
        place = getattr(place, part, None)
    return module != "__main__" and place is function


def _fingerprint(value: Any, above: frozenset[int]) -> Any:
    """JSON that changes when the text of a function, or a plain value that it is bound to, does."""
    if isinstance(value, _PLAIN):
        return value
    if id(value) in above:  # a function that calls itself has itself in its closure
        return "recursion"
    inner = above | {id(value)}
    match value:
        case list() | tuple():
            return [_fingerprint(item, inner) for item in cast("Sequence[Any]", value)]
        case set() | frozenset():
            return sorted(map(repr, cast("set[Any]", value)))
        case dict():
            items = cast("dict[Any, Any]", value).items()
            return {str(key): _fingerprint(item, inner) for key, item in items}
        case partial():
            return [_fingerprint(part, inner) for part in (value.func, value.args, value.keywords)]
        case MethodType():
            return [_fingerprint(value.__func__, inner), _fingerprint(value.__self__, inner)]
        case FunctionType():
            closed = inspect.getclosurevars(value).nonlocals
            return [_text_of(value), {key: _fingerprint(item, inner) for key, item in closed.items()}]
        case type():
            return _text_of(value)
        case _ if callable(value):
            attributes = getattr(value, "__dict__", {})
            return [_text_of(type(value)), {key: _fingerprint(item, inner) for key, item in attributes.items()}]
        case _:
            return type(cast(object, value)).__qualname__


def _text_of(value: Any) -> Any:
    """The source text; the instructions where there is none, as after `exec`; the name of what is built in."""
    try:
        return dedent(inspect.getsource(value))
    except (OSError, TypeError):
        code = getattr(value, "__code__", None)
        return _instructions(code) if isinstance(code, CodeType) else str(getattr(value, "__qualname__", value))


def _instructions(code: CodeType) -> list[Any]:
    constants = [_instructions(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), constants]
