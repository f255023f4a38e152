"""The `tiny` model: a Llama of about 250 thousand random weights with a byte-level tokenizer, made in milliseconds.

It knows nothing; it is for tests, demos and trying out recipes. Pad and end-of-turn are different tokens, the chat
template adds no system prompt and marks the assistant's tokens.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kedge.core.chatml import CHATML
from kedge.models.loading.cache import build_once, cache_root

PAD, IM_START, IM_END = "<|pad|>", "<|im_start|>", "<|im_end|>"
CONTEXT = 1024
_FORMAT = 1


def make_tiny(folder: Path | None = None, *, seed: int = 0, hidden: int = 96, layers: int = 2) -> Path:
    """The folder of a tiny model in the Hugging Face layout; without `folder`, one in the cache."""
    place = folder or cache_root() / "models" / f"tiny-v{_FORMAT}-seed{seed}-hidden{hidden}-layers{layers}"
    return build_once(place, partial(_write, seed=seed, hidden=hidden, layers=layers))


def tiny_model(*, seed: int = 0, hidden: int = 96, layers: int = 2) -> LlamaForCausalLM:
    """The same weights for the same arguments, in float32; the global random state is left as it was."""
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=256 + 3,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=256,
        bos_token_id=None,
        eos_token_id=258,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(pad_token_id=256, eos_token_id=258)
    return model.eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte (token id = byte value), then pad 256, start of turn 257, end of turn 258."""
    backend = Tokenizer(BPE(vocab={letter: byte for byte, letter in enumerate(_byte_letters())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in (PAD, IM_START, IM_END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=IM_END,
        additional_special_tokens=[IM_START],
        chat_template=CHATML,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def _write(folder: Path, *, seed: int, hidden: int, layers: int) -> None:
    model = tiny_model(seed=seed, hidden=hidden, layers=layers)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def _byte_letters() -> list[str]:
    """The printable letter that byte-level tokenizers write for each byte, in the order of the bytes.

    Printable bytes stand for themselves; the others take the code points from 256 on, in order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
