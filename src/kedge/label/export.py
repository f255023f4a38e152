"""Exports: what people said up to a number, as Kedge's own data. The same number gives the same bytes for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal, get_args

from sqlalchemy import Connection, Row, insert, select

from kedge.core.errors import ConfigError, DataError
from kedge.core.files import hash_json, refuse_overwriting
from kedge.core.suggest import did_you_mean
from kedge.data.converting import to_fields
from kedge.data.examples import Demonstration, Example, Messages, Origin, Pair, Prompt, Ranking, Thumb
from kedge.data.writing import encode, row_writer
from kedge.feedback.steps import Margins
from kedge.label import tables
from kedge.label.accounts import pseudonym
from kedge.label.audit import last_seq, note
from kedge.label.beliefs import Beliefs, decisions, effective, read_beliefs
from kedge.label.database import Store
from kedge.label.projects import Project
from kedge.label.settle import SETTLES, Settled, SettleKind, sign
from kedge.label.texts import read_texts

ExampleKind = Literal["pairs", "rankings", "thumbs", "demonstrations"]
EXPORTS: tuple[ExampleKind, ...] = get_args(ExampleKind)
"""What training reads."""
ExportKind = Literal["pairs", "rankings", "thumbs", "demonstrations", "verdicts"]
EXPORT_KINDS: tuple[ExportKind, ...] = get_args(ExportKind)
"""With what `kedge judge trust` measures judges by: the verdict of every person on every pair."""
Ties = Literal["drop", "half"]
TIES: tuple[Ties, ...] = get_args(Ties)
_BATCH = 500
_NOWHERE = Origin("", 0)
_LARGE = 3
"""Times a small margin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settling:
    """How labels become examples. `ties: half` writes a tie as a pair of certainty ½, which `drop` leaves out;
    `margins: large` are 3, 2, 1 for the steps, small ones a third of that."""

    settle: SettleKind = "majority"
    ties: Ties = "drop"
    margins: Margins = "small"

    def __post_init__(self) -> None:
        for name, value, known in (("settle", self.settle, SETTLES), ("ties", self.ties, TIES)):
            if value not in known:
                raise ConfigError(
                    f"{name} {value}: there is no such way{did_you_mean(value, known)}; {', '.join(known)}"
                )

    def changed(self) -> dict[str, str]:
        """What is not as by default."""
        usual = Settling()
        return {name: value for name, value in asdict(self).items() if value != getattr(usual, name)}


