"""How much of a step is computed at once: what `kedge.models.training.passes` will choose for `micro_batch: auto`.

On a GPU it measures passes of twice as many tokens each time, and takes the fewest that reach the best rate. What is
foretold is the smallest of these sizes with enough work that the GPU, and not the host, is what is waited for; that
amount of work is the one below which layers are captured as CUDA graphs. A clock decides in the run, so it may come out
otherwise: `--probe` measures it. That a size is the best is only seen by a trial of twice as many tokens, which takes
its memory once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from kedge.plan.lengths import Item

CPU_TOKENS: Final = 2_048
LEAST_TOKENS: Final = 2_048
SHARE_OF_FREE: Final = 0.8
LONGER_STEP: Final = 2
ENOUGH_WORK: Final = 5e12
"""Tokens times weights of the layers of a pass."""
_FEWEST_BUCKET: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """The passes of a stage's steps."""

    limit: int
    """Tokens a pass may have at most; rows, where `micro_batch` is a number."""
    in_rows: bool
    largest: int
    """Tokens of the largest pass of all steps that were looked at."""
    counted: int
    """Predicted tokens of that pass."""
    rows: int
    """Sequences of it."""
    mean_passes: float
    """Of a step."""
    most_passes: int
    """Of one process in a step."""
    shares: int
    """Processes that share the passes of a step."""
    tried: int = 0
    """Tokens of the largest trial pass of `auto`; 0 where none is larger than the limit."""


def plan_passes(
    steps: Sequence[Sequence[Item]],
    *,
    micro_batch: int | Literal["auto"],
    is_gpu: bool,
    layer_weights: int,
    room: float,
    token_bytes: float,
    shares: int = 1,
    measured: int | None = None,
    tried: int | None = None,
) -> PassPlan:
    """The passes of these steps. `room` are the bytes that passes may take, `token_bytes` those of a token;
    `layer_weights` are all weights of the layers that are computed, `shares` the processes that share a step,
    `measured` the tokens of a pass that a probe chose, and `tried` the most that it tried."""
    whole = -(-sum(_size(item) for item in steps[0]) // shares)
    most = max(1, int(SHARE_OF_FREE * max(room, 0.0) / max(token_bytes, 1.0)))
    if micro_batch != "auto":
        cuts = [cut(step, rows=micro_batch) for step in steps]
        return _planned(cuts, micro_batch, in_rows=True, shares=shares)
    foretold = chosen_tokens(whole, layer_weights=layer_weights, most=most) if is_gpu else CPU_TOKENS
    limit = measured or foretold
    cuts = [cut(step, tokens=min(limit, -(-sum(map(_size, step)) // shares))) for step in steps]
    planned = _planned(cuts, limit, in_rows=False, shares=shares)
    if is_gpu and tried is None:
        tried = next_trial(limit, whole, most=most)
    return replace(planned, tried=min(tried, whole)) if tried and min(tried, whole) > limit else planned


def trial_pass(steps: Sequence[Sequence[Item]], passes: PassPlan) -> PassPlan | None:
    """The largest trial pass of `auto`, the first one of such a cut of the first step; None where none is larger than
    the passes themselves."""
    if not passes.tried:
        return None
    first = cut(steps[0], tokens=passes.tried)[:1]
    trial = _planned([first], passes.tried, in_rows=False, shares=passes.shares)
    return trial if trial.largest > passes.largest else None


def halved(steps: Sequence[Sequence[Item]], passes: PassPlan) -> PassPlan | None:
    """Passes of half the size, as a run makes them when memory runs out; None where each is one item."""
    limit = min(passes.limit, passes.largest) // 2 if not passes.in_rows else passes.limit // 2
    if limit < 1 or all(len(part) == 1 for step in steps for part in cut(step, **_bound(passes, passes.limit))):
        return None
    cuts = [cut(step, **_bound(passes, limit)) for step in steps]
    return _planned(cuts, limit, in_rows=passes.in_rows, shares=passes.shares)


def _bound(passes: PassPlan, limit: int) -> dict[str, int]:
    return {"rows" if passes.in_rows else "tokens": limit}


def chosen_tokens(whole: int, *, layer_weights: int, most: int) -> int:
    """Tokens a pass for a first step of `whole` tokens, where memory has room for `most`.

    >>> chosen_tokens(6_000, layer_weights=100_000_000, most=10**6)  # a small model: all at once, and longer steps too
    12000
    >>> chosen_tokens(6_000, layer_weights=1_300_000_000, most=10**6)
    4096
    >>> chosen_tokens(60_000, layer_weights=1, most=9_000)  # memory has room for no more
    7500
    """
    tokens = min(max(whole // 8, LEAST_TOKENS), whole)
    while tokens < whole and tokens * layer_weights < ENOUGH_WORK and min(2 * tokens, whole) <= most:
        tokens = min(2 * tokens, whole)
    return tokens if tokens < whole else max(whole, min(LONGER_STEP * whole, most))


def next_trial(tokens: int, whole: int, *, most: int) -> int:
    """Tokens of the trial that shows that passes of `tokens` are long enough; 0 where there is none.

    >>> next_trial(4_096, 6_000, most=10**6), next_trial(4_096, 60_000, most=5_000), next_trial(512, 512, most=9_999)
    (6000, 0, 0)
    """
    larger = min(2 * tokens, whole)
    return larger if tokens < larger <= most else 0


def cut(items: Sequence[Item], *, tokens: int | None = None, rows: int | None = None) -> list[list[Item]]:
    """Items in passes, the longest first, as `kedge.core.records.cut` has them.

    >>> from kedge.plan.lengths import Row
    >>> [len(part) for part in cut([(Row(3, 0),), (Row(1, 0),), (Row(2, 0),)], tokens=3)]
    [1, 2]
    """
    passes: list[list[Item]] = []
    held = 0
    for item in sorted(items, key=lambda item: -_size(item)):
        size = _size(item)
        if not passes or len(passes[-1]) == rows or (tokens is not None and held + size > tokens):
            passes.append([])
            held = 0
        passes[-1].append(item)
        held += size
    return passes


def bucket(tokens: int) -> int:
    """Tokens of the CUDA graph that rows of so many are padded to (`kedge.models.forward.packing`).

    >>> bucket(12_181), bucket(9)
    (12288, 512)
    """
    step = max(_FEWEST_BUCKET, 1 << max(0, (tokens - 1).bit_length() - 4))
    return -(-tokens // step) * step


def is_captured(tokens: int, layer_weights: int) -> bool:
    """Whether a pass with gradients runs as a CUDA graph."""
    return tokens * layer_weights <= ENOUGH_WORK


def _planned(cuts: Sequence[list[list[Item]]], limit: int, *, in_rows: bool, shares: int) -> PassPlan:
    largest = max((part for passes in cuts for part in passes), key=_tokens)
    return PassPlan(
        limit=limit,
        in_rows=in_rows,
        largest=_tokens(largest),
        counted=max(sum(row.counted for item in part for row in item) for passes in cuts for part in passes),
        rows=sum(len(item) for item in largest),
        mean_passes=sum(map(len, cuts)) / len(cuts),
        most_passes=-(-max(map(len, cuts)) // shares),
        shares=shares,
    )


def _tokens(items: Sequence[Item]) -> int:
    return sum(map(_size, items))


def _size(item: Item) -> int:
    return sum(row.tokens for row in item)
