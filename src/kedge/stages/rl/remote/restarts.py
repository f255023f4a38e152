"""What follows when a group of a running stage loses a process: the stage goes on from its last checkpoint. The lost
group is built again; the others stay, and take up the state of that checkpoint too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kedge.core.errors import GroupLost, RunError
from kedge.runtime.groups import Groups
from kedge.stages.shared.context import Context

T = TypeVar("T")


def with_restarts(context: Context, run: Callable[[], T]) -> T:
    """Run a stage, and again after a group was lost, as often as the recipe allows; its groups end with it."""
    if context.groups is None:
        return run()
    try:
        while True:
            try:
                return run()
            except GroupLost as lost:
                _note_lost(context, context.groups, lost)
    finally:
        context.groups.close_stage()


def _note_lost(context: Context, groups: Groups, lost: GroupLost) -> None:
    groups.num_lost += 1
    is_last = groups.num_lost > groups.restarts
    then = "--resume goes on" if is_last else f"restart {groups.num_lost} of {groups.restarts}"
    context.event(
        "fatal" if is_last else "warning",
        "process.lost",
        f"{lost}: {then}, from the last checkpoint",
        group=lost.group,
        rank=lost.rank,
        host=lost.host,
        last_words=lost.words,
        restarts=groups.num_lost - 1,
    )
    if is_last:
        raise RunError(f"{context.folder}: {lost}. --resume goes on from the last checkpoint") from lost
