"""Does somebody not look? What a person's latest labels say: sides, speed, runs, drift, gold; and in words what to do.

Of a large project the latest judgments are read, so that a status takes as long as ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from sqlalchemy import Connection, Text, exists, select, type_coerce

from kedge.core.quoting import count
from kedge.feedback.people import (
    FEWEST_GOLD,
    GOLD_ACCURACY,
    RUN_PROBABILITY,
    SELF_AGREEMENT,
    WORDS_A_MINUTE,
    Drift,
    GoldCheck,
    Share,
    SideRun,
    drift,
    gold_check,
    longest_side_run,
    position_bias,
    share_of,
    tie_share,
    words_a_minute,
)
from kedge.label import tables
from kedge.label.audit import last_seq
from kedge.label.projects import Project
from kedge.label.settle import sign
from kedge.label.tables import canonical_json

LATEST = 6_000
"""Judgments of the store that are read."""
_FEWEST_DRIFT = 45
"""Labels that others gave too, before drift is looked for; a third of them is late."""
_FEWEST_REPEATS = 8
_FAST_SHARE = 0.2
"""Of the labels: now and then anybody sees at once what is wrong."""
_FEWEST_READ = 10
_LARGE_BIAS = 0.1
_AS_STORED = canonical_json([0, 1])
"""The order of a pair whose first answer stood left; compared where it is kept, for reading thousands takes long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Care:
    """Of one person. What has too few labels to be known is None."""

    bias: Share | None
    """P(left) − ½."""
    ties: Share | None
    run: SideRun | None
    fast: Share | None
    """The share of labels that were given faster than anybody reads."""
    drift: Drift | None
    """Agreement with others, of the latest third beside those before."""
    again: Share | None
    """The share of repeated items with the same verdict."""
    gold: GoldCheck | None
    since_good: int
    """Labels since the last block of gold that was good enough; all that were read where there was none."""

    def worries(self) -> Iterator[str]:
        """What is wrong, in words; nothing for who works well."""
        if self.gold is not None and self.gold.pause:
            yield (
                f"pause: accuracy on gold {self.gold.accuracy:.2f}, below {GOLD_ACCURACY} with P = "
                f"{self.gold.below:.2f}; review the {count(self.since_good, 'label')} since the last good block of gold"
            )
        if self.again is not None and self.again.count >= _FEWEST_REPEATS and self.again.value < SELF_AGREEMENT:
            yield f"says the same of a repeated item in {self.again.value:.0%} of {self.again.count} cases"
        if self.bias is not None and not -_LARGE_BIAS < _nearest(self.bias) < _LARGE_BIAS:
            yield f"prefers a side: P(left) − ½ is {self.bias.value:+.2f} [{self.bias.low:+.2f}, {self.bias.high:+.2f}]"
        if self.run is not None and self.run.probability < RUN_PROBABILITY:
            chance = f"P {self.run.probability:.0e} by chance"
            yield f"a run of {self.run.length} times {self.run.side} ({chance}): look at these labels"
        if self.fast is not None and self.fast.count >= _FEWEST_READ and self.fast.value > _FAST_SHARE:
            yield f"{self.fast.value:.0%} of the labels came faster than {WORDS_A_MINUTE:,} words a minute"
        if self.drift is not None and self.drift.is_worse:
            yield (
                f"drifts: agrees with others in {self.drift.late:.0%} of the latest labels, "
                f"{self.drift.early:.0%} before; talk, calibrate again"
            )


