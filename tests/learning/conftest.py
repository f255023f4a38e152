"""Whole recipes on small data, run as the command runs them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kedge.cli.main import main
from kedge.models.loading.tiny import IM_END, IM_START, PAD, tiny_tokenizer
from kedge.testing import toy

MakeWords = Callable[..., None]
CONTROL = (PAD, IM_START, IM_END, "<|unknown|>")


@pytest.fixture(scope="session")
def make_words() -> MakeWords:
    """A model over whole words, which learns the toy shop in seconds."""

    def make(folder: Path, *, hidden: int = 64, layers: int) -> None:
        """A Llama over the words of the toy shop, in the Hugging Face layout."""
        texts = [text for row in toy.pairs(2000, 99) for text in row.values()]
        words = sorted({word for text in (*texts, "user assistant") for word in re.findall(r"\w+|[^\w\s]+", text)})
        backend = Tokenizer(WordLevel({word: i for i, word in enumerate((*CONTROL, *words))}, unk_token=CONTROL[-1]))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        backend.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            pad_token=PAD,
            eos_token=IM_END,
            unk_token=CONTROL[-1],
            additional_special_tokens=[IM_START],
            chat_template=tiny_tokenizer().chat_template,
            model_max_length=64,
        )
        config = LlamaConfig(
            vocab_size=len(CONTROL) + len(words),
            hidden_size=hidden,
            intermediate_size=hidden * 3,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            initializer_range=0.1,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=2,
            tie_word_embeddings=True,
            dtype="float32",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return make


@pytest.fixture
def kedge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """The command line in this process and below `tmp_path`; returns its exit code."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["kedge", *map(str, arguments)])
        code: object = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        assert isinstance(code, int)
        return code

    return run


@pytest.fixture
def rows(tmp_path: Path) -> Callable[[str, Iterable[Mapping[str, Any]]], Path]:
    """Write JSON Lines."""

    def write(name: str, made: Iterable[Mapping[str, Any]]) -> Path:
        file = tmp_path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in made))
        return file

    return write


@pytest.fixture
def shop(
    rows: Callable[..., Path], make_words: MakeWords, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """The toy shop as a recipe, shop.yaml: SFT on its demonstrations, then `stages`; rules.py has its true score."""
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))

    def make(seed: int, stages: str) -> None:
        make_words(tmp_path / "words", layers=2)
        rows("demonstrations.jsonl", toy.demonstrations(6400, seed))
        (tmp_path / "rules.py").write_text(_RULES)
        (tmp_path / "shop.yaml").write_text(_SHOP.replace("SEED", str(seed)) + stages)

    return make


# Answers of the model over whole words have a space before each mark.
_RULES = """
import re
from kedge.testing import toy

def true(answer):
    return toy.true_score(answer.prompt[-1][1], re.sub(r"\\s+([.,!?])", r"\\1", answer.text))
"""
_SHOP = """
kedge: 1
name: shop
seed: SEED
model: ./words
device: cpu
stages:
  sft:
    kind: sft
    data: demonstrations.jsonl
    batch: 16
    micro_batch: 16
    max_length: 64
    samples: 0
    checkpoints: {every: 1000}
    optimiser: {lr: 5e-3, beta2: 0.98}
"""
