from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kedge.models.loading.tiny import make_tiny, tiny_model, tiny_tokenizer


def test_tokens_are_bytes_and_three_specials() -> None:
    tokenizer = tiny_tokenizer()
    # A = 65, é = C3 A9, space = 32, 🙂 = F0 9F 99 82, new line = 10, zero byte = 0
    assert tokenizer("Aé 🙂\n\0")["input_ids"] == [65, 195, 169, 32, 240, 159, 153, 130, 10, 0]
    assert tokenizer("<|pad|><|im_start|>a<|im_end|>")["input_ids"] == [256, 257, 97, 258]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (256, 258, None)
    assert len(tokenizer) == 259


def test_every_byte_comes_back() -> None:
    tokenizer = tiny_tokenizer()
    text = "".join(chr(code) for code in range(128)) + "ÿ数𝄞"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.decode([195, 169]) == "é"


def test_template_writes_no_system_prompt() -> None:
    text = tiny_tokenizer().apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_weights_come_from_the_seed_alone() -> None:
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    first = tiny_model(seed=5).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(9)
    again, other = tiny_model(seed=5).state_dict(), tiny_model(seed=6).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_size() -> None:
    # 259·96 embedding; a layer has 96·(96+48+48+96) attention, 3·96·288 mlp, 2·96 norms; 96 for the last norm
    assert sum(p.numel() for p in tiny_model().parameters()) == 259 * 96 + 2 * (96 * 288 + 3 * 96 * 288 + 192) + 96
    config = tiny_model().config
    assert (config.num_attention_heads, config.num_key_value_heads, config.max_position_embeddings) == (4, 2, 1024)


def test_folder_is_read_by_plain_transformers(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", seed=3, hidden=64, layers=3)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    in_memory = tiny_model(seed=3, hidden=64, layers=3)
    assert loaded.state_dict().keys() == in_memory.state_dict().keys()
    assert all(torch.equal(tensor, in_memory.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert (loaded.generation_config.eos_token_id, loaded.generation_config.pad_token_id) == (258, 256)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("é1 2<|im_end|>")["input_ids"] == [195, 169, 49, 32, 50, 258]
    assert tokenizer.chat_template == tiny_tokenizer().chat_template
    assert tokenizer.model_max_length == 1024


def test_cache_keeps_different_tinies_apart(cache: Path) -> None:
    assert make_tiny() == make_tiny(seed=0)
    assert len({make_tiny(), make_tiny(seed=1), make_tiny(hidden=64), make_tiny(layers=1)}) == 4
