"""The demo's model: a small Llama with random weights, and a tokenizer with one token a word of the demo's world.

Any other text is tokenized into bytes, so nothing is lost. Nothing is trained here.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kedge.core.chatml import CHATML
from kedge.demo import phrases
from kedge.models.loading.cache import build_once
from kedge.models.loading.load import no_bars
from kedge.models.loading.tiny import IM_END, IM_START, PAD

CONTEXT = 128
"""Tokens of prompt and reply together."""

_PIECE = r" ?\w+|[^\w\s]|\s"


def make_model(folder: Path, *, seed: int) -> Path:
    """Write the model in the Hugging Face layout, the same for the same seed; gives the folder."""
    return build_once(folder, partial(_write, seed=seed))


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each of the 256 bytes and for each word with the space before it; BPE without merges joins nothing.

    >>> tokenizer = word_tokenizer()
    >>> tokenizer.tokenize("Thank you!"), tokenizer.tokenize("Hm")
    (['Thank', 'Ġyou', '!'], ['H', 'm'])
    >>> tokenizer.decode(tokenizer("Hm, thank you!").input_ids)
    'Hm, thank you!'
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys((*letters, *words()))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
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


def words() -> list[str]:
    """The words of the demo's world as tokens of a byte-level tokenizer: Ġ is the space before a word."""
    facts = (*phrases.ORDERS, *phrases.ITEMS, *phrases.REMEDIES)
    texts = (*phrases.all_sentences(), *(f" {sentence}" for sentence in phrases.all_sentences()), "user", "assistant")
    pieces = {piece for text in texts for piece in re.findall(_PIECE, re.sub(r"{\w+}", "", text))}
    return sorted({piece.replace(" ", "Ġ") for piece in (*pieces, *(f" {fact}" for fact in facts))})


def word_model(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> LlamaForCausalLM:
    """Random weights, the same for the same arguments; the global random state is left as it was."""
    ids = tokenizer.get_vocab()
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(ids),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        # Larger than usual: words differ from the first step on, and copying facts from the prompt is learnt sooner.
        initializer_range=0.1,
        tie_word_embeddings=True,
        pad_token_id=ids[PAD],
        bos_token_id=None,
        eos_token_id=ids[IM_END],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(pad_token_id=ids[PAD], eos_token_id=ids[IM_END])
    return model.eval()


def _write(folder: Path, *, seed: int) -> None:
    tokenizer = word_tokenizer()
    with no_bars():
        word_model(tokenizer, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
