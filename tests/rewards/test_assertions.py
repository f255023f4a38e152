"""What an assertion asks of a program, and how its values are judged outside."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from kedge.rewards.assertions import Opaque, decoded, failure_of, steps_of
from kedge.rewards.sandbox import Job, Limits, run
from kedge.rewards.sandboxed.program import encoded

LIMITS = Limits(isolation="any")


@pytest.mark.parametrize(
    ("check", "orders"),
    [
        ("assert f(1) == 2", [("ask", ["f(1)"])]),
        ("assert 2 == f(1), 'words'", [("ask", ["f(1)"])]),
        ("assert f(1) == [1, {'a': -2}] and not g(2)", [("ask", ["f(1)", "g(2)"])]),
        ("assert abs(f(1) - 0.5) < 1e-6", [("ask", ["f(1)"])]),
        ("assert math.isclose(f(1), 0.5, rel_tol=1e-3)", [("ask", ["f(1)"])]),
        ("assert 1 < f(1) <= 5", [("ask", ["f(1)"])]),
        ("assert f(1) == g(1)", [("ask", ["f(1) == g(1)"])]),
        ("assert f(1) == Decimal('1')", [("ask", ["f(1) == Decimal('1')"])]),
        ("assert f(1) + [2] == [1, 2]", [("ask", ["f(1) + [2]"])]),
        ("for x in range(3):\n    assert f(x) == x", [("run", "for x in range(3):\n    assert f(x) == x")]),
        ("x = 1\ny = 2\nassert f(x) == 3", [("run", "x = 1\ny = 2"), ("ask", ["f(x)"])]),
        ("assert (", [("run", "assert (")]),
    ],
)
def test_only_what_has_to_be_known_is_asked(check: str, orders: list[Any]) -> None:
    assert [step.as_order() for step in steps_of(check)] == orders


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -(10**30), 0.1, float("inf"), 2 + 3j, "é\ud800", b"\xff", [], (1, (2,)), {1: {"a"}}),
        *(range(3), deque([1]), frozenset({2}), Fraction(1, 3), Decimal("0.10")),
    ],
)
def test_values_come_back_as_they_are(value: Any) -> None:
    back = decoded(encoded(value))
    assert back == value
    assert type(back) is type(value)


def test_values_come_back_as_what_they_are_built_on() -> None:
    assert decoded(encoded(Counter("aab"))) == {"a": 2, "b": 1}
    assert decoded(encoded(OrderedDict(a=1))) == {"a": 1}
    assert decoded(encoded({"a": 1}.keys())) == {"a"}


def test_an_object_equals_nothing_but_may_be_true() -> None:
    thing = decoded(encoded(object()))
    assert isinstance(thing, Opaque)
    assert thing != thing
    assert thing
    (step,) = steps_of("assert f(1)")
    assert failure_of([step], [[encoded(object())]]) is None


@pytest.mark.parametrize(
    "sent", [None, 5, [], [[]], [[["int", 5]]], [[["odd", 1]]], [["int"]], [[["set", [["list", []]]]]]]
)
def test_what_is_no_value_is_no_pass(sent: Any) -> None:
    assert failure_of(steps_of("assert f(1) == 2"), sent) is not None


@pytest.mark.parametrize(
    ("code", "check", "passes"),
    [
        ("def f(x): return x * 0.1", "assert abs(f(3) - 0.3) < 1e-9", True),
        ("def f(x): return x * 0.1", "assert abs(f(3) - 0.4) < 1e-9", False),
        ("def f(x): return iter(range(x))", "assert list(f(3)) == [0, 1, 2]", True),
        ("def f(x): return None", "assert f(3) is None or f(3).name == 'a'", True),
        ("def f(x): x.append(1)", "x = [0]\nf(x)\nassert x == [0, 1]", True),
        (
            "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
            "assert f() == (1, 2)",
            True,
        ),
        ("class P:\n    def __eq__(s, o): return isinstance(o, P)\nf = P", "assert f() == f()", True),
        ("def f(x): raise KeyError(x)", "try:\n    f(1)\n    assert False\nexcept KeyError:\n    pass", True),
        ("def f(x): raise KeyError(x)", "assert f(1) == 1", False),
        ("def f(x): return [x]", "assert 3 in f(3) and 4 not in f(3)", True),
        ("def f(x): return x", "assert f(2) == 2\nassert f(2) == 3", False),
        ("def f(x): return True", "assert f(2) == 1", True),
    ],
)
def test_assertions_mean_what_they_mean_in_python(code: str, check: str, passes: bool) -> None:
    assert run(Job(code=code, checks=(check,)), LIMITS).passed == (passes,)
