"""Extraction, exact, numeric, regular expression, JSON and mathematics, by hand."""

from __future__ import annotations

import math
import sys
import time
import types
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.core.answers import Answer
from kedge.core.errors import PluginError
from kedge.rewards import maths
from kedge.rewards.context import RewardContext
from kedge.rewards.extraction import Extracted, Number, are_equal, extract, extract_all, last_number, match_all
from kedge.rewards.failures import ScoreResult, Source
from kedge.rewards.settings import ExactSource, JsonSource, MathSource, NamedPart, NumericSource, Pattern, RegexSource
from kedge.rewards.verifiable import make_exact, make_json, make_numeric, make_regex

Make = Callable[..., Answer]
NO_SOLUTION = "the prompt has no known solution"


@pytest.mark.parametrize(
    ("how", "text", "expected"),
    [
        ("whole", "  a b \n", "a b"),
        ("boxed", r"\boxed{1} then \boxed{\frac{1}{2}+{3}} end", r"\frac{1}{2}+{3}"),
        ("boxed", r"\boxed{cut off", None),
        ("boxed", "42", None),
        ("hashes", "#### 1\n#### 1,234 \nbye", "1,234"),
        ("hashes", "42", None),
        ("last_line", "a\n b \n\n", "b"),
        ("last_line", " \n", None),
        ("fenced", "```python\nx = 1\n```\ntext\n```\ny = 2\n  z\n```", "y = 2\n  z"),
        ("fenced", "```python\nx = 1", None),
        ("fenced", "x = 1", None),
    ],
)
def test_extraction(how: NamedPart, text: str, expected: str | None) -> None:
    assert extract(text, how) == expected


def test_extraction_by_pattern_takes_the_last_match() -> None:
    parts = extract_all(["so A: 3. No, A: 4", "none", "A: ß"], Pattern(pattern=r"A: (\w)", group=1))
    assert parts == [Extracted("4"), Extracted(None), Extracted("ß")]


@pytest.mark.parametrize(
    ("text", "value", "is_percent"),
    [
        ("The total is $1,234.50.", Fraction(2469, 2), False),
        ("1,234,567", Fraction(1234567), False),
        ("(1, 2)", Fraction(2), False),
        ("it fell by -3", Fraction(-3), False),
        ("−7", Fraction(-7), False),
        ("+ 5", Fraction(5), False),
        ("10-4", Fraction(4), False),
        ("3 / 4", Fraction(3, 4), False),
        ("-1/8", Fraction(-1, 8), False),
        ("1 1/2 cups", Fraction(3, 2), False),
        (r"\dfrac{3}{4}", Fraction(3, 4), False),
        (r"12.5\%", Fraction(25, 2), True),
        ("1.5e3", Fraction(1500), False),
        ("2E-2", Fraction(1, 50), False),
        (".5", Fraction(1, 2), False),
        ("7, then 1/0", Fraction(7), False),
        ("٣ 4", Fraction(4), False),
    ],
)
def test_last_number(text: str, value: Fraction, is_percent: bool) -> None:
    assert last_number(text) == Number(value, is_percent)


def test_text_without_a_number() -> None:
    assert last_number("none at all, -") is None
    assert last_number("") is None


@given(st.fractions(max_denominator=10**6).filter(lambda x: abs(x) < 10**12))
def test_any_fraction_is_read_back(value: Fraction) -> None:
    assert last_number(f"it is {value.numerator}/{value.denominator}") == Number(value)


@given(st.text(max_size=300))
def test_numbers_never_raise(text: str) -> None:
    last_number(text)


def test_a_hostile_number_takes_no_time() -> None:
    start = time.monotonic()
    for text in ("9" * 100_000, "1," * 10_000, "1e999999999", "1/" * 10_000, "- " * 10_000, "1.1" * 10_000):
        last_number(text)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("answer", "solution", "relative", "absolute", "expected"),
    [
        ("10000001", "10000000", 1e-12, 0.0, False),
        ("0.3333333333333333", "1/3", 1e-12, 0.0, True),
        ("0.333", "1/3", 1e-12, 0.0, False),
        ("0.333", "1/3", 1e-2, 0.0, True),
        ("101", "100", 0.0, 1.0, True),
        ("101.5", "100", 0.0, 1.0, False),
        ("50%", "0.5", 0.0, 0.0, True),
        ("50", "50%", 0.0, 0.0, True),
        ("50", "0.5", 0.0, 0.0, False),
        ("5%", "50%", 0.0, 0.0, False),
    ],
)
def test_equality(answer: str, solution: str, relative: float, absolute: float, expected: bool) -> None:
    given, correct = last_number(answer), last_number(solution)
    assert given is not None
    assert correct is not None
    assert are_equal(given, correct, relative=relative, absolute=absolute) is expected


def judge(source: Source, answers: Sequence[Answer]) -> list[tuple[float | None, str]]:
    return [(None if math.isnan(v.score) else v.score, v.reason) for v in source.judge(answers)]


def test_exact(answer: Make, context: RewardContext) -> None:
    rows = [answer(" PARIS ", "Paris"), answer("Paris"), answer("Rome", "Paris"), answer("New\nYork", "new york")]
    loose = make_exact(ExactSource(kind="exact"), context)
    assert judge(loose, rows) == [(1.0, ""), (None, NO_SOLUTION), (0.0, ""), (1.0, "")]
    strict = make_exact(ExactSource(kind="exact", ignore_case=False, ignore_spaces=False), context)
    assert strict.score([answer("PARIS", "Paris"), answer("a  b", "a b"), answer("a", "a")]) == [0.0, 0.0, 1.0]
    bare = make_exact(ExactSource(kind="exact", ignore_punctuation=True, extract="boxed"), context)
    assert bare.score([answer(r"\boxed{Hi!}", "hi"), answer("hi", "hi")]) == [1.0, 0.0]


