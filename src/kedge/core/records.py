"""What flows between the parts: one frozen record per consumer, every field present, shapes checked on creation.

Index t speaks about token t. Masks are bool, True counts. `take`, `shards` and `to_device` work on any dataclass of
tensors and nested records; `cut` says which rows share a pass. Left out: text, and anything without rows.
Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from kedge.core.errors import DataError, ShapeError

_INTEGER = (torch.int64,)
_BOOL = (torch.bool,)
_REAL = (torch.float32, torch.float64)
_TOKEN_FIELDS = {"tokens_BT": _INTEGER, "attention_mask_BT": _BOOL, "response_mask_BT": _BOOL}


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


R = TypeVar("R", bound=_Dataclass)
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Text as the model reads it; the response is what a loss is about."""

    tokens_BT: Tensor
    """int64: prompt, then response, right-padded."""
    attention_mask_BT: Tensor
    """bool: True on real tokens."""
    response_mask_BT: Tensor
    """bool: True on the tokens of the answer; with several turns it has holes."""

    def __post_init__(self) -> None:
        _check(self, _TOKEN_FIELDS, shape=_shape_of_tokens(self))
        _check_masks(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """What the generator produced. Nothing here depends on rewards."""

    tokens_BT: Tensor
    """int64: prompt, then response, right-padded."""
    attention_mask_BT: Tensor
    """bool: True on real tokens."""
    response_mask_BT: Tensor
    """bool: True on tokens that the policy sampled; with several turns it has holes."""
    behaviour_logp_BT: Tensor
    """Log-prob of each sampled token under the weights that sampled it."""
    group_B: Tensor
    """int64: answers to the same prompt share an id."""
    finished_B: Tensor
    """bool: True where the answer ended by itself (EOS), False where it was cut at the length limit."""
    version: int
    """Which version of the policy sampled."""

    def __post_init__(self) -> None:
        kinds = {**_TOKEN_FIELDS, "behaviour_logp_BT": _REAL, "group_B": _INTEGER, "finished_B": _BOOL}
        _check(self, kinds, shape=_shape_of_tokens(self))
        _check_masks(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """What a policy loss reads."""

    rollouts: Rollouts
    old_logp_BT: Tensor
    """Log-probs under the policy before this update."""
    ref_logp_BT: Tensor
    """Log-probs under the reference."""
    advantages_BT: Tensor
    weight_BT: Tensor | None = None
    """What the loss of each token counts for, where other weights sampled it; None counts all alike."""

    def __post_init__(self) -> None:
        kinds = {"old_logp_BT": _REAL, "ref_logp_BT": _REAL, "advantages_BT": _REAL}
        if self.weight_BT is not None:
            kinds["weight_BT"] = _REAL
        _check(self, kinds, shape=self.rollouts.tokens_BT.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTargets:
    """What a value loss reads."""

    rollouts: Rollouts
    old_values_BT: Tensor
    """Values under the critic before this update."""
    returns_BT: Tensor

    def __post_init__(self) -> None:
        _check(self, {"old_values_BT": _REAL, "returns_BT": _REAL}, shape=self.rollouts.tokens_BT.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """What a preference loss reads: row b of `chosen` was preferred to row b of `rejected` (their T may differ).

    Both sums are kept, because some losses need more of the reference than its margin.
    """

    chosen: Tokens
    rejected: Tokens
    ref_chosen_B: Tensor
    """Sum of the reference's log-probs over the chosen answer."""
    ref_rejected_B: Tensor
    """The same over the rejected answer."""

    def __post_init__(self) -> None:
        rows = self.chosen.tokens_BT.shape[0]
        if self.rejected.tokens_BT.shape[0] != rows:
            raise ShapeError(f"Pairs: rejected has {self.rejected.tokens_BT.shape[0]} rows, expected {rows} as chosen")
        _check(self, {"ref_chosen_B": _REAL, "ref_rejected_B": _REAL}, shape=self.chosen.tokens_BT.shape)

    @property
    def ref_margin_B(self) -> Tensor:
        """By how much the reference prefers the chosen answer, in nats."""
        return self.ref_chosen_B - self.ref_rejected_B


def num_rows(record: _Dataclass) -> int:
    """How many sequences a record holds: the first axis of its first tensor."""
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            return value.shape[0]
        if is_dataclass(value) and not isinstance(value, type):
            return num_rows(value)
    raise ShapeError(f"{type(record).__name__} holds no tensor, so it has no rows")


def take(record: R, rows: Tensor | slice) -> R:
    """The record of the given rows, in the order given: a slice, a vector of int64 indices, or a bool per row.

    >>> tokens_BT, yes_BT = torch.tensor([[5, 6], [7, 8], [9, 4]]), torch.ones(3, 2, dtype=torch.bool)
    >>> record = Tokens(tokens_BT=tokens_BT, attention_mask_BT=yes_BT, response_mask_BT=yes_BT)
    >>> take(record, torch.tensor([2, 0])).tokens_BT.tolist()
    [[9, 4], [5, 6]]
    """
    if isinstance(rows, Tensor) and (rows.ndim != 1 or rows.dtype not in (torch.int64, torch.bool)):
        raise ShapeError(
            f"rows: found {rows.dtype} of shape {tuple(rows.shape)}, expected one axis of torch.int64 or torch.bool"
        )
    return _mapped(record, lambda tensor: tensor[rows])


def shards(record: R, n: int) -> list[R]:
    """Cut into at most n contiguous parts, in order; sizes differ by at most one.

    No part is empty: fewer than n rows give one part per row, so look at the length of the list.

    >>> tokens_BT, yes_BT = torch.tensor([[5], [6], [7]]), torch.ones(3, 1, dtype=torch.bool)
    >>> record = Tokens(tokens_BT=tokens_BT, attention_mask_BT=yes_BT, response_mask_BT=yes_BT)
    >>> [shard.tokens_BT.flatten().tolist() for shard in shards(record, 2)]
    [[5], [6, 7]]
    """
    if n < 1:
        raise ShapeError(f"n: found {n}, expected 1 shard or more")
    rows = num_rows(record)
    parts = max(1, min(n, rows))
    bounds = [rows * part // parts for part in range(parts + 1)]
    return [take(record, slice(start, end)) for start, end in pairwise(bounds) if end > start]


def trimmed(record: R, length: int) -> R:
    """The first `length` positions of every row: what lies behind them must be padding.

    >>> tokens_BT, yes_BT = torch.tensor([[5, 6, 0], [7, 0, 0]]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    >>> record = Tokens(tokens_BT=tokens_BT, attention_mask_BT=yes_BT, response_mask_BT=yes_BT)
    >>> trimmed(record, 2).tokens_BT.tolist()
    [[5, 6], [7, 0]]
    """
    return _mapped(record, lambda tensor: tensor[:, :length] if tensor.ndim == 2 else tensor)


def cut(
    items: Sequence[Item],
    *,
    length: Callable[[Item], int],
    rows: int | None = None,
    tokens: int | None = None,
    shares: int = 1,
) -> list[list[Item]]:
    """Items in passes, the longest first: at most `rows` of them a pass, and at most `tokens` by their `length`.

    An item that is longer than `tokens` has a pass of its own. Without a bound there is one pass. Where `shares`
    processes compute them, no pass is larger than a share of the whole.

    >>> cut(["bb", "a", "dddd", "ccc"], length=len, rows=3), cut(["bb", "a", "dddd", "ccc"], length=len, tokens=6)
    ([['dddd', 'ccc', 'bb'], ['a']], [['dddd'], ['ccc', 'bb', 'a']])
    >>> cut(["bb", "a", "dddd", "ccc"], length=len, rows=3, shares=2)
    [['dddd', 'ccc'], ['bb', 'a']]
    """
    if shares > 1:
        rows = None if rows is None else min(rows, max(1, -(-len(items) // shares)))
        tokens = None if tokens is None else min(tokens, max(1, -(-sum(map(length, items)) // shares)))
    passes: list[list[Item]] = []
    num_tokens = 0
    for item in sorted(items, key=lambda item: -length(item)):
        size = length(item)
        is_full = not passes or len(passes[-1]) == rows or (tokens is not None and num_tokens + size > tokens)
        if is_full:
            passes.append([])
            num_tokens = 0
        passes[-1].append(item)
        num_tokens += size
    return passes


def joined(parts: Sequence[Rollouts], *, pad_token: int = 0) -> Rollouts:
    """All rows in one record, as wide as the widest part; the version is that of the first."""
    width = max(part.tokens_BT.shape[1] for part in parts)

    def together(name: str) -> Tensor:
        tensors: list[Tensor] = [getattr(part, name) for part in parts]
        value = pad_token if name == "tokens_BT" else 0
        return torch.cat(
            [pad(one, (0, width - one.shape[1]), value=value) if one.ndim == 2 else one for one in tensors]
        )

    names = [field.name for field in fields(Rollouts) if field.name != "version"]
    return Rollouts(**{name: together(name) for name in names}, version=parts[0].version)


def to_device(record: R, device: torch.device | str) -> R:
    """The same record with every tensor on `device`."""
    return _mapped(record, lambda tensor: tensor.to(device))


def send(x: Tensor, device: torch.device) -> Tensor:
    """`x` on the device; from the host to a GPU by a copy that the host does not wait for."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def _mapped(record: R, change: Callable[[Tensor], Tensor]) -> R:
    """A copy with `change` applied to every tensor, nested records included.

    The checks of creation are not repeated: rows of a sound record are sound, and looking into a mask would make
    the host wait for the device at every minibatch.
    """
    copy = object.__new__(type(record))
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            value = change(value)
        elif is_dataclass(value) and not isinstance(value, type):
            value = _mapped(value, change)
        elif not isinstance(value, int | float | str | None):
            raise ShapeError(
                f"{type(record).__name__}.{field.name} is a {type(value).__name__}, which has no rows to cut; "
                "a record holds tensors, records, and plain facts about the whole batch"
            )
        object.__setattr__(copy, field.name, value)
    return copy


def _shape_of_tokens(record: Tokens | Rollouts) -> torch.Size:
    shape = record.tokens_BT.shape
    if len(shape) != 2:
        raise ShapeError(f"{type(record).__name__}: tokens_BT has shape {tuple(shape)}, expected two axes (B, T)")
    return shape


def _check(record: _Dataclass, kinds: Mapping[str, tuple[torch.dtype, ...]], *, shape: torch.Size) -> None:
    """Raise one ShapeError that names every wrong field; a name that ends in `_BT` has `shape`, `_B` its first axis."""
    problems: list[str] = []
    for name, dtypes in kinds.items():
        tensor: Tensor = getattr(record, name)
        expected = shape if name.endswith("_BT") else shape[:1]
        if tensor.shape != expected:
            problems.append(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(expected)}")
        if tensor.dtype not in dtypes:
            problems.append(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if problems:
        raise ShapeError(f"{type(record).__name__}: {'; '.join(problems)}")


def _check_masks(record: Tokens | Rollouts) -> None:
    outside_BT = record.response_mask_BT & ~record.attention_mask_BT
    if outside_BT.any():
        row, position = outside_BT.nonzero()[0].tolist()
        raise ShapeError(
            f"{type(record).__name__}: response_mask_BT is True on {int(outside_BT.sum())} token(s) where "
            f"attention_mask_BT is False, first at row {row}, position {position}; a response token is a real token"
        )


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