USUAL = Settling()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written. `left_out` counts the items without a row, by why."""

    rows: int
    as_of: int
    hash: str
    left_out: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Labelled:
    """An item with its judgments that count."""

    item: Row[Any]
    judgments: Sequence[Row[Any]]
    prompt: Messages = ()
    answers: Sequence[Messages] = ()
    models: Sequence[str | None] = ()
    edits: Mapping[str, Messages] = field(default_factory=dict[str, Messages])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Export:
    """What is exported: of these items alone where there are any, and how."""

    kind: ExportKind
    as_of: int
    heldout: bool
    items: frozenset[int] | None
    settling: Settling
    beliefs: Beliefs
    left_out: Counter[str] = field(default_factory=Counter[str])


def export_labels(
    store: Store,
    project: Project,
    out: Path,
    *,
    kind: str = "pairs",
    as_of: int | None = None,
    heldout: bool = False,
    settling: Settling = USUAL,
    items: Collection[int] | None = None,
    force: bool = False,
    who: int | None = None,
) -> Exported:
    """Write the labels of a project up to judgment `as_of` (else all) as examples of `kind`.

    Gold is left out. Held-out items are written with `heldout` only, and then nothing else. `items` are the numbers of
    those that are written, else all are.
    """
    if kind not in EXPORT_KINDS:
        known = ", ".join(EXPORT_KINDS)
        raise ConfigError(f"--as {kind}: there is no such kind{did_you_mean(kind, EXPORT_KINDS)}; {known}")
    refuse_overwriting([out], force=force)
    last = store.read(lambda connection: last_seq(connection, tables.judgment))
    number = last if as_of is None else as_of
    if not 0 <= number <= last:
        raise ConfigError(f"--as-of {number}: the last judgment has number {last}")
    digest, left_out, rows = blake2b(digest_size=16), Counter[str](), 0
    chosen: dict[str, Any] = {"as": kind, "heldout": heldout, **settling.changed()}
    if items is not None:
        chosen["items"] = hash_json(sorted(items))

    def write_all(connection: Connection) -> None:
        nonlocal rows, left_out
        asked = _Export(
            kind=kind,
            as_of=number,
            heldout=heldout,
            items=None if items is None else frozenset(items),
            settling=settling,
            beliefs=read_beliefs(connection, project, number, settling.settle),
        )
        for row in _rows(connection, project, asked):
            write(row)
            digest.update(encode(row) + b"\n")
            rows += 1
        left_out = asked.left_out

    with row_writer(out) as write:
        store.read(write_all)
        sealed = digest.hexdigest()
        _record(store, project, sealed, number, chosen, who)
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


def _rows(connection: Connection, project: Project, asked: _Export) -> Iterator[dict[str, Any]]:
    if asked.kind == "verdicts":
        yield from _verdict_rows(connection, project, asked)
        return
    make = _MAKERS[asked.kind]
    labelled_items = read_labelled(
        connection,
        project,
        asked.as_of,
        heldout=asked.heldout,
        items=asked.items,
        is_decided=asked.kind != "demonstrations",
    )
    for labelled in labelled_items:
        for example, settled, judgments in make(labelled, asked):
            people = sorted({pseudonym(project, judgment.uid) for judgment in judgments})
            about = {
                **({} if settled is None else {"certainty": settled.certainty, "consistent": settled.consistent}),
                "labels": len(judgments),
                "people": people,
                "round": labelled.item.round,
                "as_of": asked.as_of,
                **({"decided": True} if any(row.verdict == "decided" for row in judgments) else {}),
                **({} if labelled.item.propensity is None else {"propensity": labelled.item.propensity}),
            }
            yield to_fields(example) | about


def read_labelled(
    connection: Connection,
    project: Project,
    as_of: int,
    *,
    heldout: bool | None = None,
    items: Collection[int] | None = None,
    is_decided: bool = False,
) -> Iterator[Labelled]:
    """The items that have judgments, with their texts, by number; held-out ones, the others, or both. With
    `is_decided`, what a reviewer decided stands in place of the votes."""
    query = effective(project, as_of)
    decided = decisions(connection, project, as_of) if is_decided else {}
    if heldout is not None:
        query = query.where(tables.item.c.is_heldout == heldout)
    with connection.execute(query.execution_options(yield_per=10_000)) as judgments:
        groups = (
            (number, [decided[number]] if number in decided else list(group))
            for number, group in groupby(judgments, key=lambda row: row.item)
            if items is None or number in items
        )
        while batch := list(islice(groups, _BATCH)):
            yield from _with_texts(connection, batch)


def _with_texts(connection: Connection, batch: Sequence[tuple[int, Sequence[Row[Any]]]]) -> Iterator[Labelled]:
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
        yield Labelled(
            items[number],
            judgments,
            prompt=texts[items[number].prompt],
            answers=[texts[row.text] for row in answers[number]],
            models=[row.model for row in answers[number]],
            edits={row.edit: texts[row.edit] for row in judgments if row.edit is not None},
        )


_Made = Iterator[tuple[Example, Settled | None, Sequence[Row[Any]]]]
"""Each example with the vote on it, and the judgments that it comes from."""


def _pairs(labelled: Labelled, asked: _Export) -> _Made:
    if labelled.item.kind == "rank":
        for first, second, settled in asked.beliefs.of_ranking(labelled.judgments):
            yield from _pair(labelled, (first, second), settled, asked, has_margin=False)
    elif (settled := _settled_pair(labelled, asked)) is not None:
        yield from _pair(labelled, (0, 1), settled, asked, axes=_axes(labelled.judgments))


def _pair(
    labelled: Labelled,
    places: tuple[int, int],
    settled: Settled,
    asked: _Export,
    *,
    has_margin: bool = True,
    axes: Mapping[str, float] | None = None,
) -> _Made:
    is_tie = settled.better is None
    if is_tie and asked.settling.ties == "drop":
        asked.left_out["ties"] += 1
        return
    chosen = settled.better or 0
    better, worse = (places[chosen], places[1 - chosen])
    sides = {"chosen": better, "rejected": worse}
    extra: dict[str, Any] = {
        f"{side}_model": model for side, place in sides.items() if (model := labelled.models[place]) is not None
    }
    if axes:
        extra["axes"] = {name: value if chosen else -value for name, value in axes.items()}
    scale = _LARGE if asked.settling.margins == "large" else 1
    pair = Pair(
        prompt=labelled.prompt,
        chosen=labelled.answers[better],
        rejected=labelled.answers[worse],
        margin=scale * settled.margin if has_margin and not is_tie else None,
        origin=_NOWHERE,
        extra=extra,
    )
    yield pair, settled, labelled.judgments


def _settled_pair(labelled: Labelled, asked: _Export) -> Settled | None:
    """The vote on a pair; None where it is none, or where both answers are bad."""
    if labelled.item.kind != "pair":
        asked.left_out[f"of another kind ({labelled.item.kind})"] += 1
        return None
    settled = asked.beliefs.of_pair(labelled.judgments)
    if settled is None:
        asked.left_out["both bad"] += 1
    return settled


def _axes(judgments: Sequence[Row[Any]]) -> dict[str, float]:
    """The mean step on each axis over 3, towards the second answer."""
    names = sorted({name for row in judgments for name in row.axes or {}})
    steps = {name: [row.axes[name] for row in judgments if name in (row.axes or {})] for name in names}
    return {name: sum(values) / (3 * len(values)) for name, values in steps.items()}


def _rankings(labelled: Labelled, asked: _Export) -> _Made:
    settled: Settled | None = None
    if labelled.item.kind == "rank":
        rank = asked.beliefs.ranks_of(labelled.judgments)
    else:
        settled = _settled_pair(labelled, asked)
        if settled is None:
            return
        rank = (1, 1) if settled.better is None else (1, 2) if settled.better == 0 else (2, 1)
    extra = {"models": list(labelled.models)} if any(labelled.models) else {}
    ranking = Ranking(prompt=labelled.prompt, answers=tuple(labelled.answers), rank=rank, origin=_NOWHERE, extra=extra)
    yield ranking, settled, labelled.judgments


def _thumbs(labelled: Labelled, asked: _Export) -> _Made:
    if labelled.item.kind != "thumb":
        asked.left_out[f"of another kind ({labelled.item.kind})"] += 1
        return
    settled = asked.beliefs.of_thumb(labelled.judgments)
    if settled.better is None:
        asked.left_out["as many up as down"] += 1
        return
    (answer,) = labelled.answers
    is_good = settled.better == 1
    yield (
        Thumb(prompt=labelled.prompt, answer=answer, is_good=is_good, origin=_NOWHERE),
        settled,
        labelled.judgments,
    )


def _demonstrations(labelled: Labelled, asked: _Export) -> _Made:
    written = [row for row in labelled.judgments if row.edit is not None]
    if not written:
        asked.left_out["without a written answer"] += 1
    for row in written:
        yield Demonstration(messages=labelled.prompt + labelled.edits[row.edit], origin=_NOWHERE), None, [row]


def _verdict_rows(connection: Connection, project: Project, asked: _Export) -> Iterator[dict[str, Any]]:
    """Every pair with what each person said of it, nameless; both bad is a tie, and machines are no people."""
    for labelled in read_labelled(connection, project, asked.as_of, heldout=asked.heldout, items=asked.items):
        if labelled.item.kind != "pair":
            asked.left_out[f"of another kind ({labelled.item.kind})"] += 1
            continue
        human = [row for row in labelled.judgments if row.role != "machine"]
        if not human:
            asked.left_out["labelled by machines alone"] += 1
            continue
        first, second = ("\n".join(message.content for message in answer) for answer in labelled.answers)
        yield {
            "id": str(labelled.item.id),
            **to_fields(Prompt(prompt=labelled.prompt, origin=_NOWHERE)),
            "first": first,
            "second": second,
            "verdicts": {pseudonym(project, row.uid): _SIDES[sign(row.outcome or 0)] for row in human},
            **({"models": list(labelled.models)} if any(labelled.models) else {}),
            "round": labelled.item.round,
            "as_of": asked.as_of,
        }


_SIDES = {-1: "first", 0: "tie", 1: "second"}
_MAKERS: Mapping[ExampleKind, Callable[[Labelled, _Export], _Made]] = {
    "pairs": _pairs,
    "rankings": _rankings,
    "thumbs": _thumbs,
    "demonstrations": _demonstrations,
}
