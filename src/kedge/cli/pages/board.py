"""`kedge board`: models side by side on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kedge.cli.screen import out, writing
from kedge.core.files import refuse_overwriting


def board(
    paths: Annotated[
        list[Path], typer.Argument(help="Runs, stages, folders of exams and evaluations, files of verdicts.")
    ],
    to: Annotated[Path, typer.Option("--out", help="Where to write the page.")] = Path("board.html"),
    baseline: Annotated[
        str | None,
        typer.Option(help="The model that others are compared with; unless given, that of verdicts or evaluations."),
    ] = None,
    registry: Annotated[Path, typer.Option(help="Where promotions are kept.")] = Path("models/registry.jsonl"),
    badcases: Annotated[Path, typer.Option(help="The folder of badcases.")] = Path("badcases"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite a page that is there.")] = False,
) -> None:
    """Put models, exams, verdicts and lost items on one page that opens offline."""
    from kedge.commands.board.command import BoardRequest, board_lines, make_board, write_board

    refuse_overwriting([to], inputs=paths, force=force, own=["board.html"])
    request = BoardRequest(paths=paths, baseline=baseline, registry=registry, badcases=badcases)
    made = make_board(request)
    with writing(to):
        write_board(made, to)
    for line in (*board_lines(made), f"wrote {to}"):
        out().print(line, markup=False, soft_wrap=True)
