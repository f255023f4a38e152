"""The demo's model and tokenizer: one token a word, any text kept, the same weights for a seed."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.data.tokenizer import load_tokenizer
from kedge.demo.model import CONTEXT, make_model, word_model, word_tokenizer
from kedge.demo.world import Sizes, make
from kedge.models.loading.load import load_causal

TOKENIZER = word_tokenizer()


@given(st.text(alphabet=st.characters(blacklist_categories=("Cs",))))
def test_any_text_comes_back_as_it_was(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text, split_special_tokens=True).input_ids) == text


def test_every_message_takes_a_token_a_word_and_fits_the_window() -> None:
    for row in make(2, Sizes(demonstrations=500, pairs=1, prompts=1, heldout=1))["demonstrations"]:
        for message in row["messages"]:
            pieces = TOKENIZER.tokenize(message["content"])
            marks = sum(message["content"].count(mark) for mark in ".,!?")
            assert len(pieces) == len(message["content"].split()) + marks
        text = str(TOKENIZER.apply_chat_template(row["messages"], tokenize=False))
        assert len(TOKENIZER(text).input_ids) <= CONTEXT


def test_the_same_seed_gives_the_same_weights_and_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (word_model(TOKENIZER, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_the_folder_loads_as_any_other_model(tmp_path: Path, message: str) -> None:
    folder = make_model(tmp_path / "model", seed=1)
    loaded, tokenizer = load_causal(folder, dtype="float32"), load_tokenizer(folder)
    ids = tokenizer(message).input_ids
    assert ids == TOKENIZER(message).input_ids
    assert tokenizer.decode(ids) == message
    with torch.no_grad():
        logits = loaded(torch.tensor([ids])).logits
        expected = word_model(TOKENIZER, seed=1)(torch.tensor([ids])).logits
    torch.testing.assert_close(logits, expected)
    assert loaded.config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id
    assert sum(weight.numel() for weight in loaded.parameters()) == 117_760
