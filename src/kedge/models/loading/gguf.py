"""Read GGUF files of the Llama family (Llama, Mistral, SmolLM2) and of Qwen2, and turn one into a model folder.

Weights are dequantised to float32, which holds every value of the file exactly. Other architectures and tokenizers
are refused: their layouts differ in ways that would go unnoticed until the model spoke nonsense.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from kedge.core.errors import ModelError
from kedge.core.files import hash_file, write_json
from kedge.models.loading.gguf_vocabulary import NO_MERGE, PRE_TOKENIZERS, Vocabulary, backend_of

if TYPE_CHECKING:
    from gguf import GGUFReader

NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Parts of a model by their names in GGUF files, and in transformers."""
ROPE_FACTORS = "rope_freqs.weight"
"""What the wavelengths of the rotary positions are multiplied by (Llama 3.1)."""
TOKEN_KEYS: Mapping[str, str] = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
_CONFIGS: Mapping[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen2": Qwen2Config}


def convert(source: Path, folder: Path) -> None:
    """Write the model in `source` into the empty `folder`, with a record of where it came from."""
    reader = open_gguf(source)
    config: Any = config_from(reader)
    if _factors(reader) is not None:
        raise ModelError(f"{source}: its rotary positions have factors of their own, which a folder has no place for")
    save_file(dict(_weights(reader, config)), folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    tokenizer_from(reader).save_pretrained(folder)
    record = {"source": source.name, "source_bytes": source.stat().st_size, "source_hash": hash_file(source)}
    write_json(folder / "kedge.json", record)


def read_causal(reader: GGUFReader) -> PreTrainedModel:
    """The model in a file, in float32, every number of it from the file."""
    config: Any = config_from(reader)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = dict(_weights(reader, config))
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    if (factors := _factors(reader)) is not None:
        model.model.rotary_emb.inv_freq /= factors
    return model.eval()


def open_gguf(source: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise ModelError(f"reading {source.name} needs 'gguf': pip install 'kedge[smollm2]'") from error
    try:
        return GGUFReader(source)
    except (ValueError, OSError) as error:
        raise ModelError(f"{source}: not a readable GGUF file: {error}") from error


def config_from(reader: GGUFReader) -> PreTrainedConfig:
    architecture = _field(reader, "general.architecture")
    if architecture not in _CONFIGS:
        names = " and ".join(f"'{name}'" for name in _CONFIGS)
        raise ModelError(f"GGUF architecture '{architecture}' cannot be converted; only {names} can")

    def of(name: str) -> Any:
        return _field(reader, f"{architecture}.{name}")

    heads, width = of("attention.head_count"), of("embedding_length")
    tensors = {tensor.name for tensor in reader.tensors}
    settings: dict[str, Any] = {
        "architectures": [f"{architecture.capitalize()}ForCausalLM"],
        "vocab_size": len(_field(reader, "tokenizer.ggml.tokens")),
        "hidden_size": width,
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": of("attention.head_count_kv"),
        "max_position_embeddings": of("context_length"),
        # The file stores a float32; the decimal number that was meant is the shortest one that rounds to it.
        "rms_norm_eps": float(str(np.float32(of("attention.layer_norm_rms_epsilon")))),
        "rope_parameters": _rotary(reader, architecture),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": _optional(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _optional(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _optional(reader, "tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }
    if architecture == "llama":
        settings["head_dim"] = _optional(reader, "llama.attention.key_length") or width // heads
        settings["attention_bias"] = "blk.0.attn_q.bias" in tensors
    return _CONFIGS[architecture](**settings)


def _rotary(reader: GGUFReader, architecture: str) -> dict[str, Any]:
    theta = float(_field(reader, f"{architecture}.rope.freq_base"))
    kind = _optional(reader, f"{architecture}.rope.scaling.type") or "none"
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind != "linear":
        raise ModelError(f"GGUF file with rotary positions scaled by '{kind}' cannot be converted; only 'linear' can")
    return {"rope_type": kind, "rope_theta": theta, "factor": _field(reader, f"{architecture}.rope.scaling.factor")}


def vocabulary_from(reader: GGUFReader) -> Vocabulary:
    model = _field(reader, "tokenizer.ggml.model")
    pre = _optional(reader, "tokenizer.ggml.pre") or "default"
    if model != "llama" and (model != "gpt2" or pre not in PRE_TOKENIZERS):
        names = ", ".join(f"('gpt2', '{name}')" for name in PRE_TOKENIZERS)
        raise ModelError(f"GGUF tokenizer ('{model}', '{pre}') cannot be converted; only {names} and 'llama' can")
    keys = {"eot": "eot", **{key: key for key in TOKEN_KEYS.values()}}
    special = {name: _optional(reader, f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    merges: list[str] = _field(reader, "tokenizer.ggml.merges") if model == "gpt2" else []
    return Vocabulary(
        model=model,
        pre=pre,
        tokens=tuple(_field(reader, "tokenizer.ggml.tokens")),
        types=tuple(_field(reader, "tokenizer.ggml.token_type")),
        merges=tuple(
            (left, right) for left, _, right in (merge.partition(" ") for merge in merges if merge != NO_MERGE)
        ),
        scores=tuple(_field(reader, "tokenizer.ggml.scores")) if model == "llama" else (),
        special={name: token for name, token in special.items() if token is not None},
        adds_bos=bool(_optional(reader, "tokenizer.ggml.add_bos_token")),
        adds_eos=bool(_optional(reader, "tokenizer.ggml.add_eos_token")),
        adds_space=bool(_optional(reader, "tokenizer.ggml.add_space_prefix")),
    )


def tokenizer_from(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """The tokenizer of the file, with the pre-tokenizer that GGUF only names."""
    vocabulary = vocabulary_from(reader)
    named = {
        name: vocabulary.tokens[vocabulary.special[key]]
        for name, key in TOKEN_KEYS.items()
        if key in vocabulary.special
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=backend_of(vocabulary),
        **named,
        chat_template=_optional(reader, "tokenizer.chat_template"),
        model_max_length=_field(reader, f"{_field(reader, 'general.architecture')}.context_length"),
        clean_up_tokenization_spaces=False,
    )


def _weights(reader: GGUFReader, config: Any) -> Iterator[tuple[str, Tensor]]:
    from gguf import dequantize

    rotated = config.model_type == "llama"
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads or config.num_attention_heads}
    for tensor in reader.tensors:
        if tensor.name == ROPE_FACTORS:
            continue
        name, part = _name_of(tensor.name)
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        yield name, _restore_rope_order(weight, heads[part]) if rotated and part in heads else weight


def _factors(reader: GGUFReader) -> Tensor | None:
    for tensor in reader.tensors:
        if tensor.name == ROPE_FACTORS:
            return torch.from_numpy(np.array(tensor.data, dtype=np.float32))
    return None


def _name_of(name: str) -> tuple[str, str]:
    """The name in transformers, and the part of a layer: `blk.3.attn_q.weight` has the part `attn_q`."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in NAMES:
        raise ModelError(f"GGUF tensor '{name}' has no place in a Llama model")
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{NAMES[match[2]]}.{match[3]}", match[2]


def _restore_rope_order(weight: Tensor, heads: int) -> Tensor:
    """GGUF interleaves the two rotary halves of each head's rows (0, n/2, 1, n/2+1, …); transformers keeps them apart.

    >>> _restore_rope_order(torch.tensor([[0.], [2.], [1.], [3.]]), heads=1).flatten().tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape).contiguous()


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.fields.get(name)
    if field is None:
        raise ModelError(f"GGUF file has no field '{name}'; it cannot be converted")
    return field.contents()


def _optional(reader: GGUFReader, name: str) -> Any:
    field = reader.fields.get(name)
    return None if field is None else field.contents()
