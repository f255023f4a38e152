"""Models and tokenizers that a GGUF file holds exactly, and those that it has no words for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram
from tokenizers.trainers import BpeTrainer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kedge.core.errors import ModelError
from kedge.models.loading.fidelity import compare, next_token_logprobs
from kedge.models.loading.gguf import open_gguf, read_causal, tokenizer_from
from kedge.models.loading.gguf_vocabulary import PRE_TOKENIZERS, vocabulary_of
from kedge.models.loading.gguf_write import round_as_stored, write_gguf
from kedge.models.loading.tiny import tiny_tokenizer

TEXTS = (
    "the cat isn't on the mat, the cat has 12345 fleas\n\n  and it's 7 o'clock.",
    "In 1987 we\tsaw  IT'S mats!!! Über straße — 海は静か <|end|>\nthe the",
    " leading and trailing \r\n",
)
_CORPUS = [*TEXTS, "the cat sat on the mat and the mat sat on the cat; cats, mats, it's that" * 3, "1987 12345 fleas"]
_SHAPE: Mapping[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 258,
    "bos_token_id": None,
    "pad_token_id": 256,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class ModelCase:
    make: Callable[..., Any]
    config: type[Any]
    changes: Mapping[str, Any]
    refusal: str = ""


CASES: Mapping[str, ModelCase] = {
    "llama, tied": ModelCase(LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama, untied, biases": ModelCase(LlamaForCausalLM, LlamaConfig, {"attention_bias": True}),
    "llama, wide heads": ModelCase(LlamaForCausalLM, LlamaConfig, {"head_dim": 24}),
    "llama 3.1 positions": ModelCase(LlamaForCausalLM, LlamaConfig, {"rope_parameters": _LLAMA3}),
    "linear positions": ModelCase(
        LlamaForCausalLM, LlamaConfig, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e3, "factor": 2.0}}
    ),
    "mistral, sliding window": ModelCase(MistralForCausalLM, MistralConfig, {"sliding_window": 96}),
    "qwen2": ModelCase(Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "rows that are no multiple of 32": ModelCase(LlamaForCausalLM, LlamaConfig, {"intermediate_size": 100}),
    "another activation": ModelCase(LlamaForCausalLM, LlamaConfig, {"hidden_act": "gelu"}, "activation 'gelu'"),
    "biases in the inner products": ModelCase(LlamaForCausalLM, LlamaConfig, {"mlp_bias": True}, "mlp_bias"),
    "dynamic positions": ModelCase(
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "type 'dynamic'",
    ),
}


def make_model(case: ModelCase) -> Any:
    """Random weights, biases and norms included: zeros and ones would hide what is lost."""
    torch.manual_seed(3)
    model = case.make(case.config(**{**_SHAPE, **case.changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(3)
    return model


def attempt(name: str, folder: Path, quantisation: Any) -> str | None:
    """Write and read back; None where the file has exactly the model with its rounding, or it is refused as it must."""
    case = CASES[name]
    model, tokenizer, file = make_model(case), tiny_tokenizer(), folder / "model.gguf"
    try:
        vocabulary = vocabulary_of(tokenizer, size=259, ends={258})
        write_gguf(model, vocabulary, file, quantisation=quantisation, name="t", chat_template=tokenizer.chat_template)
    except ModelError as error:
        is_meant = bool(case.refusal) and case.refusal in str(error)
        return None if is_meant and not file.exists() else f"refused: {error}"
    if case.refusal:
        return "written, and should have been refused"
    texts = [tokenizer(text)["input_ids"] for text in TEXTS]
    before = next_token_logprobs(model, texts)
    round_as_stored(model, quantisation)
    explained = next_token_logprobs(model, texts)
    after = next_token_logprobs(read_causal(open_gguf(file)), texts)
    rest, change = compare(explained, after, texts), compare(before, after, texts)
    if rest.mean_change > 1e-4:
        return f"{rest.mean_change} nats a token beyond the rounding"
    return None if change.mean_change > 0 else "nothing was rounded: what was compared?"


def byte_level(pre: str, **changes: Any) -> PreTrainedTokenizerFast:
    """A small trained tokenizer with the pre-tokenizer of that name."""
    known = PRE_TOKENIZERS[pre]
    backend = Tokenizer(BPE(ignore_merges=known.ignores_merges))
    parts = {
        "Split": lambda part: pre_tokenizers.Split(Regex(part["pattern"]["Regex"]), "isolated"),
        "Digits": lambda part: pre_tokenizers.Digits(individual_digits=True),
        "ByteLevel": lambda part: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=part["use_regex"]),
    }
    made = [parts[part["type"]](part) for part in known.parts]
    backend.pre_tokenizer = pre_tokenizers.Sequence(made) if len(made) > 1 else made[0]
    if known.normalizer:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(_CORPUS, BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False))
    backend.add_special_tokens([AddedToken("<|begin|>", normalized=False), AddedToken("<|end|>", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|end|>", **changes
    )


def sentencepiece(*, legacy: bool = True) -> PreTrainedTokenizerFast:
    """A small tokenizer of SentencePiece's kind: byte tokens, ▁ for spaces, every way to join a token a merge."""
    pieces = ["▁", "t", "h", "e", "c", "a", "s", "m", "o", "n", "i", "d", "'"]
    joined = ["th", "▁th", "▁the", "he", "at", "cat", "▁c", "▁cat", "▁m", "mat", "▁mat", "on", "▁on", "sat"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *joined, *pieces]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [
        (token[:at], token[at:])
        for token in joined
        for at in range(1, len(token))
        if token[:at] in vocabulary and token[at:] in vocabulary
    ]
    backend = Tokenizer(BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:3]])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _prefix_space() -> PreTrainedTokenizerFast:
    tokenizer = byte_level("gpt-2")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def _swallows_spaces() -> PreTrainedTokenizerFast:
    tokenizer = byte_level("gpt-2")
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|turn|>", lstrip=True)]})
    return tokenizer


