"""How many answers are sampled at once: as many as the cache of keys and values has room for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, cast

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

CPU_ROWS: Final = 64
"""Where memory is not measured; a CPU gains little from more."""
MOST_ROWS: Final = 1024
"""The most on a GPU: from here on a step takes longer by as much as it does more."""
SHARE_OF_FREE: Final = 0.5
"""Of the free memory: the cache stays while the model learns, which takes the rest."""


def rows_at_once(
    model: PreTrainedModel,
    asked: int | Literal["auto"],
    *,
    longest: int,
    total: int,
    free_bytes: int | None = None,
) -> int:
    """`asked`, or for `auto` as many rows of `longest` tokens as have room, `total` of them at most."""
    if asked != "auto":
        return asked
    free = free_bytes if free_bytes is not None else _free_bytes(model.device)
    if free is None:
        return max(1, min(CPU_ROWS, total))
    room = int(SHARE_OF_FREE * free) // (longest * cache_bytes_per_token(model))
    return max(1, min(room, MOST_ROWS, total))


def cache_bytes_per_token(model: PreTrainedModel) -> int:
    """Keys and values of all layers for one token."""
    config = cast(Any, model.config.get_text_config())
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize


def _free_bytes(device: torch.device) -> int | None:
    """What the device and the allocator have free; None where that is not known."""
    if device.type != "cuda":
        return None
    import torch

    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached
