"""Causal attention within packed sequences (variable lengths, no padding), and its registration with transformers.

Queries may be the tails of their sequences: the last query attends to all keys of its sequence. On a GPU in two-byte
types it is torch's flash kernel, elsewhere sdpa on runs of neighbours of equal lengths. Left out: sliding windows,
attention sinks, soft-capping, scales other than 1 / sqrt(E). Shape letters: N keys, M queries, S sequences, H heads,
K key-value heads, E width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kedge.core.errors import ModelError
from kedge.models.forward.packing import Layout, Spans

NAME: Final = "kedge_packed"
PLAIN: Final = "sdpa"
"""The attention of transformers that this one replaces, and falls back to where sequences are not packed."""

_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


def packed_attention(query_MHE: Tensor, key_NKE: Tensor, value_NKE: Tensor, tails: Spans, rows: Spans) -> Tensor:
    """The attention output of each query (M, H, E)."""
    device = query_MHE.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value_NKE.dtype
    query_MHE, key_NKE, value_NKE = query_MHE.to(dtype), key_NKE.to(dtype), value_NKE.to(dtype)
    if device == "cuda" and dtype.itemsize == 2 and query_MHE.shape[-1] % 8 == 0:
        return _flash(query_MHE, key_NKE, value_NKE, tails, rows)
    if tails.is_even and rows.is_even and tails.longest == rows.longest:
        return _in_rows(query_MHE, key_NKE, value_NKE, len(rows.ends_S1) - 1, is_square=True)
    return _by_length_uncompiled(query_MHE, key_NKE, value_NKE, tails.ends_S1, rows.ends_S1)


def _flash(query_MHE: Tensor, key_NKE: Tensor, value_NKE: Tensor, tails: Spans, rows: Spans) -> Tensor:
    """The operator below `torch.nn.attention.varlen`, whose own Python takes longer than the kernel does."""
    operator = cast(Callable[..., tuple[Tensor, ...]], torch.ops.aten._flash_attention_forward)
    ends, longest = (tails.ends_S1, rows.ends_S1), (tails.longest, rows.longest)
    dropout, is_causal, is_debugged = 0.0, True, False
    return operator(query_MHE, key_NKE, value_NKE, *ends, *longest, dropout, is_causal, is_debugged)[0]


def _in_rows(query_MHE: Tensor, key_NKE: Tensor, value_NKE: Tensor, count: int, *, is_square: bool) -> Tensor:
    """`count` sequences with equal numbers of keys and of queries; as many queries as keys if it `is_square`."""
    query, key, value = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (query_MHE, key_NKE, value_NKE))
    short, long = query.shape[2], key.shape[2]
    # A single query attends to every key; only several, but not all, queries of a sequence need a mask.
    mask = None if is_square or short == 1 else _lower_right(short, long, query.device)
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_square, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2).flatten(0, 1)


def _by_length(query_MHE: Tensor, key_NKE: Tensor, value_NKE: Tensor, tails_S1: Tensor, rows_S1: Tensor) -> Tensor:
    outputs = [
        _in_rows(query_MHE[queries], key_NKE[keys], value_NKE[keys], count, is_square=_size(queries) == _size(keys))
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
    layout: Layout | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it, with (1, H, N, E) and the `layout` that the decoder was given; returns (1, N, H, E).

    Without a layout it is transformers' own sdpa attention.
    """
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    unknown = [name for name in _UNSUPPORTED if others.get(name) is not None]
    if unknown or (scaling is not None and scaling != query.shape[-1] ** -0.5):
        raise ModelError(f"packed attention knows no {', '.join(unknown) or f'scale of {scaling}'}")
    query_NHE, key_NKE, value_NKE = (x[0].transpose(0, 1) for x in (query, key, value))
    return packed_attention(query_NHE, key_NKE, value_NKE, layout.rows, layout.rows)[None], None


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
