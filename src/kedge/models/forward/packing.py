"""Packing: rows of unequal length end to end instead of padded. Which tokens are computed, and whose outputs are read.

Decoders are causal, so a row can end at the last position that is read, and its last layer begin at the first one.
Shape letters: B rows, T token positions, N tokens of packed rows, M of them in the tails that the last layer is
computed at, R of them whose hidden state is read, S sequences (one a row).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kedge.core.errors import ModelError

Numbers = npt.NDArray[Any]

_FEWEST_TOKENS, _FEWEST_SEQUENCES, _SHORTEST = 512, 128, 1024
"""Of a graph. To allow for more sequences and longer ones than there are costs the attention next to nothing."""
_MOST_PADDING = 1.25
"""So many times as many tokens a graph that is there may have as rows need, before another one is captured for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The boundaries of packed sequences."""

    ends_S1: Tensor
    """int32: 0, then the end of each sequence (their cumulative lengths)."""
    longest: int
    is_even: bool
    """True where all sequences have the same length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How rows are packed into one; every row keeps at least its first token, even if nothing of it is read."""

    shape: tuple[int, int]
    """(B, T) of the padded rows."""
    lengths: tuple[int, ...]
    """Tokens of each row that are computed."""
    place_N: Tensor
    """The index of each token in the flattened (B, T)."""
    position_N: Tensor
    """Its position in its row."""
    rows: Spans
    tail_M: Tensor
    """Indices into the N tokens: those from the first to the last one that is read of each row."""
    tails: Spans
    read_of_rows: Tensor | None
    """Indices into the N tokens: those that are read; None for all."""
    read_of_tails: Tensor | None
    """Indices into the M tokens: those that are read; None for all, as with answers without gaps."""


def lay_out(read_BT: Tensor, device: torch.device | None = None) -> Layout:
    """The layout for reading hidden states where `read_BT`, a mask on the host, is True; on `device`, or the host.

    >>> layout = lay_out(torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1]]).bool())
    >>> layout.lengths, layout.position_N.tolist(), layout.tail_M.tolist(), layout.read_of_tails
    ((3, 4), [0, 1, 2, 0, 1, 2, 3], [1, 2, 6], None)
    """
    read: Numbers = read_BT.numpy()  # numpy starts no threads for so little
    width = read.shape[1]
    first = read.argmax(axis=1)
    length = np.where(read.any(axis=1), width - read[:, ::-1].argmax(axis=1), 1)
    position = _counted(length)
    place = position + np.repeat(np.arange(len(read)) * width, length)
    tail = _counted(length - first) + np.repeat(length.cumsum() - length + first, length - first)
    is_read = read.reshape(-1)[place]
    whole = [
        place,
        position,
        tail,
        is_read.nonzero()[0],
        is_read[tail].nonzero()[0],
        _ends(length),
        _ends(length - first),
    ]
    place_N, position_N, tail_M, read_of_rows, read_of_tails, rows_S1, tails_S1 = sent(whole, device)
    return Layout(
        shape=(len(read), width),
        lengths=tuple(length.tolist()),
        place_N=place_N,
        position_N=position_N,
        rows=_spans(length, rows_S1),
        tail_M=tail_M,
        tails=_spans(length - first, tails_S1),
        read_of_rows=None if is_read.all() else read_of_rows,
        read_of_tails=None if is_read[tail].all() else read_of_tails,
    )


_ALIGNMENT = 64
"""Bytes: compiled kernels copy what is not aligned."""


def sent(arrays: Sequence[Numbers], device: torch.device | None) -> list[Tensor]:
    """Arrays as tensors on the device, all by one copy that the host does not wait for."""
    if device is None or device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for array, part in zip(arrays, buffer.split(sizes), strict=True):
        part.numpy()[: array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
    parts = zip(arrays, buffer.to(device, non_blocking=True).split(sizes), strict=True)
    return [part[: array.nbytes].view(torch.from_numpy(array[:0]).dtype) for array, part in parts]


def _counted(length_S: Numbers) -> Numbers:
    """0, 1, … up to each length.

    >>> _counted(np.array([2, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    return np.arange(length_S.sum()) - np.repeat(length_S.cumsum() - length_S, length_S)


def _ends(length_S: Numbers) -> Numbers:
    return np.concatenate(([0], length_S.cumsum())).astype(np.int32)


def _spans(length_S: Numbers, ends_S1: Tensor) -> Spans:
    longest = int(length_S.max())
    return Spans(ends_S1=ends_S1, longest=longest, is_even=bool((length_S == longest).all()))


NAME: Final = "kedge_packed"
PLAIN: Final = "sdpa"
"""The attention of transformers that this one replaces, and falls back to where sequences are not packed."""

_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


def packed_attention(
    query_MHE: Tensor, key_NKE: Tensor, value_NKE: Tensor, tails: Spans, rows: Spans, *, dropout: float = 0.0
) -> Tensor:
    """The attention output of each query (M, H, E); `dropout` is the share of attention weights that are dropped."""
    is_narrow = value_NKE.dtype.itemsize == 2
    query_MHE, key_NKE = query_MHE.to(value_NKE.dtype), key_NKE.to(value_NKE.dtype)
    if query_MHE.is_cuda and is_narrow and query_MHE.shape[-1] % 8 == 0:
        return _flash(query_MHE, key_NKE, value_NKE, tails, rows, dropout)
    if tails.is_even and rows.is_even and tails.longest == rows.longest:
        return _in_rows(query_MHE, key_NKE, value_NKE, len(rows.ends_S1) - 1, is_square=True, dropout=dropout)
    return _by_length_uncompiled(query_MHE, key_NKE, value_NKE, tails.ends_S1, rows.ends_S1, dropout)


def _flash(query_MHE: Tensor, key_NKE: Tensor, value_NKE: Tensor, tails: Spans, rows: Spans, dropout: float) -> Tensor:
    """The operator below `torch.nn.attention.varlen`, whose own Python takes longer than the kernel does."""
    operator = cast(Callable[..., tuple[Tensor, ...]], torch.ops.aten._flash_attention_forward)
    ends, longest = (tails.ends_S1, rows.ends_S1), (tails.longest, rows.longest)
    is_causal, is_debugged = True, False
    return operator(query_MHE, key_NKE, value_NKE, *ends, *longest, dropout, is_causal, is_debugged)[0]


def _in_rows(
    query_MHE: Tensor, key_NKE: Tensor, value_NKE: Tensor, count: int, *, is_square: bool, dropout: float
) -> Tensor:
    """`count` sequences with equal numbers of keys and of queries; as many queries as keys if it `is_square`."""
    query, key, value = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (query_MHE, key_NKE, value_NKE))
    short, long = query.shape[2], key.shape[2]
    # A single query attends to every key; only several, but not all, queries of a sequence need a mask.
    mask = None if is_square or short == 1 else _lower_right(short, long, query.device)
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_square,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).flatten(0, 1)


def _by_length(
    query_MHE: Tensor, key_NKE: Tensor, value_NKE: Tensor, tails_S1: Tensor, rows_S1: Tensor, dropout: float
) -> Tensor:
    outputs = [
        _in_rows(
            query_MHE[queries],
            key_NKE[keys],
            value_NKE[keys],
            count,
            is_square=_size(queries) == _size(keys),
            dropout=dropout,
        )
        for queries, keys, count in _runs(tails_S1.tolist(), rows_S1.tolist())
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _runs(tails: Sequence[int], rows: Sequence[int]) -> Iterator[tuple[slice, slice, int]]:
    """Runs of neighbouring sequences of equal lengths: the run's queries, its keys, how many sequences it has.

    >>> list(_runs([0, 2, 4, 5], [0, 3, 6, 9]))
    [(slice(0, 4, None), slice(0, 6, None), 2), (slice(4, 5, None), slice(6, 9, None), 1)]
    """
    start, last = 0, len(rows) - 1
    for at in range(1, last + 1):
        is_same = at < last and all(x[at + 1] - x[at] == x[at] - x[at - 1] for x in (tails, rows))
        if not is_same:
            yield slice(tails[start], tails[at]), slice(rows[start], rows[at]), at - start
            start = at


def _size(part: slice) -> int:
    return part.stop - part.start


def _lower_right(short: int, long: int, device: torch.device) -> Tensor:
    """The causal mask of the last `short` of `long` positions."""
    return torch.ones(short, long, dtype=torch.bool, device=device).tril(long - short)


_by_length_uncompiled = cast(Callable[..., Tensor], torch.compiler.disable(_by_length))
"""Compiled, each pattern of lengths would need a program of its own."""


def attention_of_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it, with (1, H, N, E) and the `layout` that the decoder was given; returns (1, N, H, E).

    Without a layout it is transformers' own sdpa attention.
    """
    if layout is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    unknown = [name for name in _UNSUPPORTED if others.get(name) is not None]
    if unknown or (scaling is not None and scaling != query.shape[-1] ** -0.5):
        raise ModelError(f"packed attention knows no {', '.join(unknown) or f'scale of {scaling}'}")
    query_NHE, key_NKE, value_NKE = (x[0].transpose(0, 1) for x in (query, key, value))
    attended_NHE = packed_attention(query_NHE, key_NKE, value_NKE, layout.rows, layout.rows, dropout=dropout)
    return attended_NHE[None], None


AttentionInterface.register(NAME, attention_of_transformers)


@contextmanager
def attending(configs: Iterable[Any]) -> Generator[None]:
    """Inside of the block, layers with these configurations use `packed_attention` where their decoder gets a layout.

    transformers makes no mask then, so rows must be padded on the right or not at all. The block must include the
    backward pass: activations that are recomputed need the same attention.
    """
    implementations = [(config, config._attn_implementation) for config in configs]
    for config, _ in implementations:
        config._attn_implementation = NAME
    try:
        yield
    finally:
        for config, name in implementations:
            config._attn_implementation = name


class Bucket(NamedTuple):
    """The sizes of a graph. Rows that are smaller are padded with sequences that nobody reads."""

    tokens: int
    sequences: int
    longest: int


def bucket_of(tokens: int, sequences: int, longest: int) -> Bucket:
    """The bucket for packed rows: eight token counts to a doubling, so that padding costs 6 % on average.

    >>> bucket_of(12_181, 64, 768)
    Bucket(tokens=12288, sequences=128, longest=1024)
    >>> bucket_of(9, 2, 6), bucket_of(4097, 200, 1300)
    (Bucket(tokens=512, sequences=128, longest=1024), Bucket(tokens=4608, sequences=256, longest=2048))
    """
    step = max(_FEWEST_TOKENS, 1 << max(0, (tokens - 1).bit_length() - 4))
    padded = -(-tokens // step) * step
    longest = max(_SHORTEST, _next_power_of_two(longest))
    padding_sequences = -(-(padded - tokens) // longest)
    return Bucket(padded, max(_FEWEST_SEQUENCES, _next_power_of_two(sequences + padding_sequences)), longest)


def nearest(buckets: Iterable[Bucket], needed: Bucket) -> Bucket | None:
    """The smallest bucket that the needed one fits into and that costs at most a quarter more; None if there is none.

    >>> known = [Bucket(4096, 128, 1024), Bucket(8192, 128, 1024)]
    >>> nearest(known, Bucket(3584, 128, 1024)), nearest(known, Bucket(5120, 128, 1024))
    (Bucket(tokens=4096, sequences=128, longest=1024), None)
    """
    wide = [
        bucket
        for bucket in buckets
        if all(has >= needs for has, needs in zip(bucket, needed, strict=True))
        and bucket.tokens <= _MOST_PADDING * needed.tokens
    ]
    return min(wide, default=None)


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
