"""Models made ready to learn: what is frozen, which bases there are, and how a quantised one is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Starcoder2Config, Starcoder2ForCausalLM

from kedge.core.errors import ModelError
from kedge.models.forward.lora import LoraLinear, trainable_names, with_lora
from kedge.models.loading import load
from kedge.models.loading.start import blocks_of, freeze_lowest, save_causal, start_causal, without_dropout
from kedge.models.loading.tiny import make_tiny, tiny_model, tiny_tokenizer
from kedge.models.reward.reward_files import build, save
from kedge.models.reward.reward_model import RewardModel
from kedge.models.settings import LoraSettings

TOKENS_BT = torch.tensor([[7, 70, 21, 9], [1, 99, 3, 44]])


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "tiny-model")


def test_the_lowest_blocks_and_the_embeddings_are_frozen() -> None:
    model = tiny_model()
    everything = trainable_names(model)
    freeze_lowest(model, 0)
    assert trainable_names(model) == everything
    freeze_lowest(model, 1)
    expected = [name for name in everything if name.startswith(("model.layers.1.", "model.norm."))]
    assert trainable_names(model) == expected
    assert len(expected) == 7 + 2 + 1


def test_positions_that_are_learnt_are_embeddings_too() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=16, n_layer=3, n_head=2))
    freeze_lowest(model, 2)
    assert {name.split(".")[1] for name in trainable_names(model)} == {"h", "ln_f"}
    assert {name.split(".")[2] for name in trainable_names(model) if ".h." in name} == {"2"}
    assert [id(block) for block in blocks_of(model)] == [id(block) for block in model.transformer.h]


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2, dropout=0.5)], ids=["full", "lora"])
def test_a_model_without_dropout_says_the_same_each_time(tmp_path: Path, lora: LoraSettings | None) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=16, n_layer=2, n_head=2)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    for keeps_dropout in (True, False):
        model = start_causal(str(tmp_path), lora=lora, device="cpu", seed=1, keeps_dropout=keeps_dropout).train()
        first, again = (model(input_ids=TOKENS_BT).logits for _ in range(2))
        assert torch.equal(first, again) is not keeps_dropout  # that of adapters too: they begin as nothing
        own = [module.dropout["policy"] for module in model.modules() if isinstance(module, LoraLinear)]
        assert bool(own) is (lora is not None)
        assert set(own) <= {0.5}


def test_dropout_that_is_a_number_and_not_a_layer_is_turned_off() -> None:
    config = Starcoder2Config(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, residual_dropout=0.5, embedding_dropout=0.5, attention_dropout=0.5,
    )  # fmt: skip
    model = Starcoder2ForCausalLM(config).train()
    for is_off in (False, True):
        first, again = (model(input_ids=TOKENS_BT).logits for _ in range(2))
        assert torch.equal(first, again) is is_off
        without_dropout(model)


def test_one_block_at_least_learns(tiny: Path) -> None:
    model = load.load_causal(tiny, dtype="float32")
    with pytest.raises(ModelError, match=r"frozen_layers is 2, but .*tiny-model has 2 transformer blocks .* 0 to 1"):
        freeze_lowest(model, 2)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_base_needs_cuda(tiny: Path, bits: int) -> None:
    lora = LoraSettings.model_validate({"base_bits": bits})
    with pytest.raises(ModelError, match=rf"a base of {bits} bits needs a CUDA device, found 'cpu'; use 16 bits here"):
        start_causal(str(tiny), lora=lora, device="cpu", seed=1)
    with pytest.raises(ModelError, match=rf"a base of {bits} bits needs a CUDA device"):
        build(tiny, seed=1, bits=lora.base_bits)


def rounded_base(model: torch.nn.Module) -> None:
    """As a quantised base: marked as one, with other weights than those on disk."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "base_layer" in name:
                parameter.copy_((parameter * 8).round() / 8)
            if "lora_B" in name:
                parameter.copy_(
                    0.05 * torch.sin(torch.arange(parameter.numel(), dtype=torch.float32)).view_as(parameter)
                )


def test_a_quantised_base_is_saved_as_it_is_on_disk_with_the_adapter(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_lora(load.load_causal(tiny), LoraSettings(rank=4, alpha=8.0), name="policy", seed=3)
    monkeypatch.setattr(model, "is_quantized", True, raising=False)
    rounded_base(model)
    save_causal(model, tiny_tokenizer(), tmp_path / "saved")
    reward = build(tiny, objectives=("a", "b"), seed=4)
    judge = with_lora(reward.model, LoraSettings(rank=4, alpha=8.0), name="judge", seed=3)
    monkeypatch.setattr(judge, "is_quantized", True, raising=False)
    rounded_base(judge)
    save(RewardModel(model=judge, tokenizer=reward.tokenizer, facts=reward.facts, adapter="judge"), tmp_path / "reward")

    for name, adapted, folder in (("policy", model, "saved"), ("judge", judge, "reward")):
        learnt = dict(adapted.named_parameters())
        saved = load_weights(tmp_path / folder)
        for at, parameter in tiny_model().named_parameters():
            if at == "lm_head.weight":
                continue
            expected = parameter.detach()
            if "_proj" in at:
                lora = f"{at.removesuffix('.weight')}.lora"
                change = learnt[f"{lora}_B.{name}"] @ learnt[f"{lora}_A.{name}"]
                expected = expected + change.detach() * (8.0 / 4)
            torch.testing.assert_close(saved[at], expected, rtol=1e-5, atol=1e-6)
    head = dict(judge.named_parameters())["score.lora_head.judge.weight"]
    assert torch.equal(load_weights(tmp_path / "reward")["score.weight"], head)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved")(TOKENS_BT).logits.shape == (2, 4, 259)


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")
