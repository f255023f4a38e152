"""Causal attention within sequences that lie end to end, and how the decoders of transformers come to use it.

Queries may be the tails of their sequences: the last query sees all keys of its sequence. On a GPU in two-byte types
it is torch's flash kernel, elsewhere sdpa on neighbours of equal lengths at once. Left out: windows,
sinks, soft-capping, scales other than 1 / sqrt(E). Shape letters: N keys, M queries, S sequences, H heads, K heads of
keys, E width of a head.
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
"""The attention of transformers that this one stands in for, and is where sequences are not packed."""

_LEFT_OUT = ("sliding_window", "softcap", "s_aux", "position_bias")


def packed_attention(query_MHE: Tensor, key_NKE: Tensor, value_NKE: Tensor, tails: Spans, rows: Spans) -> Tensor:
    """What each query finds (M, H, E)."""
    device = query_MHE.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value_NKE.dtype
    query_MHE, key_NKE, value_NKE = query_MHE.to(dtype), key_NKE.to(dtype), value_NKE.to(dtype)
    if device == "cuda" and dtype.itemsize == 2 and query_MHE.shape[-1] % 8 == 0:
        return _flash(query_MHE, key_NKE, value_NKE, tails, rows)
    if tails.is_even and rows.is_even and tails.longest == rows.longest:
        return _in_rows(query_MHE, key_NKE, value_NKE, len(rows.ends_S1) - 1, is_square=True)
    return _by_length_uncompiled(query_MHE, key_NKE, value_NKE, tails.ends_S1, rows.ends_S1)


def _flash(query_MHE: Tensor, key_NKE: Tensor, value_NKE: Tensor, tails: Spans, rows: Spans) -> Tensor:
    """The operator below `torch.nn.attention.varlen`, which spends more of the host's time than the kernel takes."""
    operator = cast(Callable[..., tuple[Tensor, ...]], torch.ops.aten._flash_attention_forward)
    ends, longest = (tails.ends_S1, rows.ends_S1), (tails.longest, rows.longest)
    dropout, is_causal, is_debugged = 0.0, True, False
    return operator(query_MHE, key_NKE, value_NKE, *ends, *longest, dropout, is_causal, is_debugged)[0]


def _in_rows(query_MHE: Tensor, key_NKE: Tensor, value_NKE: Tensor, count: int, *, is_square: bool) -> Tensor:
    """`count` sequences of one length, their queries of one length, which is the same if it `is_square`."""
    query, key, value = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (query_MHE, key_NKE, value_NKE))
    short, long = query.shape[2], key.shape[2]
    # One query sees everything; a mask is needed only for some, but not all.
    mask = None if is_square or short == 1 else _lower_right(short, long, query.device)
    found = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_square, enable_gqa=query.shape[1] != key.shape[1]
    )
    return found.transpose(1, 2).flatten(0, 1)


def _by_length(query_MHE: Tensor, key_NKE: Tensor, value_NKE: Tensor, tails_S1: Tensor, rows_S1: Tensor) -> Tensor:
    found = [
        _in_rows(
            query_MHE[of_query], key_NKE[of_key], value_NKE[of_key], count, is_square=_size(of_query) == _size(of_key)
        )
        for of_query, of_key, count in _runs(tails_S1.tolist(), rows_S1.tolist())
    ]
    return found[0] if len(found) == 1 else torch.cat(found)


def _runs(tails: Sequence[int], rows: Sequence[int]) -> Iterator[tuple[slice, slice, int]]:
    """Neighbours of equal lengths: their queries, their keys, how many they are.

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
    return torch.ones(short, long, dtype=torch.bool, device=device).tril(long - short)


_by_length_uncompiled = cast(Callable[..., Tensor], torch.compiler.disable(_by_length))
"""Compiled, each pattern of lengths would be a program of its own."""


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
    """As transformers calls it, with (1, H, N, E), and with the `layout` that the decoder was given; (1, N, H, E) back.

    Without one it is the attention of transformers.
    """
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    unknown = [name for name in _LEFT_OUT if others.get(name) is not None]
    if unknown or (scaling is not None and scaling != query.shape[-1] ** -0.5):
        raise ModelError(f"packed attention knows no {', '.join(unknown) or f'scale of {scaling}'}")
    query_NHE, key_NKE, value_NKE = (x[0].transpose(0, 1) for x in (query, key, value))
    return packed_attention(query_NHE, key_NKE, value_NKE, layout.rows, layout.rows)[None], None


AttentionInterface.register(NAME, attention_of_transformers)


@contextmanager
def attending(configs: Iterable[Any]) -> Generator[None]:
    """Within, layers with these settings attend by `packed_attention` where their decoder is given packed sequences.

    No mask is made then, so within it rows are padded on the right or not at all. It is to last until backward is
    over: activations that are computed again need the same attention.
    """
    before = [(config, config._attn_implementation) for config in configs]
    for config, _ in before:
        config._attn_implementation = NAME
    try:
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name
