"""Write a causal language model and its tokenizer to a GGUF file: Llama, Mistral, SmolLM2 and Qwen2.

Matrices are float16 or Q8_0 (8 bits and a float16 scale for 32 neighbours), vectors float32. What the file cannot say
of a model is refused by its name. Shape letters: N outputs and K inputs of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kedge.core.errors import ModelError
from kedge.models.loading.describe import window_of
from kedge.models.loading.gguf import NAMES, ROPE_FACTORS
from kedge.models.loading.gguf_vocabulary import NO_MERGE, Vocabulary

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

Quantisation = Literal["f16", "q8_0"]
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2"}
"""`model_type` of a configuration, and the name of its computation in GGUF files."""
_PARTS = {name: part for part, name in NAMES.items()}
_BLOCK = 32
_LARGEST = 65504.0
"""Of float16."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight under its name in the file, in the file's order of rows, and the type that it is stored in."""

    name: str
    values: Tensor
    kind: GGMLQuantizationType


def needs_gguf() -> None:
    """Raise where the library is missing."""
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ModelError("writing GGUF files needs the package 'gguf': pip install 'kedge[gguf]'") from error
    del gguf


def check_architecture(config: Any) -> None:
    """Refuse what GGUF readers would compute otherwise, or not at all."""
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise ModelError(f"models of type '{kind}' are not written to GGUF; those of {', '.join(ARCHITECTURES)} are")
    if config.hidden_act != "silu":
        raise ModelError(f"a model with the activation '{config.hidden_act}' is not written to GGUF; only silu is")
    if getattr(config, "mlp_bias", False):
        raise ModelError("a model with mlp_bias is not written to GGUF: its readers would leave these biases out")
    rotary = config.rope_parameters["rope_type"]
    if rotary not in ("default", "linear", "llama3"):
        raise ModelError(f"rotary positions of type '{rotary}' are not written to GGUF; default, linear and llama3 are")


def write_gguf(
    model: PreTrainedModel,
    vocabulary: Vocabulary,
    file: Path,
    *,
    quantisation: Quantisation,
    name: str,
    chat_template: str | None,
) -> None:
    """`model` must be in float32: every weight is rounded once."""
    from gguf import GGUFWriter, LlamaFileType, quantize

    config: Any = model.config
    check_architecture(config)
    architecture = ARCHITECTURES[config.model_type]
    writer = GGUFWriter(file, architecture)
    writer.add_name(name)
    writer.add_file_type(LlamaFileType.MOSTLY_F16 if quantisation == "f16" else LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(2)
    _add_shape(writer, config, architecture)
    _add_vocabulary(writer, vocabulary, chat_template)
    for stored in stored_weights(model, quantisation):
        values: Any = np.ascontiguousarray(stored.values.numpy())
        writer.add_tensor(stored.name, quantize(values, stored.kind), raw_dtype=stored.kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


@torch.no_grad()
def round_as_stored(model: PreTrainedModel, quantisation: Quantisation) -> None:
    """Give every weight of `model` the value that a reader of the file finds there: what the format alone changes."""
    from gguf import GGMLQuantizationType, dequantize, quantize

    for parameter in model.parameters():
        kind = _kind(parameter, quantisation)
        if kind != GGMLQuantizationType.F32:
            rounded: Any = dequantize(quantize(parameter.detach().cpu().numpy(), kind), kind)
            parameter.copy_(torch.from_numpy(np.asarray(rounded, dtype=np.float32)))


def stored_weights(model: PreTrainedModel, quantisation: Quantisation) -> Iterator[Stored]:
    """Every weight once, tied ones under their first name."""
    from gguf import GGMLQuantizationType

    config: Any = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads or config.num_attention_heads}
    rotated = ARCHITECTURES[config.model_type] == "llama"
    for name, parameter in model.named_parameters():
        weight = parameter.detach().cpu()
        stored_name, part = _stored_name(name)
        _check_values(name, weight, quantisation)
        ordered = rope_order(weight, heads[part]) if rotated and part in heads else weight
        yield Stored(stored_name, ordered, _kind(weight, quantisation))
    if config.rope_parameters["rope_type"] == "llama3":
        yield Stored(ROPE_FACTORS, _rope_factors(model), GGMLQuantizationType.F32)


def rope_order(weight: Tensor, heads: int) -> Tensor:
    """The rows of each head with the two rotary halves interleaved (0, n/2, 1, n/2+1, …), as GGUF has them.

    >>> rope_order(torch.tensor([[0.], [1.], [2.], [3.]]), heads=1).flatten().tolist()
    [0.0, 2.0, 1.0, 3.0]
    """
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape).contiguous()


def _stored_name(name: str) -> tuple[str, str]:
    match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
    part = _PARTS.get(match[2]) if match else None
    if match is None or part is None:
        raise ModelError(f"weight '{name}' has no place in a GGUF file of a Llama model; export to hf instead")
    layer = f"blk.{match[1]}." if match[1] else ""
    return f"{layer}{part}.{match[3]}", part


def _kind(weight: Tensor, quantisation: Quantisation) -> GGMLQuantizationType:
    """Vectors are few and delicate; rows that are no multiple of 32 cannot be cut into Q8_0's blocks."""
    from gguf import GGMLQuantizationType

    if weight.dim() == 1:
        return GGMLQuantizationType.F32
    is_wide = quantisation == "f16" or weight.shape[-1] % _BLOCK != 0
    return GGMLQuantizationType.F16 if is_wide else GGMLQuantizationType.Q8_0


def _check_values(name: str, weight: Tensor, quantisation: Quantisation) -> None:
    if not bool(torch.isfinite(weight).all()):
        raise ModelError(f"weight '{name}' has numbers that are not finite; this model is broken, and is not exported")
    largest = float(weight.abs().max())
    if weight.dim() > 1 and quantisation == "f16" and largest > _LARGEST:
        raise ModelError(f"weight '{name}' has {largest:.3g}, and float16 ends at {_LARGEST:,.0f}; use --quantise q8_0")


def _rope_factors(model: PreTrainedModel) -> Tensor:
    rotary: Any = cast(Any, model).model.rotary_emb
    width = 2 * len(rotary.inv_freq)
    base = model.config.rope_parameters["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    return base / rotary.inv_freq.float().cpu()


def _add_shape(writer: GGUFWriter, config: Any, architecture: str) -> None:
    from gguf import RopeScalingType

    heads = config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_vocab_size(config.vocab_size)
    # Longer texts than its sliding window, where it has one, are nothing that a reader of the file computes alike.
    writer.add_context_length(window_of(config) or config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads or heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(head_width)
    if head_width * heads != config.hidden_size:
        if architecture != "llama":
            raise ModelError(f"heads of width {head_width} × {heads} in a width of {config.hidden_size}: no GGUF of it")
        writer.add_key_length(head_width)
        writer.add_value_length(head_width)
    if config.rope_parameters["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])


def _add_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary, chat_template: str | None) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.types))
    if vocabulary.model == "gpt2":
        writer.add_token_merges([" ".join(merge) for merge in vocabulary.merges] or [NO_MERGE])
    else:
        writer.add_token_scores(list(vocabulary.scores))
        writer.add_add_space_prefix(vocabulary.adds_space)
    for name, token in vocabulary.special.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
