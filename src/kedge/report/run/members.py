"""Curves of an ensemble: its members learn one after the other, and are drawn side by side over their own steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kedge.core.metric_table import as_table
from kedge.report.run.run_records import Record

MEMBER, MEMBER_STEP = "train/member", "train/member_step"
"""Which member a record is of, from 1, and the step of its own; only where there are several."""


def side_by_side(records: Sequence[Record]) -> tuple[Sequence[Record], tuple[int, ...]]:
    """One record for each step of a member, in which a metric has a name for each of them, and the members; the records
    themselves and none where they are not of an ensemble.

    >>> side_by_side([{"step": 9, "train/member": 2, "train/member_step": 1, "train/loss": 0.5}])
    ([{'step': 1, 'train/loss of 2': 0.5}], (2,))
    """
    members = tuple(sorted({int(member) for member in as_table(records).finite(MEMBER).tolist()}))
    if not members:
        return records, ()
    rows: dict[int, dict[str, float]] = {}
    for record in records:
        if MEMBER not in record or MEMBER_STEP not in record:
            continue
        row = rows.setdefault(int(record[MEMBER_STEP]), {})
        row |= {
            _name(name, int(record[MEMBER])): value
            for name, value in record.items()
            if name not in (MEMBER, MEMBER_STEP, "step", "at")
        }
    return [{"step": step, **row} for step, row in sorted(rows.items())], members


def names_of_members(names: Mapping[str, str], members: Sequence[int]) -> Mapping[str, str]:
    """The names of a chart's lines, one for each member; the same where there are none."""
    if not members:
        return names
    return {_name(name, member): f"{line}, member {member}" for name, line in names.items() for member in members}


def _name(metric: str, member: int) -> str:
    return f"{metric} of {member}"
