"""How many answers are sampled at once: by the memory that is free on a GPU, a constant elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kedge.rollout.rows import CPU_ROWS, MOST_ROWS, cache_bytes_per_token, rows_at_once

GIB = 2**30
A_TOKEN = 2 * 24 * 2 * 64 * 2
"""Keys and values of 24 layers with 2 heads of 64 numbers of 2 bytes each."""


def model(device: str = "cuda", **config: Any) -> Any:
    """The shape of Qwen2.5-0.5B."""
    shape = {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 896}
    text = SimpleNamespace(**{**shape, **config})
    return SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: text), device=torch.device(device), dtype=torch.bfloat16
    )


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """6 GiB that nobody holds, and 4 that the allocator keeps and nothing is in."""
    for name, value in {
        "mem_get_info": (6 * GIB, 16 * GIB),
        "memory_reserved": 9 * GIB,
        "memory_allocated": 5 * GIB,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)


def test_the_cache_of_a_token() -> None:
    assert cache_bytes_per_token(model()) == A_TOKEN
    assert cache_bytes_per_token(model(num_key_value_heads=None)) == 7 * A_TOKEN  # 14 heads, each with its own
    assert cache_bytes_per_token(model(head_dim=128)) == 2 * A_TOKEN


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("longest", "total", "rows"),
    [
        (512, 10_000, 5 * GIB // (512 * A_TOKEN)),  # half of the 10 GiB: 853
        (1024, 10_000, 426),
        (512, 100, 100),  # all there is to do
        (128, 10_000, MOST_ROWS),
        (10**7, 10_000, 1),  # one, whether or not it fits
    ],
)
def test_as_many_rows_as_half_of_the_free_memory_has_room_for(longest: int, total: int, rows: int) -> None:
    assert rows_at_once(model(), "auto", longest=longest, total=total) == rows


@pytest.mark.usefixtures("card")
def test_a_number_is_taken_as_it_is() -> None:
    assert rows_at_once(model(), 7, longest=10**7, total=3) == 7


def test_memory_that_is_told_is_not_looked_up() -> None:
    assert rows_at_once(model(), "auto", longest=512, total=999, free_bytes=GIB) == GIB // 2 // (512 * A_TOKEN)


def test_on_a_cpu_it_is_a_constant() -> None:
    assert rows_at_once(model("cpu"), "auto", longest=10**7, total=999) == CPU_ROWS
    assert rows_at_once(model("cpu"), "auto", longest=5, total=3) == 3
