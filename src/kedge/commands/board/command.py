"""`kedge board`: folders of runs in, one page out: what is better, what is worse, what may go out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kedge.commands.board.decisions import (
    case_rows,
    kept_metrics,
    named_metrics,
    promotion_rows,
    read_verdicts,
    verdict_card,
)
from kedge.commands.board.exams import ExamColumn, cell_of, exam_columns, group_tables, read_exam
from kedge.commands.board.lost import lost_items
from kedge.commands.board.models import Known, Models, choose_baseline
from kedge.commands.board.places import find_places, refuse_nothing
from kedge.commands.board.preferences import (
    Evaluated,
    WinColumn,
    leagues,
    pools,
    proxies,
    read_evaluation,
    win_columns,
    win_groups,
)
from kedge.core.errors import KedgeError
from kedge.core.files import write_text
from kedge.evaluate import holm
from kedge.report.board.page import render_board
from kedge.report.board.records import Board, Cell, Lost, Model, PromotionRow, TaxPoint

ALPHA = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardRequest:
    paths: Sequence[Path]
    baseline: str | None = None
    registry: Path = Path("models/registry.jsonl")
    badcases: Path = Path("badcases")


def make_board(request: BoardRequest) -> Board:
    """Everything that the page shows. What cannot be read is in `problems`; folders with nothing to show are an
    error."""
    found = find_places(request.paths)
    refuse_nothing(request.paths, found)
    problems, models = list(found.problems), Models()
    for place in found.places:
        models.add_made(place)
    gated, broken = read_verdicts(found.places, models)
    exams: list[Any] = []
    evaluations: list[Evaluated] = []
    for place in found.places:
        try:
            if place.has_exam:
                about, rows = read_exam(place)
                models.add_asked(place, about["models"])
                exams.append((place, about, rows))
            if place.has_evaluation:
                evaluation = read_evaluation(place)
                models.add_asked(place, evaluation.about["models"])
                evaluations.append(evaluation)
        except KedgeError as error:
            problems.append(str(error))
    rows = models.measured()
    proposed = [one.baseline for one in gated]
    proposed = proposed or [models.asked(evaluation.place, evaluation.baseline) for evaluation in evaluations]
    baseline = choose_baseline(rows, request.baseline, proposed)
    columns, notes = exam_columns(exams, models, named_metrics(gated))
    pooled = pools(evaluations, models)
    wins = win_columns(pooled, rows, baseline, notes) if baseline else []
    if unmeasured := models.unmeasured():
        notes.append(f"made, and not asked anything: {', '.join(unmeasured)}")
    promoted = promotion_rows(request.registry, models, problems)
    board = Board(
        models=tuple(_model(model, baseline, promoted) for model in rows),
        columns=(*(win.column for win in wins), *(column.column for column in columns)),
        cells=tuple(
            (
                *(_win_cell(win, model, baseline) for win in wins),
                *(cell_of(column, model, baseline) for column in columns),
            )
            for model in rows
        ),
        alpha=ALPHA,
        comparisons=0,
        groups=(
            *(win_groups(evaluations, models, rows, baseline) if baseline else ()),
            *group_tables(columns, rows, baseline),
        ),
        verdicts=(*broken, *(verdict_card(one) for one in gated)),
        promotions=tuple(promoted),
        cases=tuple(case_rows(request.badcases, gated, problems)),
        leagues=tuple(leagues(pooled)),
        proxies=tuple(proxies(evaluations, models)),
        lost=lost_items(columns, rows, baseline, problems) if baseline else Lost(),
        notes=tuple(dict.fromkeys(notes)),
        problems=tuple(problems),
    )
    return _with_tax(_adjusted(board), rows, columns, wins, kept_metrics(gated))


def board_lines(board: Board) -> Iterator[str]:
    """What to say on the screen: the models with what changed, then verdicts, then what could not be read."""
    for model, cells in zip(board.models, board.cells, strict=True):
        compared = [
            (column, cell.difference)
            for column, cell in zip(board.columns, cells, strict=True)
            if cell and cell.difference and column.is_main
        ]
        changes = [
            f"{difference.change(board.alpha)} in {column.title} ({column.metric})"
            for column, difference in compared
            if difference.change(board.alpha) != "undecided"
        ]
        undecided = len(compared) - len(changes)
        told = [*changes, *([f"{undecided} undecided"] if undecided else [])] or ["not compared"]
        yield f"{model.label}: {'baseline' if model.is_baseline else ', '.join(told)}"
    for card in board.verdicts:
        yield (
            f"verdict not trusted: {card.problem}" if card.problem else f"verdict: {card.verdict} for {card.candidate}"
        )
    for problem in board.problems:
        yield f"not read: {problem}"


def write_board(board: Board, to: Path) -> Path:
    """Write the page, as a whole or not at all."""
    page = render_board(board)
    to.parent.mkdir(parents=True, exist_ok=True)
    write_text(to, page)
    return to


def _model(model: Known, baseline: Known | None, promoted: Sequence[PromotionRow]) -> Model:
    return Model(
        label=model.label,
        origin=model.origin,
        kind=model.kind,
        weights=model.weights,
        is_baseline=model is baseline,
        aliases=tuple(row.alias for row in promoted if row.is_current and row.model == model.label),
    )


def _win_cell(win: WinColumn, model: Known, baseline: Known | None) -> Cell | None:
    if model is baseline:
        return Cell(value=0.5, low=0.5, high=0.5, items=0)
    return win.cells.get(model)


def _adjusted(board: Board) -> Board:
    """P-values of all arrows of the page adjusted together (Holm): those of the main columns."""
    places = [
        (row, column)
        for row, cells in enumerate(board.cells)
        for column, cell in enumerate(cells)
        if cell and cell.difference and board.columns[column].is_main
    ]
    differences = {place: cell.difference for place in places if (cell := board.cells[place[0]][place[1]])}
    adjusted = holm([difference.p_value for difference in differences.values() if difference])
    by_place = dict(zip(differences, adjusted, strict=True))

    def with_adjusted(row: int, column: int, cell: Cell | None) -> Cell | None:
        if cell is None or cell.difference is None or (row, column) not in by_place:
            return cell
        return replace(cell, difference=replace(cell.difference, adjusted=by_place[row, column]))

    cells = tuple(
        tuple(with_adjusted(row, column, cell) for column, cell in enumerate(cells))
        for row, cells in enumerate(board.cells)
    )
    return replace(board, cells=cells, comparisons=len(places))


def _with_tax(
    board: Board, models: Sequence[Known], columns: Sequence[ExamColumn], wins: Sequence[WinColumn], kept: Sequence[str]
) -> Board:
    """Gain against loss of every model that both were measured of: the win rate by the best judge there is, and the
    worst difference among the exams that rules keep; without rules, among all."""
    if not wins:
        return board
    wanted = {
        len(wins) + place: f"{column.exam}.{column.column.metric}"
        for place, column in enumerate(columns)
        if _is_kept(column, kept)
    }
    points: list[TaxPoint] = []
    for model, cells in zip(models, board.cells, strict=True):
        gain = cells[0]
        losses = [
            (cell.difference, name) for place, name in wanted.items() if (cell := cells[place]) and cell.difference
        ]
        if gain and gain.difference and losses:
            loss, exam = min(losses, key=lambda entry: entry[0].value)
            points.append(TaxPoint(label=model.label, gain=gain, exam=exam, loss=loss))
    return replace(board, tax=tuple(points), tax_source=wins[0].source, kept=tuple(dict.fromkeys(wanted.values())))


def _is_kept(column: ExamColumn, kept: Sequence[str]) -> bool:
    if not kept:
        return column.column.is_main and column.column.topic != "reward models"
    full = f"{column.exam}.{column.column.metric}"
    return full in kept or (column.exam in kept and column.is_exams_main)


__all__ = ["ALPHA", "BoardRequest", "board_lines", "make_board", "write_board"]