def test_numeric(answer: Make, context: RewardContext) -> None:
    source = make_numeric(NumericSource(kind="numeric", extract="hashes"), context)
    rows = [answer("#### 1,000", "#### 1000"), answer("1000", "1000"), answer("#### 5", "five"), answer("#### x", "5")]
    assert judge(source, rows) == [(1.0, ""), (0.0, ""), (None, "the solution has no number: 'five'"), (0.0, "")]


def test_regex(answer: Make, context: RewardContext) -> None:
    contain = make_regex(RegexSource(kind="regex", pattern="(?i)because"), context)
    assert contain.score([answer("Because!"), answer("no"), answer("é because")]) == [1.0, 0.0, 1.0]
    be = make_regex(RegexSource(kind="regex", pattern="yes|no", must="be"), context)
    assert be.score([answer("yes"), answer("yes, no"), answer("")]) == [0.0 + 1, 0.0, 0.0]
    empty = make_regex(RegexSource(kind="regex", pattern="x*", must="be"), context)
    assert empty.score([answer("")]) == [1.0]


def test_a_pattern_that_explodes_costs_its_row_alone(answer: Make, context: RewardContext) -> None:
    source = make_regex(RegexSource(kind="regex", pattern="(a|aa)+$", timeout_s=0.1), context)
    rows = [answer("aa"), answer("a" * 60 + "b"), answer("b"), answer("ba")]
    assert judge(source, rows) == [(1.0, ""), (None, "the pattern took longer than 0.1 s"), (0.0, ""), (1.0, "")]


@pytest.mark.parametrize("must", ["last", "contain", "be"])
def test_every_way_of_matching_has_its_limit(must: Any) -> None:
    (part,) = match_all("(a|aa)+$", ["a" * 60 + "b"], must=must, timeout_s=0.05)
    assert part == Extracted(None, "the pattern took longer than 0.05 s")


def test_lone_surrogates_and_long_texts_pass_through() -> None:
    long = "x" * 300_000
    assert match_all("(?s).*", ["\ud800", long, "𝔸"], must="be", timeout_s=1.0) == [
        Extracted("\ud800"),
        Extracted(long),
        Extracted("𝔸"),
    ]


def test_json_without_a_schema(answer: Make, context: RewardContext) -> None:
    source = make_json(JsonSource(kind="json_schema"), context)
    rows = [answer('{"a": 1}'), answer("{'a': 1}"), answer("NaN"), answer("[" * 100_000), answer(" 3 ")]
    assert source.score(rows) == [1.0, 0.0, 0.0, 0.0, 1.0]
    fenced = make_json(JsonSource(kind="json_schema", extract="fenced"), context)
    assert fenced.score([answer('```json\n{"a": 1}\n```'), answer('{"a": 1}')]) == [1.0, 0.0]


def test_json_with_a_schema(answer: Make, context: RewardContext, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = JsonSource.model_validate({"kind": "json_schema", "schema": {"required": ["a"]}})
    for name in ("jsonschema", "jsonschema.exceptions", "jsonschema.validators"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PluginError, match=r"pip install 'kedge\[jsonschema\]'"):
        make_json(settings, context)

    class Validator:
        """As much of a validator of jsonschema as is used."""

        def __init__(self, schema: dict[str, Any]) -> None:
            self.required = schema["required"]

        @staticmethod
        def check_schema(schema: dict[str, Any]) -> None:
            assert schema == {"required": ["a"]}

        def is_valid(self, value: Any) -> bool:
            return all(name in value for name in self.required)

    package = types.ModuleType("jsonschema")
    errors, validators = types.ModuleType("jsonschema.exceptions"), types.ModuleType("jsonschema.validators")
    vars(errors)["SchemaError"] = ValueError
    vars(validators)["validator_for"] = lambda schema: Validator
    for module in (package, errors, validators):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert make_json(settings, context).score([answer('{"a": 1}'), answer('{"b": 1}'), answer("{")]) == [1.0, 0.0, 0.0]


def test_math_names_its_extra(context: RewardContext) -> None:
    with pytest.raises(PluginError, match=r"reward 'math' needs 'math_verify': pip install 'kedge\[math\]'"):
        maths.make(MathSource(kind="math"), context)


def test_math_gives_the_verifier_solution_then_answer(answer: Make) -> None:
    verified: list[tuple[str, str]] = []

    def verify(pairs: Sequence[tuple[str, str]], timeout_s: float) -> list[bool | None]:
        verified.extend(pairs)
        return [None if found == "?" else gold == found[::-1] for gold, found in pairs]

    source = maths.source(MathSource(kind="math", extract="boxed"), verify)
    rows = [
        answer(r"\boxed{21}", "12"),
        answer("21", "12"),
        answer(r"\boxed{?}", "12"),
        answer(r"\boxed{3}"),
        answer(r"\boxed{12}", "12"),
    ]
    reason = "math-verify could not compare the answer with the solution"
    assert source.judge(rows)[:2] == [ScoreResult(1.0), ScoreResult(0.0)]
    assert judge(source, rows)[2:] == [(None, reason), (None, NO_SOLUTION), (0.0, "")]
    assert verified[:3] == [("12", "21"), ("12", "?"), ("12", "12")]


def test_math_in_a_child_without_the_package_knows_nothing() -> None:
    assert maths.verify_in_child([("1", "1"), ("2", "3")], 1.0) == [None, None]
