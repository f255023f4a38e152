"""What a loss is a mean over. Free of torch, so that a recipe is checked without it."""

from __future__ import annotations

from typing import Literal

Per = Literal["token", "sequence", "sequence_sum", "constant"]
"""All tokens alike; the mean of sequence means; the mean of sequence sums; the sum over a fixed number of tokens."""
