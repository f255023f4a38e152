"""Exports: what people said up to a number, as Kedge's own data. The same number gives the same bytes for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal, get_args

from sqlalchemy import Connection, Row, exists, insert, select, text

from kedge.core.errors import ConfigError, DataError
from kedge.core.files import refuse_overwriting
from kedge.core.suggest import did_you_mean
from kedge.data.converting import to_fields
from kedge.data.examples import Demonstration, Example, Messages, Origin, Pair, Ranking, Thumb
from kedge.data.writing import encode, row_writer
from kedge.label import tables
from kedge.label.accounts import pseudonym
from kedge.label.audit import last_seq, note
from kedge.label.database import Store
from kedge.label.projects import Project
from kedge.label.settle import Settled, settle_pairs, settle_ranks, settle_steps
from kedge.label.texts import read_texts

ExportKind = Literal["pairs", "rankings", "thumbs", "demonstrations"]
EXPORTS: tuple[ExportKind, ...] = get_args(ExportKind)
_BATCH = 500
_NOWHERE = Origin("", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written. `left_out` counts the items without a row, by why."""

    rows: int
    as_of: int
    hash: str
    left_out: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Labelled:
    """An item with its judgments that count."""

    item: Row[Any]
    judgments: Sequence[Row[Any]]
    prompt: Messages = ()
    answers: Sequence[Messages] = ()
    models: Sequence[str | None] = ()
    edits: Mapping[str, Messages] = field(default_factory=dict[str, Messages])


def export_labels(
    store: Store,
    project: Project,
    out: Path,
    *,
    kind: str = "pairs",
    as_of: int | None = None,
    heldout: bool = False,
    force: bool = False,
    who: int | None = None,
) -> Exported:
    """Write the labels of a project up to judgment `as_of` (else all) as examples of `kind`.

    Gold is left out. Held-out items are written with `heldout` only, and then nothing else.
    """
    if kind not in EXPORTS:
        raise ConfigError(f"--as {kind}: there is no such kind{did_you_mean(kind, EXPORTS)}; {', '.join(EXPORTS)}")
    refuse_overwriting([out], force=force)
    last = store.read(lambda connection: last_seq(connection, tables.judgment))
    number = last if as_of is None else as_of
    if not 0 <= number <= last:
        raise ConfigError(f"--as-of {number}: the last judgment has number {last}")
    digest, left_out, rows = blake2b(digest_size=16), Counter[str](), 0

    def write_all(connection: Connection) -> None:
        nonlocal rows
        for row in _rows(connection, project, kind, number, heldout, left_out):
            write(row)
            digest.update(encode(row) + b"\n")
            rows += 1

    with row_writer(out) as write:
        store.read(write_all)
        sealed = digest.hexdigest()
        _record(store, project, sealed, number, {"as": kind, "heldout": heldout}, who)
    return Exported(rows=rows, as_of=number, hash=sealed, left_out=dict(left_out))


def _record(
    store: Store, project: Project, digest: str, as_of: int, chosen: Mapping[str, Any], who: int | None
) -> None:
    """Note the export; one of the same labels with other bytes means that the store was tampered with."""

    def work(connection: Connection) -> None:
        table = tables.export
        earlier = connection.execute(
            select(table.c.hash, table.c.filter).where(table.c.project == project.id, table.c.as_of == as_of)
        ).all()
        for before in earlier:
            if before.filter == chosen and before.hash != digest:
                raise DataError(
                    f"{project.name} as of {as_of}: an earlier export of the same labels had hash {before.hash}, this "
                    f"one has {digest}; the store was changed. `kedge label status {project.name} --verify` looks where"
                )
        values = {"project": project.id, "hash": digest, "as_of": as_of, "filter": dict(chosen)}
        connection.execute(insert(table).values(**values, who=who, at=store.now()))
        about = {"project": project.name, "hash": digest, "as_of": as_of, **chosen}
        note(store, connection, "export", about, who=who)

    store.write(work)


