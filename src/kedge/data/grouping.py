"""Records told apart by one of their fields: language, source, category."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kedge.core.errors import DataError
from kedge.core.suggest import did_you_mean

MOST_VALUES = 64
NO_VALUE = "(none)"
"""The group of the records that do not have the field."""


def group_value(record: Mapping[str, Any], field: str) -> str:
    """The value of a field as text.

    >>> group_value({"language": "de"}, "language"), group_value({"language": None}, "language")
    ('de', '(none)')
    """
    value = record.get(field)
    return NO_VALUE if value is None else str(value)


def group_values(records: Sequence[Mapping[str, Any]], field: str, *, setting: str) -> list[str]:
    """The value of a field in each record; a field that none has, or with too many values, is an error of the setting.

    >>> group_values([{"language": "de"}, {}, {"language": "en"}], "language", setting="groups")
    ['de', '(none)', 'en']
    """
    values = [group_value(record, field) for record in records]
    check_values(values, field, known=sorted({name for record in records for name in record}), setting=setting)
    return values


def check_values(values: Sequence[str], field: str, *, known: Sequence[str], setting: str) -> None:
    """`known` are the fields that records have."""
    distinct = set(values)
    if distinct == {NO_VALUE}:
        have = f"they have {', '.join(known)}" if known else "they have no fields of their own"
        raise DataError(f"{setting}: no example has a field '{field}'{did_you_mean(field, known)}; {have}")
    if len(distinct) > MOST_VALUES:
        raise DataError(
            f"{setting}: '{field}' has {len(distinct):,} values, and at most {MOST_VALUES} are told apart; name another"
        )
