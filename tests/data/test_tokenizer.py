from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from kedge.core.errors import ModelError
from kedge.data.tokenizer import load_tokenizer, padding_id, special_ids, tokens_of, tokens_with_spans
from kedge.models.loading.tiny import tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_loads_what_was_saved(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokens_of(tokenizer, "é<|im_end|>") == [195, 169, 258]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (256, 258)
    assert tokenizer.chat_template == tiny_tokenizer().chat_template


def test_the_pre_tokenizer_of_the_file_is_kept(folder: Path) -> None:
    # transformers' own GPT2Tokenizer would put a plain byte-level split in its place
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": "GPT2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert "Digits" in json.dumps(json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"])


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"no tokenizer here \(none of tokenizer\.json, tokenizer\.model.* copy the tokeniz"
    ):
        load_tokenizer(tmp_path)


def test_broken_tokenizer_file(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"the tokenizer of '.*' cannot be loaded: "):
        load_tokenizer(folder)


def test_unreachable_hub() -> None:
    with pytest.raises(ModelError, match=r"the tokenizer of 'no-such-org/nothing' cannot be loaded \(no network"):
        load_tokenizer("no-such-org/nothing")


def test_spans_count_characters_and_are_shared_by_the_bytes_of_one() -> None:
    tokens, spans = tokens_with_spans(tiny_tokenizer(), "aé<|im_end|>b")
    assert tokens == [97, 195, 169, 258, 98]
    assert spans == [(0, 1), (1, 2), (1, 2), (2, 12), (12, 13)]


def test_special_ids_include_unnamed_control_tokens() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.add_special_tokens(["<|tool|>"])
    assert special_ids(tokenizer) == {256, 257, 258, 259}


def test_padding_id_falls_back_to_end_then_zero() -> None:
    tokenizer = tiny_tokenizer()
    assert padding_id(tokenizer) == 256
    tokenizer.pad_token = None
    assert padding_id(tokenizer) == 258
    tokenizer.eos_token = None
    assert padding_id(tokenizer) == 0
