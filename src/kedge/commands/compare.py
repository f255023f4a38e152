"""`kedge compare`: folders of runs in; a table, a page, or both as JSON out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from kedge.core.files import write_text
from kedge.report.compare.entries import Entry, read_entries
from kedge.report.compare.page import best_of_points, course, render_comparison
from kedge.report.compare.table import rows_of, table_lines, table_of
from kedge.report.writing import run_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    entries: tuple[Entry, ...]

    def lines(self, width: int | None = None) -> list[str]:
        """The table, and below it what it cannot say by itself. On a screen of `width` letters no line is broken."""
        table = table_of(rows_of(self.entries), self.entries, with_intervals=False)
        notes = [wrap(f"  {note}", width, subsequent_indent="    ") if width else [f"  {note}"] for note in table.notes]
        return [*table_lines(table, width), *(line for note in notes for line in note)]

    def as_dict(self) -> dict[str, Any]:
        """Every number with its interval and source, and the lines of the charts as (KL, score)."""
        rows = rows_of(self.entries)
        return {
            "runs": [row.as_dict() for row in rows],
            "notes": list(table_of(rows, self.entries, with_intervals=False).notes),
            "curves": {
                entry.label: {
                    source: {"training": course(entry, source), "best_of": best_of_points(entry, source)}
                    for source in ("reward", "gold")
                }
                for entry in self.entries
            },
        }

    def write_page(self, to: Path) -> Path:
        """Write the page, as a whole or not at all."""
        page = render_comparison(self.entries)
        to.parent.mkdir(parents=True, exist_ok=True)
        write_text(to, page)
        return to


def compare_runs(runs: Sequence[Path]) -> Comparison:
    """Read everything; a folder that is no run is an error that says what was probably meant."""
    return Comparison(entries=tuple(read_entries([run_folder(run) for run in runs])))
