"""A model that learns, looked at again and again: whether it is worse than it was, by the same items or prompts.

What is looked at several times will now and then seem worse by chance: p-values are adjusted for the number of
comparisons, and who decides by them waits for two looks in a row (`kedge.monitor.detectors.exam_rules`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean

from kedge.evaluate.paired import superiority


def worse(
    start: Sequence[float],
    now: Sequence[float],
    *,
    clusters: Sequence[Hashable] | None = None,
    comparisons: int = 1,
) -> float:
    """The p-value of a model being no worse than at the start, by the scores of the same items, of which more is
    better; adjusted for so many comparisons (Bonferroni).

    Were it no worse, all of n independent items would be lost with a probability of 2^-n at most: no p-value is below.

    >>> round(worse([1] * 9 + [0] * 2 + [1] * 29, [0] * 9 + [1] * 2 + [1] * 29), 4)
    0.0174
    """
    independent = len(set(clusters)) if clusters is not None else len(start)
    p = superiority(start, now, clusters=clusters)
    return min(1.0, comparisons * max(p, 0.5**independent))


def fallen(before: Sequence[Mapping[int, float]], now: Mapping[int, float]) -> float:
    """The p-value of a win rate over the start not having fallen from its best look so far; adjusted for the number of
    looks that the best is chosen from.

    A look maps a prompt to the preference for the model over its start, from 0 to 1. The start itself is the first
    look: ½ on every prompt.

    >>> fallen([], dict.fromkeys(range(20), 0.5)), fallen([], dict.fromkeys(range(20), 0.0)) < 1e-5
    (0.5, True)
    """
    looks = [dict.fromkeys(now, 0.5), *({prompt: look[prompt] for prompt in now if prompt in look} for look in before)]
    looks = [look for look in looks if look]
    if not looks:
        return 1.0
    best = max(looks, key=lambda look: fmean(look.values()))
    return worse(list(best.values()), [now[prompt] for prompt in best], comparisons=len(looks))