def _nearest(share: Share) -> float:
    """What of an interval is nearest to 0."""
    return max(share.low, 0.0) or min(share.high, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest:
    """What the latest judgments of a project say."""

    by_person: dict[int, Care]
    seconds: float | None
    """The median of a label, without idle seconds."""


def read_care(
    connection: Connection,
    project: Project,
    gold: dict[int, tuple[int, int]],
    again: dict[int, Share],
    *,
    latest: int | None = LATEST,
) -> Latest:
    """`gold` is how many gold questions each person was right about, of how many; `again` their self-agreement. So many
    of the `latest` judgments are read, or all."""
    last = last_seq(connection, tables.judgment)
    judgments = connection.execute(_after(0 if latest is None else last - latest))
    rows = [row for row in judgments if row.project == project.id]
    labels = [row for row in rows if not row.is_gold and row.repeats is None]
    votes: dict[int, Counter[int]] = {}
    for row in labels:
        if row.outcome is not None:
            votes.setdefault(row.item, Counter())[sign(row.outcome)] += 1
    by_person: dict[int, list[Any]] = {}
    for row in rows:
        by_person.setdefault(row.person, []).append(row)
    people = {
        person: _care(own, votes, gold.get(person, (0, 0)), again.get(person)) for person, own in by_person.items()
    }
    spent = [row.seconds - row.idle_seconds for row in labels if row.seconds > 0]
    return Latest(by_person=people, seconds=median(spent) if spent else None)


def _after(seq: int) -> Any:
    """Of all projects: asked for one, a database would begin with all of its assignments."""
    judgment, assignment, item = tables.judgment, tables.assignment, tables.item
    later = judgment.alias("later")
    return (
        select(
            judgment.c.seq,
            judgment.c.verdict,
            judgment.c.outcome,
            judgment.c.seconds,
            judgment.c.idle_seconds,
            assignment.c.item,
            assignment.c.project,
            assignment.c.person,
            (type_coerce(assignment.c.order, Text) == _AS_STORED).label("is_as_stored"),
            assignment.c.is_right,
            item.c.is_gold,
            item.c.repeats,
            item.c.words,
        )
        .join(assignment, assignment.c.id == judgment.c.assignment)
        .join(item, item.c.id == assignment.c.item)
        .where(
            judgment.c.seq > seq,
            judgment.c.verdict.not_in(("skip", "undone", "decided")),
            ~exists().where(later.c.supersedes == judgment.c.seq),
        )
        .order_by(judgment.c.seq)
    )


def _care(rows: Sequence[Any], votes: dict[int, Counter[int]], gold: tuple[int, int], again: Share | None) -> Care:
    steps = [row for row in rows if row.verdict == "step"]
    sides = [_side(row) for row in steps if row.outcome]
    agrees = [agree for row in rows if (agree := _agrees(row, votes)) is not None]
    read = [
        words_a_minute(row.words, row.seconds - row.idle_seconds) > WORDS_A_MINUTE
        for row in rows
        if row.words and row.seconds > 0
    ]
    right, seen = gold
    return Care(
        bias=position_bias(sides.count("left"), sides.count("right")) if sides else None,
        ties=tie_share(len(steps) - len(sides), len(steps)) if steps else None,
        run=longest_side_run(sides) if sides else None,
        fast=share_of(sum(read), len(read)) if read else None,
        drift=drift(agrees, late=len(agrees) // 3) if len(agrees) >= _FEWEST_DRIFT else None,
        again=again,
        gold=gold_check(right, seen) if seen else None,
        since_good=len(since_good_gold(rows)),
    )


def _side(row: Any) -> str:
    """Which side was preferred, as it was shown."""
    return "left" if (row.outcome < 0) == row.is_as_stored else "right"


def _agrees(row: Any, votes: dict[int, Counter[int]]) -> bool | None:
    """Whether a label is that of most others on the item; None where there is none of others, or they are divided."""
    if row.outcome is None or row.is_gold or row.repeats is not None:
        return None
    own = sign(row.outcome)
    others = {side: count - (side == own) for side, count in votes[row.item].items()}
    most = max(others.values())
    favourites = [side for side, count in others.items() if count == most]
    return favourites[0] == own if most and len(favourites) == 1 else None


def items_since_good_gold(connection: Connection, project: Project, person: int) -> list[int]:
    """Items that a person labelled since their last block of gold that was good enough: all of them where no block was,
    none of who has had no gold."""
    assignment = tables.assignment
    mine = _after(0).where(assignment.c.project == project.id, assignment.c.person == person)
    rows = connection.execute(mine).all()
    return [row.item for row in since_good_gold(rows)] if any(row.is_right is not None for row in rows) else []


def since_good_gold(rows: Sequence[Any]) -> list[Any]:
    """Labels after the last gold question at which the latest eight had been right often enough."""
    outcomes: list[int] = []
    labels: list[Any] = []
    for row in rows:
        if row.is_right is None:
            labels += [row] if row.repeats is None else []
            continue
        outcomes.append(row.is_right)
        block = outcomes[-FEWEST_GOLD:]
        if sum(block) >= GOLD_ACCURACY * len(block):
            labels = []
    return labels
