"""What a generator is given: one row for each answer to sample. Free of torch; tokens are plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kedge.core.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Rows to answer. What is sampled for a row depends on the seed, its group and its answer index, and on no other
    row, so that any part of a batch can be generated anywhere."""

    tokens: tuple[tuple[int, ...], ...]
    """The prompt of each row."""
    group: tuple[int, ...]
    """The id of each row's prompt: answers to the same prompt share it."""
    answer: tuple[int, ...]
    """Which answer to its prompt a row is: 0, 1, …"""

    def __post_init__(self) -> None:
        sizes = {"tokens": len(self.tokens), "group": len(self.group), "answer": len(self.answer)}
        if len(set(sizes.values())) != 1 or not self.tokens:
            counts = ", ".join(f"{size} of {name}" for name, size in sizes.items())
            raise DataError(f"prompts: found {counts}; expected one row or more, and one of each for every row")
        for row, tokens in enumerate(self.tokens):
            if not tokens:
                raise DataError(
                    f"prompts: row {row} (group {self.group[row]}) has no tokens; nothing can follow nothing"
                )
        (group, answer), count = Counter(zip(self.group, self.answer, strict=True)).most_common(1)[0]
        if count > 1:
            raise DataError(
                f"prompts: {count} rows ask for answer {answer} of group {group}, which would be the same answer "
                "each time; give every answer to a prompt its own index, and every prompt its own id"
            )


def repeated(prompts: Sequence[Sequence[int]], ids: Sequence[int], answers: int) -> Prompts:
    """So many answers to each prompt; the answers to one prompt are neighbours.

    >>> repeated([[5, 6], [7]], ids=[40, 41], answers=2)
    Prompts(tokens=((5, 6), (5, 6), (7,), (7,)), group=(40, 40, 41, 41), answer=(0, 1, 0, 1))
    """
    return Prompts(
        tokens=tuple(tuple(prompt) for prompt in prompts for _ in range(answers)),
        group=tuple(group for group in ids for _ in range(answers)),
        answer=tuple(answer for _ in prompts for answer in range(answers)),
    )
