"""Exports for other tools, and recognising theirs: `argilla`, `label-studio`, `csv`, `datasets`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

from sqlalchemy import Connection

from kedge.core.errors import ConfigError, DataError
from kedge.core.files import refuse_overwriting, write_text
from kedge.data.sources import rows
from kedge.label import tables
from kedge.label.audit import last_seq, note
from kedge.label.database import Store
from kedge.label.exchange import argilla, label_studio
from kedge.label.exchange.records import Foreign, PersonLabel, Unsaid, read_out
from kedge.label.export import USUAL, Labelled, Settling, export_labels
from kedge.label.projects import Project

Tool = Literal["argilla", "label-studio", "csv", "datasets"]
TOOLS: tuple[Tool, ...] = get_args(Tool)
_COLUMNS = ("item", "prompt", "person", "kind", "verdict", "label", "seconds", "heldout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What was written: items and labels; and what the other side cannot say, counted and by name."""

    items: int
    labels: int
    as_of: int
    unsaid: Mapping[str, int]
    cannot: Sequence[str]


def read_foreign(source: str) -> Foreign | None:
    """The labels in a file of another tool; None where it is none."""
    sample = list(islice(rows(source), 1))
    fields = (sample[0].fields or {}) if sample else {}
    if argilla.is_argilla(fields):
        return argilla.read_argilla(rows(source))
    if label_studio.is_label_studio(fields):
        return label_studio.read_label_studio(rows(source))
    return None


def send_out(
    store: Store,
    project: Project,
    out: Path,
    tool: Tool,
    *,
    as_of: int | None = None,
    heldout: bool = False,
    settling: Settling = USUAL,
    force: bool = False,
) -> Sent:
    """Write the labels of a project for another tool. `datasets` is a folder of settled pairs, the others have the
    labels of each person."""
    if tool == "datasets":
        return _dataset(store, project, out, as_of=as_of, heldout=heldout, settling=settling, force=force)
    wanted = ".csv" if tool == "csv" else ".json"
    if out.suffix != wanted:
        raise ConfigError(f"{out}: --as {tool} writes {wanted}; give the file that name")
    refuse_overwriting([out], force=force)
    last = store.read(lambda connection: last_seq(connection, tables.judgment))
    number = last if as_of is None else as_of
    if not 0 <= number <= last:
        raise ConfigError(f"--as-of {number}: the last judgment has number {last}")
    unsaid = Unsaid()

    def read(connection: Connection) -> list[tuple[Labelled, list[PersonLabel]]]:
        return list(read_out(connection, project, number, heldout=heldout))

    items = store.read(read)
    match tool:
        case "argilla":
            records = [argilla.argilla_record(own, labels) for own, labels in items]
            write_text(out, json.dumps(records, ensure_ascii=False, indent=1) + "\n")
            cannot: Sequence[str] = argilla.CANNOT
        case "label-studio":
            tasks = [label_studio.label_studio_task(own, labels, unsaid) for own, labels in items]
            write_text(out, json.dumps(tasks, ensure_ascii=False, indent=1) + "\n")
            cannot = label_studio.CANNOT
        case "csv":
            write_text(out, _csv(items))
            cannot = ("texts", "axes", "reasons", "edits")
    store.write(
        lambda connection: note(store, connection, "send", {"project": project.name, "as": tool, "as_of": number})
    )
    labels = sum(len(own) for _, own in items)
    return Sent(items=len(items), labels=labels, as_of=number, unsaid=dict(unsaid), cannot=cannot)


def _csv(items: Sequence[tuple[Labelled, list[PersonLabel]]]) -> str:
    """A row a label: for tools that compute agreement, which want items, people and labels."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for labelled, labels in items:
        for label in labels:
            decision = label.decision
            said: Any = decision.outcome if decision.ranking is None else " ".join(map(str, decision.ranking))
            writer.writerow(
                [
                    labelled.item.key,
                    labelled.item.prompt,
                    label.person,
                    labelled.item.kind,
                    decision.verdict,
                    "" if said is None else said,
                    decision.seconds,
                    int(labelled.item.is_heldout),
                ]
            )
    return file.getvalue()


def _dataset(
    store: Store,
    project: Project,
    out: Path,
    *,
    as_of: int | None,
    heldout: bool,
    settling: Settling,
    force: bool,
) -> Sent:
    """A folder that `datasets.load_from_disk` opens, and `kedge data` too."""
    if out.exists() and any(out.iterdir()) and not force:
        raise DataError(f"{out}: there is something in it; choose another folder, or --force")
    from datasets import Dataset

    with TemporaryDirectory() as folder:
        file = Path(folder) / "pairs.parquet"
        exported = export_labels(store, project, file, as_of=as_of, heldout=heldout, settling=settling)
        if not exported.rows:
            raise DataError(f"{project.name}: there are no pairs to write")
        Dataset.from_parquet(str(file), cache_dir=folder).save_to_disk(str(out))  # pyright: ignore[reportAttributeAccessIssue]
    return Sent(
        items=exported.rows,
        labels=exported.rows,
        as_of=exported.as_of,
        unsaid=dict(exported.left_out),
        cannot=("labels of single people",),
    )
