"""`kedge board` as a user types it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "board"))
from board_files import make_runs, stage

Kedge = Callable[..., Any]


def test_a_board_is_written_and_told(kedge: Kedge, tmp_path: Path) -> None:
    make_runs(tmp_path)
    done = kedge("board", "runs/one", "runs/two")
    assert done.code == 0, done.err
    assert (
        "dpo: better in wins by gold (win rate), better in wins by reward (win rate), worse in mmlu (letter)"
        in done.out
    )
    assert "verdict: undecided for dpo" in done.out
    assert "wrote board.html" in done.out
    page = (tmp_path / "board.html").read_text()
    assert page.startswith("<!doctype html>")

    again = kedge("board", "runs/one")
    assert again.code == 2
    assert "--force" in again.err
    assert kedge("board", "runs/one", "--force", "--baseline", "dpo").code == 0


def test_what_cannot_be_shown_is_said(kedge: Kedge, tmp_path: Path) -> None:
    make_runs(tmp_path)
    stage(tmp_path / "runs" / "three", "sft", "sft", makes="new")
    nothing = kedge("board", "runs/three")
    assert nothing.code == 2
    assert "nothing to show" in nothing.err
    assert not (tmp_path / "board.html").exists()
    (tmp_path / "runs/two/exam/exam.json").write_text("{")
    done = kedge("board", "runs/one", "runs/two", "runs/three")
    assert done.code == 0, done.err
    assert "not read: runs/two/exam/exam.json: not the results of an exam" in done.out
    assert "runs/three/sft" in (tmp_path / "board.html").read_text()  # made, and not asked anything
