"""Turn a Llama-shaped GGUF file with a SmolLM tokenizer into a model folder in the Hugging Face layout.

Weights are dequantised to float32, which holds every value of the file exactly. Other architectures and tokenizers
are refused: their layouts differ in ways that would go unnoticed until the model spoke nonsense.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from kedge.core.errors import ModelError
from kedge.core.files import hash_file, write_json

if TYPE_CHECKING:
    from gguf import GGUFReader

_NAMES = {
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
_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
_CONTROL_TOKEN = 3  # `tokenizer.ggml.token_type` of tokens that stand for themselves, never for text


def convert(source: Path, folder: Path) -> None:
    """Write the model in `source` into the empty `folder`, with a record of where it came from."""
    reader = open_gguf(source)
    config = config_from(reader)
    weights = dict(_weights(reader, config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    tokenizer_from(reader).save_pretrained(folder)
    record = {"source": source.name, "source_bytes": source.stat().st_size, "source_hash": hash_file(source)}
    write_json(folder / "kedge.json", record)


def open_gguf(source: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise ModelError(f"reading {source.name} needs 'gguf': pip install 'kedge[smollm2]'") from error
    try:
        return GGUFReader(source)
    except (ValueError, OSError) as error:
        raise ModelError(f"{source}: not a readable GGUF file: {error}") from error


def config_from(reader: GGUFReader) -> LlamaConfig:
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise ModelError(f"GGUF architecture '{architecture}' cannot be converted; only 'llama' can")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(_field(reader, "tokenizer.ggml.tokens")),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=_field(reader, "llama.attention.head_count"),
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=_field(reader, "llama.context_length"),
        # The file stores a float32; the decimal number that was meant is the shortest one that rounds to it.
        rms_norm_eps=float(str(np.float32(_field(reader, "llama.attention.layer_norm_rms_epsilon")))),
        rope_parameters={"rope_type": "default", "rope_theta": _field(reader, "llama.rope.freq_base")},
        tie_word_embeddings=not any(tensor.name == "output.weight" for tensor in reader.tensors),
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
        dtype="float32",
    )


def tokenizer_from(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """The tokenizer of the file, with the digit-splitting that GGUF names only by the word `smollm`."""
    flavour = (_field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre"))
    if flavour != ("gpt2", "smollm"):
        raise ModelError(f"GGUF tokenizer {flavour} cannot be converted; only ('gpt2', 'smollm') can")
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    backend = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    named = {name: tokens[_field(reader, f"tokenizer.ggml.{key}_token_id")] for name, key in _NAMED_TOKENS.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **named,
        chat_template=_field(reader, "tokenizer.chat_template"),
        model_max_length=_field(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
    )


def _weights(reader: GGUFReader, config: LlamaConfig) -> Iterator[tuple[str, torch.Tensor]]:
    from gguf import dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads or config.num_attention_heads}
    for tensor in reader.tensors:
        name, part = _name_of(tensor.name)
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        yield name, _restore_rope_order(weight, heads[part]) if part in heads else weight


def _name_of(name: str) -> tuple[str, str]:
    """The name in transformers, and the part of a layer: `blk.3.attn_q.weight` has the part `attn_q`."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if match is None or match[2] not in _NAMES:
        raise ModelError(f"GGUF tensor '{name}' has no place in a Llama model")
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{_NAMES[match[2]]}.weight", match[2]


def _restore_rope_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF interleaves the two rotary halves of each head's rows (0, n/2, 1, n/2+1, …); transformers keeps them apart.

    >>> _restore_rope_order(torch.tensor([[0.], [2.], [1.], [3.]]), heads=1).flatten().tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns).contiguous()


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.fields.get(name)
    if field is None:
        raise ModelError(f"GGUF file has no field '{name}'; it cannot be converted")
    return field.contents()
