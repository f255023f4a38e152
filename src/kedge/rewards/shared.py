"""Answers that several processes have scored together: each asks about its share, and all get all results."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from kedge.core.answers import Answer
from kedge.core.world import World, together

ResultT = TypeVar("ResultT")


def judged_together(
    world: World, answers: Sequence[Answer], judge: Callable[[Sequence[Answer]], list[ResultT]]
) -> list[ResultT]:
    """`judge` on this process's share; the results of all processes, in the order of the answers.

    Every answer is asked about once in all, beside the others to its prompt. What `judge` refuses on one process is
    refused on all.
    """
    if world.size == 1:
        return judge(answers)
    rows_of: dict[Hashable, list[int]] = {}
    for row, answer in enumerate(answers):
        rows_of.setdefault(answer.prompt, []).append(row)
    own = [row for rows in world.mine(list(rows_of.values())) for row in rows]
    shares = together(world, lambda: dict(zip(own, judge([answers[row] for row in own]), strict=True)))
    results = ChainMap(*shares)
    return [results[row] for row in range(len(answers))]
