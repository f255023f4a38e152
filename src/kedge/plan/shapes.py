"""The shape of a dense decoder, from its configuration alone: how many weights lie where.

Left out: mixtures of experts, and layers that are not all alike. Where a configuration has them it is counted as if all
layers were like the first, and `notes` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kedge.core.errors import ModelError

_BIASED = ("qwen2",)
"""Model types whose queries, keys and values have a bias that their configuration does not mention."""
_TIED = ("gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "phi")
"""Model types whose input and output matrix are one where their configuration does not say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Numbers of a decoder like Llama's."""

    source: str
    layers: int
    width: int
    inner: int
    """Width between the two products of the feed-forward part."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    is_tied: bool
    has_bias: bool
    """On queries, keys and values."""
    window: int | None
    notes: tuple[str, ...] = ()

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def layer_matrices(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of the linear layers of one block: query, key, value, output, gate, up, down."""
        attention = (self.width, self.query_width), *((self.width, self.kv_width),) * 2, (self.query_width, self.width)
        return *attention, (self.width, self.inner), (self.width, self.inner), (self.inner, self.width)

    @property
    def layer_weights(self) -> int:
        """Weights of one block: its matrices, two norms, biases."""
        bias = self.query_width + 2 * self.kv_width if self.has_bias else 0
        return sum(inputs * outputs for inputs, outputs in self.layer_matrices) + 2 * self.width + bias

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """All weights; those of a tied head are counted once.

        >>> shape = ModelShape(source="", layers=30, width=576, inner=1536, heads=9, kv_heads=3, head_dim=64,
        ...     vocabulary=49152, is_tied=True, has_bias=False, window=8192)
        >>> shape.parameters
        134515008
        """
        return self.layers * self.layer_weights + self.width + self.embedding * (1 if self.is_tied else 2)

    @property
    def scoring(self) -> int:
        """Weights of a reward model or critic of this shape: without the output matrix."""
        return self.layers * self.layer_weights + self.width + self.embedding

    def adapters(self, rank: int, targets: tuple[str, ...] = ()) -> int:
        """Weights of one adapter of this rank on all matrices of the blocks, or on those with these names."""
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        chosen = [
            sizes for name, sizes in zip(names, self.layer_matrices, strict=True) if not targets or name in targets
        ]
        return self.layers * rank * sum(inputs + outputs for inputs, outputs in chosen)

    def top(self, layers: int) -> int:
        """Weights of the uppermost blocks and the last norm: what a role owns on a shared trunk."""
        return layers * self.layer_weights + self.width


def shape_of(config: Mapping[str, Any], source: str) -> ModelShape:
    """The shape that a `config.json` describes.

    >>> tiny = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16,
    ...     "num_attention_heads": 2, "vocab_size": 10, "tie_word_embeddings": True}
    >>> shape_of(tiny, "x").parameters
    1400
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    lacking = [name for name in ("num_hidden_layers", "hidden_size", "vocab_size") if not text.get(name)]
    if lacking:
        raise ModelError(
            f"{source}: its config.json has no {', '.join(lacking)}, so its memory cannot be planned; kedge plan knows "
            "decoders like Llama's"
        )
    width, heads = int(text["hidden_size"]), int(text.get("num_attention_heads") or 1)
    experts = text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts")
    is_tied = text.get("tie_word_embeddings", text.get("model_type") in _TIED)
    bias = bool(text.get("attention_bias", text.get("model_type") in _BIASED))
    return ModelShape(
        source=source,
        layers=int(text["num_hidden_layers"]),
        width=width,
        inner=int(text.get("intermediate_size") or 4 * width),
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or width // heads),
        vocabulary=int(text["vocab_size"]),
        is_tied=bool(config.get("tie_word_embeddings", is_tied)),
        has_bias=bias,
        window=text.get("max_position_embeddings"),
        notes=(f"{source} is a mixture of experts, counted as if it had one of them",) if experts else (),
    )
