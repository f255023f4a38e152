"""Assertions about code that nobody has read, judged where that code cannot reach.

`assert f(2) == 5` becomes a question (`f(2)`), which is all that the code's process gets to see, and a comparison with
5, which is made here with the value that it sent back as data. Whatever the code patches, prints or forges, it can only
send values, and has to send the right ones without knowing them. A statement that is not an assertion (a loop, `with`)
runs in the code's process as a whole, and so does a comparison without a literal on either side.
"""

from __future__ import annotations

import ast
import math
import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Number
from typing import Any

Ask = Callable[[str], "Judge"]
Judge = Callable[[Sequence[Any]], Any]
"""From the values of an assertion's questions to its own value; raises what the question raised."""

_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "deque": deque,
    "set": set,
    "frozenset": frozenset,
    "keys": set,
}
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {ast.Add: operator.add, ast.Sub: operator.sub}


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value that is no data (an object of a class of the code). It equals nothing."""

    is_true: bool
    kind: str

    def __bool__(self) -> bool:
        return self.is_true

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class Raised(Exception):
    """The question raised; the words are those of the code's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Statements to run there, or questions to ask there and how to judge the values here."""

    code: str = ""
    questions: tuple[str, ...] = ()
    judge: Judge | None = None

    def as_order(self) -> tuple[str, Any]:
        return ("run", self.code) if self.judge is None else ("ask", list(self.questions))


def steps_of(check: str) -> tuple[Step, ...]:
    """A check as steps: its assertions as questions, all else as statements.

    >>> [step.as_order() for step in steps_of("x = f(1)\\nassert x == [2, 3] and abs(g(x) - 0.5) < 1e-6")]
    [('run', 'x = f(1)'), ('ask', ['x', 'g(x)'])]
    """
    try:
        statements = ast.parse(check).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return (Step(code=check),)  # it fails there, with Python's own words
    steps: list[Step] = []
    for statement in statements:
        if isinstance(statement, ast.Assert):
            steps.append(_question(statement.test))
        elif steps and steps[-1].judge is None:
            steps[-1] = Step(code=f"{steps[-1].code}\n{ast.unparse(statement)}")
        else:
            steps.append(Step(code=ast.unparse(statement)))
    return tuple(steps)


def _question(test: ast.expr) -> Step:
    questions: list[str] = []

    def ask(expression: str) -> Judge:
        questions.append(expression)
        return _nth(len(questions) - 1)

    judge = _truth(test, ask)
    return Step(questions=tuple(questions), judge=judge)


def failure_of(steps: Sequence[Step], values: Any) -> str | None:
    """Why a check fails by the values that were sent for its questions; None where it holds."""
    judged = [step for step in steps if step.judge is not None]
    if not isinstance(values, list) or len(values) != len(judged):
        return "the values are not whole"
    for step, sent in zip(judged, values, strict=True):
        assert step.judge is not None
        try:
            if len(sent) != len(step.questions) or not step.judge([decoded(value) for value in sent]):
                return "AssertionError: "
        except Raised as error:
            return str(error)
        except (TypeError, ValueError, ArithmeticError, RecursionError, LookupError) as error:
            return f"{type(error).__name__}: {error}"[:500]
    return None


def decoded(sent: Any) -> Any:
    """A value from what `sandboxed.program.encoded` made of it.

    >>> decoded(["list", [["int", "0x2"], ["float", "0x1.0p-1"]]])
    [2, 0.5]
    """
    kind, content = sent[0], sent[1]
    match kind:
        case "constant" if content is None or isinstance(content, bool):
            return content
        case "int":
            return int(content, 16)
        case "float":
            return float.fromhex(content)
        case "complex":
            return complex(*map(float.fromhex, content))
        case "str":
            return str(content)
        case "bytes" | "bytearray":
            return bytes.fromhex(content)
        case "list" | "tuple" | "deque" | "set" | "frozenset" | "keys":
            return _CONTAINERS[kind](map(decoded, content))
        case "range":
            return range(*content)
        case "Fraction":
            return Fraction(content)
        case "Decimal":
            return Decimal(content)
        case "dict":
            return {decoded(key): decoded(value) for key, value in content}
        case "object":
            return Opaque(bool(content), str(sent[2]))
        case "error":
            return _Error(str(content))
        case _:
            raise ValueError("not a value")


