"""How many files a reader has to open to follow one PPO iteration: from sampling to the checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kedge
from kedge.stages.rl.run import RLRun

SOURCE = str(Path(kedge.__file__).parent)
MOST_FILES = 50


def test_one_iteration_with_its_save_runs_through_few_files(
    run_ppo: Callable[..., Path], ppo_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`roles: separate` and a reward model; files of the package in which a function runs from the end of the first
    iteration to the end of the second."""
    files = {"stages/ppo/train.py"}  # its loop runs all the while
    finish = RLRun.finish

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            files.add(str(Path(frame.f_code.co_filename).relative_to(SOURCE)))

    def finish_and_note(run: RLRun, number: int, *arguments: Any) -> None:
        finish(run, number, *arguments)
        sys.setprofile(note if number == 0 else None)

    monkeypatch.setattr(RLRun, "finish", finish_and_note)
    before = sys.getprofile()
    try:
        run_ppo(tmp_path, roles="separate", reward=str(ppo_home / "judge"), iterations=2)
    finally:
        sys.setprofile(before)
    assert {"trainers/ppo.py", "rollout/local.py", "runs/checkpoints.py", "models/roles/actor_critic.py"} <= files
    assert len(files) <= MOST_FILES, "\n".join(sorted(files))