def _rows(
    connection: Connection, project: Project, kind: ExportKind, as_of: int, heldout: bool, left_out: Counter[str]
) -> Iterator[dict[str, Any]]:
    make = _MAKERS[kind]
    for labelled in _labelled(connection, project, as_of, heldout, is_written=kind == "demonstrations"):
        for example, settled, judgments in make(labelled, left_out):
            people = sorted({pseudonym(project, judgment.uid) for judgment in judgments})
            about = {
                **({} if settled is None else {"certainty": settled.certainty, "consistent": settled.consistent}),
                "labels": len(judgments),
                "people": people,
                "round": labelled.item.round,
                "as_of": as_of,
                **({"decided": True} if any(row.verdict == "decided" for row in judgments) else {}),
                **({} if labelled.item.propensity is None else {"propensity": labelled.item.propensity}),
            }
            yield to_fields(example) | about


def effective(project: Project, as_of: int) -> Any:
    """The judgments of a project up to a number that nothing up to it supersedes, by item; skips are none.

    What a reviewer decided is not among them: `decisions` has it.
    """
    return _standing(project, as_of).where(tables.judgment.c.verdict.not_in(("skip", "undone", "decided")))


def decisions(connection: Connection, project: Project, as_of: int) -> dict[int, Row[Any]]:
    """What a reviewer has decided, by item; the last one counts."""
    # As words and not as a value: an index of few rows is chosen by them.
    query = _standing(project, as_of).where(text("judgment.verdict = 'decided'"))
    return {row.item: row for row in connection.execute(query)}


def _standing(project: Project, as_of: int) -> Any:
    judgment, assignment, item, person = tables.judgment, tables.assignment, tables.item, tables.person
    later = judgment.alias("later")
    return (
        select(judgment, assignment.c.item, assignment.c.order, assignment.c.person, person.c.uid)
        .join(assignment, assignment.c.id == judgment.c.assignment)
        .join(item, item.c.id == assignment.c.item)
        .join(person, person.c.id == assignment.c.person)
        .where(
            assignment.c.project == project.id,
            judgment.c.seq <= as_of,
            ~item.c.is_gold,
            ~exists().where(later.c.supersedes == judgment.c.seq, later.c.seq <= as_of),
        )
        .order_by(item.c.id, judgment.c.seq)
    )


def _labelled(
    connection: Connection, project: Project, as_of: int, heldout: bool, *, is_written: bool
) -> Iterator[_Labelled]:
    """Items with the judgments that count: a reviewer's decision in place of votes, but not of what people wrote."""
    query = effective(project, as_of).where(tables.item.c.is_heldout == heldout)
    decided = {} if is_written else decisions(connection, project, as_of)
    with connection.execute(query.execution_options(yield_per=10_000)) as judgments:
        groups = (
            (number, [decided[number]] if number in decided else list(group))
            for number, group in groupby(judgments, key=lambda row: row.item)
        )
        while batch := list(islice(groups, _BATCH)):
            yield from _with_texts(connection, batch)


def _with_texts(connection: Connection, batch: Sequence[tuple[int, Sequence[Row[Any]]]]) -> Iterator[_Labelled]:
    numbers = [number for number, _ in batch]
    items = {row.id: row for row in connection.execute(select(tables.item).where(tables.item.c.id.in_(numbers)))}
    answers: dict[int, list[Row[Any]]] = {number: [] for number in numbers}
    by_place = select(tables.answer).where(tables.answer.c.item.in_(numbers)).order_by(tables.answer.c.place)
    for row in connection.execute(by_place):
        answers[row.item].append(row)
    edits = [row.edit for _, judgments in batch for row in judgments if row.edit is not None]
    hashes = [
        *edits,
        *(row.prompt for row in items.values()),
        *(row.text for group in answers.values() for row in group),
    ]
    texts = read_texts(connection, hashes)
    for number, judgments in batch:
        yield _Labelled(
            items[number],
            judgments,
            prompt=texts[items[number].prompt],
            answers=[texts[row.text] for row in answers[number]],
            models=[row.model for row in answers[number]],
            edits={row.edit: texts[row.edit] for row in judgments if row.edit is not None},
        )


_Made = Iterator[tuple[Example, Settled | None, Sequence[Row[Any]]]]
"""Each example with the vote on it, and the judgments that it comes from."""