@dataclass(frozen=True, slots=True)
class _Error:
    words: str


def _nth(index: int) -> Judge:
    def value(values: Sequence[Any]) -> Any:
        if isinstance(values[index], _Error):
            raise Raised(values[index].words)
        return values[index]

    return value


def _truth(node: ast.expr, ask: Ask) -> Judge:
    """What an assertion asserts: comparisons joined by and, or, not."""
    match node:
        case ast.BoolOp(op=op, values=parts):
            judges = [_truth(part, ask) for part in parts]
            join = all if isinstance(op, ast.And) else any
            return lambda values: join(judge(values) for judge in judges)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            judge = _truth(operand, ask)
            return lambda values: not judge(values)
        case ast.Compare(left=left, ops=ops, comparators=rest) if _hides([left, *rest]):
            operands = [_value(part, ask) for part in [left, *rest]]
            compares = [_COMPARE[type(op)] for op in ops]
            return lambda values: _compare([operand(values) for operand in operands], compares)
        case _:
            return _value(node, ask)


def _compare(operands: Sequence[Any], compares: Sequence[Callable[[Any, Any], Any]]) -> bool:
    return all(compare(left, right) for compare, left, right in zip(compares, operands, operands[1:], strict=False))


def _value(node: ast.expr, ask: Ask) -> Judge:
    """A literal, a difference or rounding of one from a value, or else a question."""
    literal = _literal(node)
    if literal is not None:
        return lambda values: literal[0]
    match node:
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right) if _is_sum(left, right):
            first, second, combine = _value(left, ask), _value(right, ask), _ARITHMETIC[type(op)]
            return lambda values: combine(_number(first(values)), _number(second(values)))
        case ast.Call(func=ast.Name(id="abs"), args=[inner], keywords=[]) if _hides([inner]):
            value = _value(inner, ask)
            return lambda values: abs(_number(value(values)))
        case ast.Call(func=func, args=args, keywords=keywords) if _is_isclose(func) and _hides(args):
            bounds = {key.arg or "": _literal(key.value) for key in keywords}
            if all(bound is not None for bound in bounds.values()):
                parts = [_value(part, ask) for part in args]
                named = {name: bound[0] for name, bound in bounds.items() if bound is not None}
                return lambda values: math.isclose(*(_number(part(values)) for part in parts), **named)
        case _:
            pass
    return ask(ast.unparse(node))


def _hides(nodes: Sequence[ast.expr]) -> bool:
    """Whether one of them holds a literal that the code's process need not know."""
    for node in nodes:
        if _literal(node) is not None:
            return True
        match node:
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right) if _is_sum(left, right):
                return True
            case ast.Call(func=ast.Name(id="abs"), args=[inner], keywords=[]) if _hides([inner]):
                return True
            case _:
                pass
    return False


def _is_sum(left: ast.expr, right: ast.expr) -> bool:
    """Whether a number that is hidden is added to a value, or taken from it."""
    literals = [literal for literal in (_literal(left), _literal(right)) if literal is not None]
    return all(isinstance(literal[0], Number) for literal in literals) and _hides([left, right])


def _is_isclose(func: ast.expr) -> bool:
    return ast.unparse(func) in ("math.isclose", "isclose")


def _literal(node: ast.expr) -> tuple[Any] | None:
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _number(value: Any) -> Any:
    """The value, which must be a number: sums of lists are not made for code that nobody has read."""
    if not isinstance(value, Number):
        raise TypeError(f"a number was expected, found {type(value).__name__}")
    return value
