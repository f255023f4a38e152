"""SFT, then a reward model, on the toy shop whose rule of preference is known: how near they come to the best possible.

The model reads whole words and starts from larger random weights than usual, so that it learns in seconds to look up
in the prompt what an answer claims. Without that, a judge of the toy's answers is right in 80 % and never in more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kedge.models.tiny import IM_END, IM_START, PAD, tiny_tokenizer
from kedge.testing import toy

CONTROL = (PAD, IM_START, IM_END, "<|unknown|>")
RECIPE = """
kedge: 1
name: shop
seed: 1
model: ./words
stages:
  sft:
    kind: sft
    data: demonstrations.jsonl
    batch: 16
    micro_batch: 16
    packing: false
    max_length: 64
    samples: 0
    optimiser: {lr: 5e-3, beta2: 0.98}
  reward:
    kind: reward
    from: sft
    data: pairs.jsonl
    heldout: heldout.jsonl
    batch: 16
    micro_batch: 16
    max_length: 64
    if_unfit: go_on
    look: {every: 1000}
    checkpoints: {every: 1000}
    optimiser: {lr: RATE, beta2: 0.98}
"""


def make_words(folder: Path, *, hidden: int = 64, layers: int) -> None:
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


def says_the_fact(row: dict[str, str]) -> bool:
    """Both answers give the asked fact, so that the better one can be told without looking it up."""
    topic = next(one for one in toy.TOPICS if row["prompt"].endswith(one.questions))
    (value,) = [value for value in topic.values if re.search(rf"\b{topic.states.format(value)}\b", row["prompt"])]
    return all(re.search(rf"\b{value}\b", row[side]) for side in ("chosen", "rejected"))


def is_as_the_rule_says(row: dict[str, str]) -> bool:
    return toy.true_score(row["prompt"], row["chosen"]) > toy.true_score(row["prompt"], row["rejected"])


@pytest.fixture
def train(kedge: Callable[..., int], rows: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[float, float]]:
    """Run the recipe on these pairs; gives the accuracy on the held-out ones, and the best that any judge can have.

    A flipped label is right by no rule, so the best is the share of held-out labels that were not flipped: counted on
    these very pairs, because the share itself is uncertain by a point and more on a few thousand.
    """

    def run(pairs: list[dict[str, str]], *, heldout: int, layers: int, rate: float) -> tuple[float, float]:
        make_words(tmp_path / "words", layers=layers)
        rows("demonstrations.jsonl", toy.demonstrations(6400, 1))
        rows("pairs.jsonl", pairs[heldout:])
        rows("heldout.jsonl", pairs[:heldout])
        (tmp_path / "shop.yaml").write_text(RECIPE.replace("RATE", str(rate)))
        assert kedge("run", "shop.yaml", "--no-check") == 0
        report = json.loads((tmp_path / "runs/shop/reward/reward-report.json").read_text())
        assert report["pairs"] == heldout
        return report["accuracy"]["value"], sum(map(is_as_the_rule_says, pairs[:heldout])) / heldout

    return run


@pytest.mark.parametrize("flip", [0.0, 0.2])
def test_where_the_facts_are_right_it_learns_what_people_like(
    flip: float, train: Callable[..., tuple[float, float]]
) -> None:
    pairs = [row for row in toy.pairs(14_000, 2, flip=flip) if says_the_fact(row)]
    accuracy, best = train(pairs, heldout=2000, layers=2, rate=2e-3)
    assert best == pytest.approx(1 - flip, abs=0.03)
    assert accuracy > best - 0.02


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns_to_look_facts_up_in_the_prompt(train: Callable[..., tuple[float, float]]) -> None:
    """The whole rule. A judge that does not look up facts is right in 80.5 %; this one reached 98.5 %."""
    accuracy, best = train(toy.pairs(44_000, 2), heldout=2000, layers=3, rate=1e-3)
    assert best == 1.0
    assert accuracy > 0.95