def _pairs(labelled: _Labelled, left_out: Counter[str]) -> _Made:
    if labelled.item.kind == "rank":
        for first, second, settled in settle_pairs([row.ranking for row in labelled.judgments]):
            yield from _pair(labelled, (first, second), settled, left_out, has_margin=False)
    elif (steps := _steps(labelled, left_out)) is not None:
        axes = _axes(labelled.judgments)
        yield from _pair(labelled, (0, 1), settle_steps(steps), left_out, axes=axes)


def _pair(
    labelled: _Labelled,
    places: tuple[int, int],
    settled: Settled,
    left_out: Counter[str],
    *,
    has_margin: bool = True,
    axes: Mapping[str, float] | None = None,
) -> _Made:
    if settled.better is None:
        left_out["ties"] += 1
        return
    better, worse = (places[settled.better], places[1 - settled.better])
    sides = {"chosen": better, "rejected": worse}
    extra: dict[str, Any] = {
        f"{side}_model": model for side, place in sides.items() if (model := labelled.models[place]) is not None
    }
    if axes:
        extra["axes"] = {name: value if settled.better else -value for name, value in axes.items()}
    pair = Pair(
        prompt=labelled.prompt,
        chosen=labelled.answers[better],
        rejected=labelled.answers[worse],
        margin=settled.margin if has_margin else None,
        origin=_NOWHERE,
        extra=extra,
    )
    yield pair, settled, labelled.judgments


def _steps(labelled: _Labelled, left_out: Counter[str]) -> list[int] | None:
    """The votes on a pair; None where it is none, or where at least half of the people call both answers bad. Who says
    so, and is outvoted, prefers neither."""
    if labelled.item.kind != "pair":
        left_out[f"of another kind ({labelled.item.kind})"] += 1
        return None
    both_bad = sum(row.outcome is None for row in labelled.judgments)
    if 2 * both_bad >= len(labelled.judgments):
        left_out["both bad"] += 1
        return None
    return [0 if row.outcome is None else row.outcome for row in labelled.judgments]


def _axes(judgments: Sequence[Row[Any]]) -> dict[str, float]:
    """The mean step on each axis over 3, towards the second answer."""
    names = sorted({name for row in judgments for name in row.axes or {}})
    steps = {name: [row.axes[name] for row in judgments if name in (row.axes or {})] for name in names}
    return {name: sum(values) / (3 * len(values)) for name, values in steps.items()}


def _rankings(labelled: _Labelled, left_out: Counter[str]) -> _Made:
    settled: Settled | None = None
    if labelled.item.kind == "rank":
        rank = settle_ranks([row.ranking for row in labelled.judgments])
    else:
        steps = _steps(labelled, left_out)
        if steps is None:
            return
        settled = settle_steps(steps)
        rank = (1, 1) if settled.better is None else (1, 2) if settled.better == 0 else (2, 1)
    extra = {"models": list(labelled.models)} if any(labelled.models) else {}
    ranking = Ranking(prompt=labelled.prompt, answers=tuple(labelled.answers), rank=rank, origin=_NOWHERE, extra=extra)
    yield ranking, settled, labelled.judgments


def _thumbs(labelled: _Labelled, left_out: Counter[str]) -> _Made:
    if labelled.item.kind != "thumb":
        left_out[f"of another kind ({labelled.item.kind})"] += 1
        return
    settled = settle_steps([row.outcome for row in labelled.judgments])
    if settled.better is None:
        left_out["as many up as down"] += 1
        return
    (answer,) = labelled.answers
    is_good = settled.better == 1
    yield (
        Thumb(prompt=labelled.prompt, answer=answer, is_good=is_good, origin=_NOWHERE),
        settled,
        labelled.judgments,
    )


def _demonstrations(labelled: _Labelled, left_out: Counter[str]) -> _Made:
    written = [row for row in labelled.judgments if row.edit is not None]
    if not written:
        left_out["without a written answer"] += 1
    for row in written:
        yield Demonstration(messages=labelled.prompt + labelled.edits[row.edit], origin=_NOWHERE), None, [row]


_MAKERS: Mapping[ExportKind, Callable[[_Labelled, Counter[str]], _Made]] = {
    "pairs": _pairs,
    "rankings": _rankings,
    "thumbs": _thumbs,
    "demonstrations": _demonstrations,
}
