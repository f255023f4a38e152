"""GGUF files that are written here: read back they are the model with the format's own rounding, and the tokenizer."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.models.loading.gguf_cases import (
    CASES,
    REFUSED_TOKENIZERS,
    TEXTS,
    TOKENIZERS,
    attempt,
    byte_level,
    make_model,
    read_back,
)

from kedge.core.errors import ModelError
from kedge.models.loading.gguf_vocabulary import UNUSED, vocabulary_of
from kedge.models.loading.gguf_write import needs_gguf, write_gguf
from kedge.models.loading.tiny import tiny_tokenizer


@pytest.mark.parametrize("quantisation", ["f16", "q8_0"])
@pytest.mark.parametrize("name", CASES)
def test_models_are_read_back(name: str, quantisation: str, tmp_path: Path) -> None:
    assert attempt(name, tmp_path, quantisation) is None


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers_are_read_back(name: str, tmp_path: Path) -> None:
    make, model, pre = TOKENIZERS[name]
    tokenizer = make()
    vocabulary, back = read_back(tokenizer, tmp_path / "t.gguf")
    assert (vocabulary.model, vocabulary.pre) == (model, pre)
    assert vocabulary.types[-3:] == (UNUSED,) * 3
    for text in TEXTS:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert back(text, add_special_tokens=False)["input_ids"] == tokens
        assert back.decode(tokens) == tokenizer.decode(tokens)
    assert (back.eos_token_id, back.bos_token_id) == (tokenizer.eos_token_id, tokenizer.bos_token_id)
    assert vocabulary.adds_bos == (model == "llama")


@pytest.mark.parametrize("name", REFUSED_TOKENIZERS)
def test_tokenizers_that_would_be_read_otherwise_are_refused(name: str) -> None:
    make: Callable[[], Any]
    make, words = REFUSED_TOKENIZERS[name]
    tokenizer = make()
    with pytest.raises(ModelError, match="cannot be written to a GGUF file") as raised:
        vocabulary_of(tokenizer, size=len(tokenizer), ends=set())
    assert words in str(raised.value)


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows() -> None:
    with pytest.raises(ModelError, match="embeddings have 258 rows"):
        vocabulary_of(tiny_tokenizer(), size=258, ends=set())


def test_the_token_that_ends_a_turn_is_named_beside_the_end_token() -> None:
    tokenizer = byte_level("smollm")
    begin = tokenizer.bos_token_id
    vocabulary = vocabulary_of(tokenizer, size=len(tokenizer), ends={begin, tokenizer.eos_token_id})
    assert vocabulary.special == {
        "bos": begin,
        "eos": tokenizer.eos_token_id,
        "padding": tokenizer.eos_token_id,
        "eot": begin,
    }


@pytest.mark.parametrize(
    ("value", "words"), [(float("nan"), "not finite"), (1e5, "float16 ends at 65,504; use --quantise q8_0")]
)
def test_weights_that_the_format_cannot_hold(value: float, words: str, tmp_path: Path) -> None:
    model = make_model(CASES["llama, tied"])
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = value
    vocabulary = vocabulary_of(tiny_tokenizer(), size=259, ends=set())
    with pytest.raises(ModelError, match=words):
        write_gguf(model, vocabulary, tmp_path / "m.gguf", quantisation="f16", name="t", chat_template=None)
    assert not (tmp_path / "m.gguf").exists()


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *arguments: Any, **named: Any) -> Any:
        if name == "gguf":
            raise ModuleNotFoundError("No module named 'gguf'")
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ModelError, match=r"pip install 'kedge\[gguf\]'"):
        needs_gguf()
