"""The audit in a terminal: one table of files, one of lengths, then the findings, worst first."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kedge.core.findings import Finding, Level
from kedge.data.auditing.result import Audit, FileAudit

_STYLES: dict[Level, str] = {"fatal": "bold red", "warning": "yellow", "info": "cyan", "ok": "green"}

_NAME_WIDTH = 23
_WORDS: dict[Level, str] = {"fatal": "fatal", "warning": "warnings", "info": "notes", "ok": "checks passed"}


def render_terminal(audit: Audit) -> RenderableType:
    """What fits on one screen for one file; the HTML page has the rest."""
    blocks: list[RenderableType] = [Text(audit.folder, style="dim")] if audit.folder else []
    blocks += [*(_read_as(audit, file) for file in audit.files), Text()]
    blocks += [_files(audit), Text(), _lengths(audit), Text()]
    blocks += [_finding(audit, finding) for finding in audit.findings if finding.level != "ok"]
    blocks.append(_counts(audit))
    return Group(*blocks)


def _name(audit: Audit, file: FileAudit) -> str:
    part = "" if file.part == "train" else f" ({'held out' if file.part == 'heldout' else file.part})"
    return audit.shortened(file.file) + part


def _read_as(audit: Audit, file: FileAudit) -> Text:
    """What a file was taken for, in a line of its own: names of files are long, and tables are 80 columns wide."""
    text = Text(f"{_name(audit, file)}: {file.kind or 'nothing'}, read as {file.format}")
    if file.without:
        text.append(f"; {file.without:,} rows hold none (ties, say)")
    if file.note:
        text.append(f"\n  {file.note}", style="dim")
    return text


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 1 else "right", no_wrap=True)
    return table


def _short(name: str) -> str:
    """A name that fits into a table; its end says more than its middle.

    >>> _short("a-very-long-name-of-a-file.heldout.jsonl")
    'a-very-lo…heldout.jsonl'
    """
    return name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 14]}…{name[-13:]}"


def _files(audit: Audit) -> Table:
    table = _table("file", "items", "broken", "prompts", "near", "longer wins")
    for file in audit.files:
        table.add_row(
            Text(_short(_name(audit, file))),
            f"{file.items:,}",
            f"{file.broken:,}",
            f"{file.prompts:,}",
            f"{file.near_prompts.clustered:,}",
            longer_wins(file),
        )
    return table


def longer_wins(file: FileAudit) -> str:
    """The share with its 95 % interval, short enough for a cell."""
    wins = file.longer_wins
    if wins is None or not wins.wins + wins.losses:
        return "–"
    return f"{wins.share * 100:.1f} % ({wins.low * 100:.1f}–{wins.high * 100:.1f})"


def _lengths(audit: Audit) -> Table:
    table = _table("file", "side", "unit", "mean", "p5", "p50", "p95", "max")
    for file in audit.files:
        for lengths in file.lengths:
            if lengths.unit == "words":
                continue
            numbers = (lengths.p5, lengths.p50, lengths.p95, lengths.max)
            table.add_row(
                Text(_short(audit.shortened(file.file))),
                lengths.side,
                "chars" if lengths.unit == "characters" else lengths.unit,
                f"{lengths.mean:,.1f}",
                *(f"{number:,}" for number in numbers),
            )
    return table


def _finding(audit: Audit, finding: Finding) -> Table:
    """Level and words in two columns, so that long lines wrap below their own beginning. Contents of files are shown
    as plain text: square brackets in them are not markup."""
    text = Text(audit.shortened(finding.message))
    text.append(f"  {finding.code}", style="dim")
    if finding.where:
        text.append(f"\n{_places(audit.shortened(finding.where))}", style="dim")
    if finding.fix and finding.level != "info":
        text.append(f"\n→ {finding.fix}")
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=7, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(finding.level, style=_STYLES[finding.level]), text)
    return grid


def _places(where: str) -> str:
    """Lines of one file, with its name once.

    >>> _places("a.jsonl:5, a.jsonl:42, …"), _places("a.jsonl:5 (cut off), a.jsonl:7 (cut off)")
    ('a.jsonl: lines 5, 42, …', 'a.jsonl:5 (cut off), a.jsonl:7 (cut off)')
    """
    first, *rest = where.split(", ")
    file, colon, line = first.rpartition(":")
    lines = [place.removeprefix(f"{file}:") for place in rest]
    if not (colon and line.isdigit() and rest and all(other.isdigit() or other == "…" for other in lines)):
        return where
    return f"{file}: lines {', '.join([line, *lines])}"


def _counts(audit: Audit) -> Text:
    """How many findings there are of each level, in one line."""
    text = Text("\n")
    for level, word in _WORDS.items():
        count = sum(finding.level == level for finding in audit.findings)
        if count:
            text.append(f"{count} {word[:-1] if count == 1 and word.endswith('s') else word}  ", style=_STYLES[level])
    return text
