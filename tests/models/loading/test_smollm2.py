"""The built-in real model. Only the tests that need its 135 million weights are slow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from kedge.core.errors import ModelError
from kedge.core.files import hash_file
from kedge.data.examples import Message
from kedge.data.preflight import preflight
from kedge.data.template import encode_conversation
from kedge.models.loading import gguf
from kedge.models.loading.aliases import PACKAGED, folder_of, gguf_file
from kedge.models.loading.gguf import config_from, open_gguf, tokenizer_from
from kedge.models.loading.load import load_causal

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TALK = (
    Message("user", "Add 12 and 7."),
    Message("assistant", "It is 19. 🙂"),
    Message("user", "And 1?"),
    Message("assistant", "20"),
)


@pytest.fixture(scope="module")
def source() -> Path:
    return gguf_file(PACKAGED["smollm2-135m"])


@pytest.fixture(scope="module")
def reader(source: Path) -> Any:
    return open_gguf(source)


@pytest.fixture(scope="module")
def tokenizer(reader: Any) -> PreTrainedTokenizerFast:
    return tokenizer_from(reader)


def test_config(reader: Any) -> None:
    config = config_from(reader)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (49152, 576, 1536)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.max_position_embeddings, config.rms_norm_eps, config.tie_word_embeddings) == (8192, 1e-5, True)
    assert config.rope_parameters["rope_theta"] == 100_000
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)


def test_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|im_end|>", 2)
    assert len(tokenizer) == 49152
    assert tokenizer("<|endoftext|><repo_name>")["input_ids"] == [0, 3]
    assert tokenizer.decode([1, 3, 72], skip_special_tokens=True) == tokenizer.decode([72])


def test_digits_stand_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    # Without the digit split, the two new lines before a digit fall apart into [198, 198].
    assert tokenizer.convert_ids_to_tokens(tokenizer("a 1984\n\n35")["input_ids"]) == [
        *("a", "Ġ", "1", "9", "8", "4", "ĊĊ", "3", "5")
    ]
    text = "  In 2024, ½ of café 数学 🙂\n\n\t- x"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_saved_tokenizer_is_the_same(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "a 1984\n\n35 <|im_start|>"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.bos_token_id) == (2, 2, 1)
    assert loaded.chat_template == tokenizer.chat_template


def test_every_answer_and_its_end_is_trained(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded = encode_conversation(tokenizer, TALK)
    assert tokenizer.decode(encoded.tokens) == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        "<|im_start|>user\nAdd 12 and 7.<|im_end|>\n<|im_start|>assistant\nIt is 19. 🙂<|im_end|>\n"
        "<|im_start|>user\nAnd 1?<|im_end|>\n<|im_start|>assistant\n20<|im_end|>\n"
    )
    trained = [token for token, on in zip(encoded.tokens, encoded.assistant_mask, strict=True) if on]
    assert tokenizer.decode(trained) == "It is 19. 🙂<|im_end|>20<|im_end|>"


def test_preflight_knows_its_ways_and_finds_no_fault(tokenizer: PreTrainedTokenizerFast) -> None:
    findings = {finding.code: finding for finding in preflight(tokenizer, config_vocab_size=49152, window=2048)}
    assert findings.keys() == {"tokenizer.pad_is_eos", "template.default_system"}
    assert {finding.level for finding in findings.values()} == {"info"}
    assert findings["template.default_system"].evidence == {"system": SYSTEM}


def test_missing_gguf_library_names_the_extra(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(
        ModelError, match=r"reading SmolLM2-135M-Instruct\.Q4_1\.gguf needs 'gguf': pip install 'kedge\[smollm2\]'"
    ):
        open_gguf(source)


def test_not_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"hello, this is no model" * 10)
    with pytest.raises(ModelError, match=r"x\.gguf: not a readable GGUF file"):
        open_gguf(tmp_path / "x.gguf")


class Fields:
    """The part of a reader that holds metadata."""

    def __init__(self, **fields: object) -> None:
        self.fields = {name.replace("__", "."): self.Field(value) for name, value in fields.items()}

    class Field:
        def __init__(self, value: object) -> None:
            self.value = value

        def contents(self) -> object:
            return self.value


def test_other_files_are_refused() -> None:
    other: Any = Fields(general__architecture="gemma", tokenizer__ggml__model="gpt2", tokenizer__ggml__pre="tekken")
    with pytest.raises(ModelError, match="GGUF architecture 'gemma' cannot be converted; only 'llama' and 'qwen2' can"):
        config_from(other)
    with pytest.raises(ModelError, match=r"GGUF tokenizer \('gpt2', 'tekken'\) cannot be converted"):
        tokenizer_from(other)
    empty: Any = Fields()
    with pytest.raises(ModelError, match=r"GGUF file has no field 'general\.architecture'"):
        config_from(empty)
    with pytest.raises(ModelError, match=r"GGUF tensor 'blk\.0\.ffn_gate_inp\.weight' has no place in a Llama model"):
        gguf._name_of("blk.0.ffn_gate_inp.weight")


@pytest.mark.slow
def test_conversion_is_bit_identical_and_answers(source: Path, cache: Path) -> None:
    from transformers import GgufConfig

    folder = folder_of("smollm2-135m")
    record = json.loads((folder / "kedge.json").read_text())
    assert record == {"source": source.name, "source_bytes": source.stat().st_size, "source_hash": hash_file(source)}
    changed = (folder / "model.safetensors").stat().st_mtime_ns
    assert folder_of("smollm2-135m") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == changed

    model = load_causal("smollm2-135m", dtype="float32")
    by_transformers = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    ).state_dict()
    ours = model.state_dict()
    assert ours.keys() == by_transformers.keys()
    assert [name for name in ours if not torch.equal(ours[name], by_transformers[name])] == []

    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
