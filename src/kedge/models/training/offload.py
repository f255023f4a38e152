"""AdamW whose masters and moments are in host memory: they come to the device in buckets, and go back updated.

An update is of each entry by itself, so cutting weights into buckets changes no number: the same kernel computes the
same values. While one bucket is updated the next one comes and the one before goes, each on a stream of its own; the
device has room for two of them. Left out: moments in 8 bits, and weights that several processes hold in parts.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from kedge.models.forward.host_memory import host_floats

BUCKET = 1 << 22
"""Entries of a bucket: 48 MiB with masters and moments, which a GPU takes a millisecond for."""
_ALIGNMENT = 64
"""Entries at whose multiples the parts of a bucket begin."""


class ApplyUpdates(Protocol):
    """One step of AdamW on all of these weights; `settings` are a group of torch's AdamW, `step` counts from 1."""

    def __call__(
        self,
        weights: Sequence[Tensor],
        masters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        means: Sequence[Tensor],
        squares: Sequence[Tensor],
        settings: Mapping[str, Any],
        *,
        scale: Tensor,
        step: float,
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a weight in a bucket: entries `start` to `stop` of weight `index`, from `place` on in the bucket."""

    index: int
    start: int
    stop: int
    place: int

    @property
    def in_bucket(self) -> slice:
        return slice(self.place, self.place + self.stop - self.start)


def buckets(sizes: Sequence[int], most: int) -> Iterator[list[Piece]]:
    """Weights of these sizes cut into buckets of at most so many entries.

    >>> [[(piece.index, piece.start, piece.stop) for piece in bucket] for bucket in buckets([100, 10, 150], 128)]
    [[(0, 0, 100)], [(1, 0, 10), (2, 0, 64)], [(2, 64, 150)]]
    """
    bucket: list[Piece] = []
    place = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            if place >= most:
                yield bucket
                bucket, place = [], 0
            stop = min(size, start + most - place)
            bucket.append(Piece(index=index, start=start, stop=stop, place=place))
            place += -(-(stop - start) // _ALIGNMENT) * _ALIGNMENT
            start = stop
    if bucket:
        yield bucket


class StagedUpdates:
    """`apply` on weights whose moments, and masters where they are copies, are in host memory."""

    def __init__(self, apply: ApplyUpdates, device: torch.device, *, entries: int) -> None:
        """`entries` are those of all weights together."""
        self._apply, self._device = apply, device
        self._bucket = min(BUCKET, -(-entries // _ALIGNMENT) * _ALIGNMENT)
        on_gpu = device.type == "cuda"
        self._inward, self._outward = (torch.cuda.Stream(device) if on_gpu else None for _ in range(2))
        self._rooms = [_Room(self._bucket, device) for _ in range(2)]

    def __call__(
        self,
        weights: Sequence[Tensor],
        masters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        means: Sequence[Tensor],
        squares: Sequence[Tensor],
        settings: Mapping[str, Any],
        *,
        scale: Tensor,
        step: float,
    ) -> None:
        here = torch.cuda.current_stream(self._device) if self._inward else None
        if here is not None and self._inward is not None:
            self._inward.wait_stream(here)  # what was in these rooms before, and what the host has of the last step
        is_copy = weights[0] is not masters[0]
        on_host = [[x.view(-1) for x in kind] for kind in ((masters, means, squares) if is_copy else (means, squares))]
        learning, sums = [x.view(-1) for x in weights], [x.contiguous().view(-1) for x in gradients]
        for number, pieces in enumerate(buckets([len(x) for x in learning], self._bucket)):
            room = self._rooms[number % 2]
            with _on(self._inward, after=room.is_free, marks=room.is_full):
                staged = room.filled(pieces, on_host)
            with _on(here, after=room.is_full, marks=room.is_updated):
                own, added = ([x[piece.index][piece.start : piece.stop] for piece in pieces] for x in (learning, sums))
                master, mean, square = staged if is_copy else (own, *staged)
                self._apply(own, master, added, mean, square, settings, scale=scale, step=step)
            with _on(self._outward, after=room.is_updated, marks=room.is_free):
                room.give_back(pieces, on_host)
        if here is not None and self._outward is not None:
            here.wait_stream(self._outward)  # who waits for this step finds the host up to date


class _Room:
    """Room on the device for masters and moments of a bucket, and how far they are."""

    def __init__(self, entries: int, device: torch.device) -> None:
        self._blocks = torch.empty(3, entries, device=device)
        events = (torch.cuda.Event() if device.type == "cuda" else None for _ in range(3))
        self.is_free, self.is_full, self.is_updated = events

    def filled(self, pieces: Sequence[Piece], on_host: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Parts of the room with what the host has of these pieces, for each kind of `on_host`."""
        staged = [[block[piece.in_bucket] for piece in pieces] for block in self._blocks[: len(on_host)]]
        for parts, tensors in zip(staged, on_host, strict=True):
            for part, piece in zip(parts, pieces, strict=True):
                part.copy_(tensors[piece.index][piece.start : piece.stop], non_blocking=True)
        return staged

    def give_back(self, pieces: Sequence[Piece], on_host: Sequence[Sequence[Tensor]]) -> None:
        for block, tensors in zip(self._blocks, on_host, strict=False):
            for piece in pieces:
                tensors[piece.index][piece.start : piece.stop].copy_(block[piece.in_bucket], non_blocking=True)


@contextmanager
def _on(
    stream: torch.cuda.Stream | None, *, after: torch.cuda.Event | None, marks: torch.cuda.Event | None
) -> Generator[None]:
    """The block runs on the stream, after one event, and marks the other at its end; without a stream, at once."""
    if stream is None or after is None or marks is None:
        yield
        return
    stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield
    stream.record_event(marks)


def move_moments(optimiser: torch.optim.AdamW, *, pinned: bool) -> None:
    """Have the moments in host memory, wherever a state that was loaded has them; zeros where there is none yet. The
    order is that of the groups, in which torch makes them."""
    masters: list[Tensor] = [master for group in optimiser.param_groups for master in group["params"]]
    homes = host_floats([*masters, *masters], pinned=pinned)
    for master, mean, square in zip(masters, homes[: len(masters)], homes[len(masters) :], strict=True):
        state = optimiser.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        for name, home in (("exp_avg", mean), ("exp_avg_sq", square)):
            state[name] = home.copy_(state[name]) if name in state else home


@torch.no_grad()
def apply_by_torch(
    weights: Sequence[Tensor],
    masters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    settings: Mapping[str, Any],
    *,
    scale: Tensor,
    step: float,
) -> None:
    """`ApplyUpdates` by torch's own kernels: for devices without Triton."""
    factor = scale.item()
    if factor != factor:  # not a number: the step is not taken
        return
    adamw(
        list(masters),
        [gradient.float() * factor for gradient in gradients],
        list(means),
        list(squares),
        [],
        [torch.full((), step - 1, device=master.device if settings["fused"] else None) for master in masters],
        foreach=settings["foreach"],
        fused=settings["fused"],
        amsgrad=False,
        beta1=settings["betas"][0],
        beta2=settings["betas"][1],
        lr=settings["lr"],
        weight_decay=settings["weight_decay"],
        eps=settings["eps"],
        maximize=False,
    )
    if weights[0] is not masters[0]:
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(master)
