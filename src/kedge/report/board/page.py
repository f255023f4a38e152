"""A board as one page that opens anywhere, without a network. Everything that comes from data is escaped.

Nothing is fetched and no script runs but the page's own: `default-src 'none'`, with a nonce for style and script.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from kedge.report.board.charts import proxy_plot, tax_plot
from kedge.report.board.records import Board, Cell, Change, Column, Difference, GroupTable, League
from kedge.report.charts import svg
from kedge.report.pages import asset, render_page
from kedge.report.words import NONE, number


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCell:
    """A cell in words. `mark` and `change` are empty where nothing is compared."""

    value: str
    interval: str
    change: str
    mark: str
    kind: Change | None
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedBoard:
    """What a board knows of the application that serves it: lost items can be sent to people, and become badcases."""

    nonce: str
    csrf: str
    project: str
    """Where they are sent."""
    sends: bool = False
    """Whether who looks at it may send items to people."""
    adds_badcases: bool = False
    """Whether they may make badcases."""


def render_board(board: Board, hosted: HostedBoard | None = None) -> str:
    """The page; `hosted` where it is served and not a file."""
    main = [place for place, column in enumerate(board.columns) if column.is_main]
    others = [place for place, column in enumerate(board.columns) if not column.is_main]
    tax = tax_plot(board)
    return render_page(
        "kedge.report.board",
        "page.html.j2",
        board=board,
        topics=_topics([board.columns[place] for place in main]),
        columns=[board.columns[place] for place in main],
        rows=[[shown_cell(board, row, place) for place in main] for row in range(len(board.models))],
        others=[board.columns[place] for place in others],
        other_rows=[[shown_cell(board, row, place) for place in others] for row in range(len(board.models))],
        counts=_counts(board),
        group_fields=_group_fields(board),
        group_cell=group_cell,
        percent_or_number=score_text,
        tax=svg.figure(tax) if tax else None,
        proxies=[svg.figure(proxy_plot(course)) for course in board.proxies],
        win=win_text,
        number=number,
        lost_models=list(dict.fromkeys(item.model for item in board.lost.items)),
        lost_columns=list(dict.fromkeys(item.column for item in board.lost.items)),
        nonce=secrets.token_urlsafe(16) if hosted is None else hosted.nonce,
        hosted=hosted,
        own_style=asset("kedge.report.board", "page.css"),
        script=asset("kedge.report.charts", "chart.js") + asset("kedge.report.board", "page.js"),
    )


def shown_cell(board: Board, row: int, place: int) -> ShownCell | None:
    cell, column, model = board.cells[row][place], board.columns[place], board.models[row]
    if cell is None:
        return None
    if model.is_baseline and not cell.items:  # the baseline against itself
        return ShownCell(
            value=NONE, interval="", change="baseline", mark="", kind=None, title="what the others are compared with"
        )
    value, interval = value_text(cell, column)
    title = [f"{cell.items:,} items, items_hash {column.items_hash}"]
    change, mark, kind = "", "", None
    if model.is_baseline:
        change = "baseline"
    elif cell.difference is None:
        change = "not compared"
        title.append(cell.note)
    elif column.is_main:
        kind = cell.difference.change(board.alpha)
        is_up = (cell.difference.value > 0) == (column.better == "more")
        mark = "" if kind == "undecided" else "▲" if is_up else "▼"
        change = kind
        title.append(_difference_text(board, cell.difference, column))
    return ShownCell(
        value=value, interval=interval, change=change, mark=mark, kind=kind, title="\n".join(filter(None, title))
    )


def _difference_text(board: Board, difference: Difference, column: Column) -> str:
    against = "one half" if column.topic == "preference" else board.baseline
    gap, low, high = (_points(value, column) for value in (difference.value, difference.low, difference.high))
    text = (
        f"better than {against} by {gap} [{low}, {high}] on {difference.items:,} items of both; "
        f"p {difference.p_value:.3g}, after Holm over {board.comparisons:,} comparisons {difference.adjusted:.3g}"
    )
    return text + (
        f"; {difference.left_out:,} items that only one has answered are left out" if difference.left_out else ""
    )


def _points(value: float, column: Column) -> str:
    return f"{number(100 * value, 2)} points" if column.is_share else number(value)


def value_text(cell: Cell, column: Column) -> tuple[str, str]:
    """A number, and its interval: shares in percent.

    >>> column = Column(title="e", metric="m", topic="t", better="more", summary="", items_hash="", is_share=True)
    >>> value_text(Cell(value=0.5, low=0.25, high=0.75, items=8), column)
    ('50.0', '[25.0, 75.0]')
    """
    scale, digits = (100, 1) if column.is_share else (1, 3)
    value, low, high = (number(scale * part, digits) for part in (cell.value, cell.low, cell.high))
    return value, f"[{low}, {high}]"


def score_text(score: float) -> str:
    return f"{score:g}" if score != round(score, 3) else f"{round(score, 3):g}"


def group_cell(table: GroupTable, cell: Cell | None) -> ShownCell | None:
    """A cell of a group: with the difference to the baseline and its own interval, and no arrow."""
    if cell is None:
        return None
    value, interval = value_text(cell, table.column)
    change = ""
    if cell.difference is not None:
        gap, low, high = (
            number(100 * part if table.column.is_share else part, 1)
            for part in (cell.difference.value, cell.difference.low, cell.difference.high)
        )
        change = f"Δ {gap} [{low}, {high}]"
    return ShownCell(value=value, interval=interval, change=change, mark="", kind=None, title=f"{cell.items:,} items")


def _topics(columns: list[Column]) -> list[tuple[str, int]]:
    """Runs of columns of one topic, with how many they are."""
    topics: list[tuple[str, int]] = []
    for column in columns:
        if topics and topics[-1][0] == column.topic:
            topics[-1] = (column.topic, topics[-1][1] + 1)
        else:
            topics.append((column.topic, 1))
    return topics


def _counts(board: Board) -> list[tuple[str, int, str]]:
    """The board at a glance: what, how many, and a level."""
    changes = list(_changes(board))
    verdicts = [card.verdict for card in board.verdicts if not card.problem]
    counts = [
        ("models", len(board.models), ""),
        ("comparisons", board.comparisons, ""),
        ("better", changes.count("better"), "ok"),
        ("worse", changes.count("worse"), "fatal"),
        ("undecided", changes.count("undecided"), ""),
        ("gates passed", verdicts.count("pass"), "ok"),
        ("gates not passed", len(verdicts) - verdicts.count("pass"), "fatal"),
    ]
    return [entry for entry in counts if entry[1] or entry[0] in ("models", "comparisons")]


def _changes(board: Board) -> Iterator[Change]:
    for cells in board.cells:
        for cell, column in zip(cells, board.columns, strict=True):
            if cell and cell.difference and column.is_main:
                yield cell.difference.change(board.alpha)


def _group_fields(board: Board) -> dict[str, list[GroupTable]]:
    fields: dict[str, list[GroupTable]] = {}
    for table in board.groups:
        fields.setdefault(table.field, []).append(table)
    return fields


def win_text(league: League, first: str, second: str) -> tuple[str, str]:
    """The share that the first won against the second, and a title."""
    share, count = league.wins.get((first, second), (None, 0))
    if share is None:
        return ("", "") if first == second else (NONE, "they never met")
    return number(100 * share, 1), f"{first} won {number(100 * share, 1)} % of {count:,} comparisons with {second}"