def _unigram() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)))


def _other_merges() -> PreTrainedTokenizerFast:
    """Byte tokens, but merges that no scores could stand for: `he` only ever comes from h and e after `th`."""
    tokenizer = sentencepiece()
    state = tokenizer.backend_tokenizer.to_str().replace('["t", "h"],', "").replace('["t","h"],', "")
    tokenizer.backend_tokenizer.model = Tokenizer.from_str(state).model
    return tokenizer


def _words() -> PreTrainedTokenizerFast:
    from kedge.demo.model import word_tokenizer

    return word_tokenizer()


TOKENIZERS: Mapping[str, tuple[Callable[[], PreTrainedTokenizerFast], str, str]] = {
    "tiny": (tiny_tokenizer, "gpt2", "gpt-2"),
    "gpt-2": (lambda: byte_level("gpt-2"), "gpt2", "gpt-2"),
    "smollm": (lambda: byte_level("smollm"), "gpt2", "smollm"),
    "qwen2": (lambda: byte_level("qwen2"), "gpt2", "qwen2"),
    "llama-bpe": (lambda: byte_level("llama-bpe"), "gpt2", "llama-bpe"),
    "sentencepiece": (sentencepiece, "llama", "default"),
}
REFUSED_TOKENIZERS: Mapping[str, tuple[Callable[[], PreTrainedTokenizerFast], str]] = {
    "a space is put before": (_prefix_space, "pre-tokenizer (ByteLevel) is none of those"),
    "swallows spaces": (_swallows_spaces, "'<|turn|>' swallows the spaces"),
    "no BPE": (_unigram, "its model is Unigram"),
    "merges without scores": (_other_merges, "not those of a SentencePiece model"),
    "whole words": (_words, "Split + ByteLevel, ignore_merges"),
}


def read_back(tokenizer: PreTrainedTokenizerFast, file: Path) -> Any:
    """The tokenizer of a file that was written with this one."""
    config = LlamaConfig(**{**_SHAPE, "vocab_size": len(tokenizer) + 3, "num_hidden_layers": 1, "hidden_size": 32})
    vocabulary = vocabulary_of(tokenizer, size=config.vocab_size, ends=set())
    model = LlamaForCausalLM(config)
    write_gguf(model, vocabulary, file, quantisation="f16", name="t", chat_template=None)
    return vocabulary, tokenizer_from(open_gguf(file))
