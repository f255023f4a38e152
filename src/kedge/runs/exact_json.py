"""JSON that loses nothing: floats keep every bit, and the non-finite ones, which JSON lacks, become strings.

NaN and the infinities are written as "NaN", "Infinity" and "-Infinity" and come back as floats. A string of the same
text (a model may well answer "NaN") is escaped with a backslash in front, which reading removes.
Left out: tuples come back as lists, and the sign and payload of a NaN are lost.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, cast

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_LOOKS_NON_FINITE = re.compile(r"\\*(NaN|-?Infinity)")


def dumps(value: Any) -> str:
    """One line of JSON.

    >>> print(dumps({"loss": float("nan"), "kl": 0.1, "text": "NaN"}))
    {"loss": "NaN", "kl": 0.1, "text": "\\\\NaN"}
    """
    return json.dumps(encode(value), ensure_ascii=False, allow_nan=False)


def loads(text: str | bytes) -> Any:
    """The value that `dumps` was given.

    >>> loads(dumps([float("-inf"), "Infinity", "\\\\NaN", 0.1 + 0.2]))
    [-inf, 'Infinity', '\\\\NaN', 0.30000000000000004]
    """
    return decode(json.loads(text))


def encode(value: Any) -> Any:
    """`value` in JSON types. Numbers of numpy and torch become plain ones; other objects are a TypeError."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, str):
        return f"\\{value}" if _LOOKS_NON_FINITE.fullmatch(value) else value
    if isinstance(value, Mapping):
        entries = cast(Mapping[Any, Any], value)
        return {_key(key): encode(item) for key, item in entries.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in cast(list[Any], value)]
    if isinstance(value, PurePath):
        return encode(str(value))
    if hasattr(value, "item"):
        return encode(value.item())
    raise TypeError(f"a {type(value).__name__} has no place in JSON")


def decode(value: Any) -> Any:
    if isinstance(value, str) and _LOOKS_NON_FINITE.fullmatch(value):
        return value[1:] if value.startswith("\\") else _NON_FINITE[value]
    if isinstance(value, dict):
        return {key: decode(item) for key, item in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [decode(item) for item in cast(list[Any], value)]
    return value


def _float(value: float) -> float | str:
    if math.isfinite(value):
        return float(value)
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"the key {key!r} is a {type(key).__name__}; JSON knows only texts as keys")
    return key
