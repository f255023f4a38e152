"""Runs the code of a program and what is asked about it, and reports through a pipe.

A check is a list of steps: statements to run, or expressions whose values are sent out as data. What a value should be
is not known here: who compares is on the other side of the pipe.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import types
from collections import deque
from collections.abc import Callable
from typing import Any

_DEEPEST = 60


def run(order: dict[str, Any], report: Callable[..., None]) -> None:
    """Run the program, then its checks, and report how each of them ended."""
    checks: list[list[tuple[str, Any]]] = order["checks"]
    name = "solution" if checks else "__main__"  # checks come from outside: the guard of a script stays shut
    module = types.ModuleType(name)
    sys.modules[name] = module
    for leave in ("exit", "quit"):  # left out together with `site`
        setattr(builtins, leave, sys.exit)
    ending, detail = attempt(order["code"], "<answer>", module)
    if ending == "exit" and not checks and detail in ("None", "0"):
        ending, detail = "done", ""
    if ending == "done":
        for index, steps in enumerate(checks):
            report(check=index, **_check(steps, f"<check {index + 1}>", module))
    if ending == "exit":
        ending, detail = "exception", f"sys.exit({detail})"
    report(end=ending, detail=detail)


def _check(steps: list[tuple[str, Any]], name: str, module: types.ModuleType) -> dict[str, Any]:
    """The values that were asked for, and what went wrong with a statement."""
    values: list[list[Any]] = []
    for kind, step in steps:
        if kind == "run":
            ending, reason = attempt(step, name, module)
            if ending != "done":
                return {"values": values, "failed": True, "detail": reason}
        else:
            values.append([_value_of(expression, name, module) for expression in step])
    return {"values": values, "failed": False, "detail": ""}


def attempt(code: str, name: str, module: types.ModuleType) -> tuple[str, str]:
    """How a piece of code ends: `done`, `exit`, `memory` or `exception`, and with which words."""
    try:
        exec(compile(code, name, "exec"), vars(module))
    except SystemExit as error:
        return "exit", str(error.code)
    except MemoryError:
        return "memory", "MemoryError"
    except BaseException as error:  # whatever the code raises is a fact about it, not a failure of ours
        return "exception", f"{type(error).__name__}: {error}"[:500]
    return "done", ""


def _value_of(expression: str, name: str, module: types.ModuleType) -> list[Any]:
    try:
        return encoded(eval(compile(expression, name, "eval"), vars(module)))
    except BaseException as error:
        return ["error", f"{type(error).__name__}: {error}"[:500]]


def encoded(value: Any, depth: int = 0) -> list[Any]:
    """A value as data, by what it is built on: a counter is a dict, a named tuple a tuple.

    >>> encoded((1, "a", None))
    ['tuple', [['int', '0x1'], ['str', 'a'], ['constant', None]]]
    """
    if value is None or value is True or value is False:
        return ["constant", value]
    if depth < _DEEPEST:
        for kind, plain in _PLAIN.items():
            if isinstance(value, plain):
                return [kind, _CONTENT[kind](value, depth)]
        for module, name in (("fractions", "Fraction"), ("decimal", "Decimal")):  # where the program has imported them
            if isinstance(value, getattr(sys.modules.get(module), name, ())):
                return [name, str(value)]
    return ["object", bool(value), type(value).__name__]


def _all(kind: Any) -> Callable[[Any, int], list[Any]]:
    return lambda value, depth: [encoded(part, depth + 1) for part in kind.__iter__(value)]


_PLAIN: dict[str, type] = {
    "int": int,
    "float": float,
    "complex": complex,
    "str": str,
    "bytes": bytes,
    "bytearray": bytearray,
    "list": list,
    "tuple": tuple,
    "deque": deque,
    "dict": dict,
    "range": range,
    "set": set,
    "frozenset": frozenset,
    "keys": type({}.keys()),
}
_CONTENT: dict[str, Callable[[Any, int], Any]] = {
    "int": lambda value, _: hex(value),
    "float": lambda value, _: float.hex(value),
    "complex": lambda value, _: [float.hex(value.real), float.hex(value.imag)],
    "str": lambda value, _: str.__str__(value),
    "bytes": lambda value, _: bytes.hex(value),
    "bytearray": lambda value, _: bytearray.hex(value),
    "list": _all(list),
    "tuple": _all(tuple),
    "dict": lambda value, depth: [[encoded(part, depth + 1) for part in pair] for pair in dict.items(value)],
    "deque": _all(deque),
    "range": lambda value, _: [value.start, value.stop, value.step],
    "set": _all(set),
    "keys": lambda value, depth: [encoded(part, depth + 1) for part in value],
    "frozenset": _all(frozenset),
}


def serve(order: dict[str, Any], report_fd: int) -> None:
    """Run the program of an order, and leave. The token proves who reports; the program's input is already fd 0."""
    token: str = order.pop("token")

    def report(**fields: Any) -> None:
        left = f"{token}{json.dumps(fields)}\n".encode()
        while left:
            left = left[os.write(report_fd, left) :]

    sys.stdin = open(0, encoding="utf-8", errors="surrogatepass", closefd=False)  # noqa: SIM115 (lives on)
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115 (lives on)
    report(ready=True)
    run(order, report)
    try:
        sys.stdout.flush()
    finally:
        os._exit(0)  # no thread or exit handler of the code outlives it
