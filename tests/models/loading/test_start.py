"""Models made ready to learn: what is frozen, which bases there are, and how a quantised one is saved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests.models.trainable import trainable_names
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from kedge.core.errors import ModelError
from kedge.models.forward.lora import LoraLinear, adapters_of, required_adapters, using, with_lora
from kedge.models.forward.merging import merge
from kedge.models.loading import load
from kedge.models.loading.hashing import module_hash
from kedge.models.loading.start import (
    blocks_of,
    freeze_lowest,
    load_base,
    rounded_away,
    save_causal,
    start_causal,
    unmerged_base,
    with_start,
    without_dropout,
)
from kedge.models.loading.tiny import make_tiny, tiny_model, tiny_tokenizer
from kedge.models.reward.ensemble import lora_members
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
    with pytest.raises(ModelError, match=rf"weights of {bits} bits need a CUDA device, found 'cpu'; use 16 bits here"):
        start_causal(str(tiny), lora=lora, device="cpu", seed=1)
    with pytest.raises(ModelError, match=rf"weights of {bits} bits need a CUDA device"):
        build(tiny, seed=1, bits=lora.base_bits)


def adapted(folder: Path, settings: LoraSettings | None = None, *, seed: int = 3) -> PreTrainedModel:
    """A policy with an adapter as after some training, too small for bfloat16 to keep all of it."""
    model = start_causal(str(folder), lora=settings or LoraSettings(rank=4, alpha=8.0), device="cpu", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in required_adapters(model).parameters("policy"):
            if ".lora_B." in name:
                parameter.copy_(0.003 * torch.randn(parameter.shape, generator=generator))
    return model


def test_the_adapter_is_saved_beside_the_model_that_it_is_merged_into(tiny: Path, tmp_path: Path) -> None:
    model = adapted(tiny)
    folder = save_causal(model, tiny_tokenizer(), tmp_path / "sft" / "model")
    merged = AutoModelForCausalLM.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(tiny)
    witness = PeftModel.from_pretrained(base, tmp_path / "sft" / "adapter").eval()
    with torch.no_grad():
        expected = model(input_ids=TOKENS_BT).logits
        for other in (merged, witness):
            torch.testing.assert_close(other(input_ids=TOKENS_BT).logits, expected, rtol=1e-5, atol=1e-5)
    save_causal(model, tiny_tokenizer(), folder)  # a stage that is run again replaces both
    assert unmerged_base(folder) == tiny
    assert not (tmp_path / "adapter").exists()
    save_causal(tiny_model(), tiny_tokenizer(), tmp_path / "full" / "model")
    assert not (tmp_path / "full" / "adapter").exists()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["policy", "reward"])
def test_adapters_are_merged_one_matrix_at_a_time_into_the_files_that_transformers_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kind: str
) -> None:
    """A copy of the whole base was the peak of a stage with adapters on a CPU."""
    base = make_tiny(tmp_path / "base") if family == "llama" else tmp_path / "base"
    if family == "gpt2":
        GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=16, n_layer=2, n_head=2)).save_pretrained(base)
        tiny_tokenizer().save_pretrained(base)
    reward: RewardModel | None = None
    if kind == "policy":
        model = adapted(base)
    else:
        (reward,) = lora_members(build(base, seed=1), LoraSettings(rank=2), count=1, seed=2)
        model = reward.model
    whole = merge(model)
    merged, held = LoraLinear.merged, list[StorageWeakRef]()
    most = 0

    def watched(layer: LoraLinear, *args: Any, **options: Any) -> torch.Tensor:
        nonlocal most
        result = merged(layer, *args, **options)
        if not result.is_meta:
            held.append(StorageWeakRef(result.untyped_storage()))
            most = max(most, sum(not storage.expired() for storage in held))
        return result

    monkeypatch.setattr(LoraLinear, "merged", watched)
    if reward is None:
        save_causal(model, tiny_tokenizer(), tmp_path / "model")
    else:
        save(reward, tmp_path / "model")
    assert 1 <= most <= 2
    assert len(held) == len(required_adapters(model).layers)
    whole.save_pretrained(tmp_path / "whole")
    one, other = (tmp_path / name / "model.safetensors" for name in ("model", "whole"))
    assert one.read_bytes() == other.read_bytes()


def test_a_model_of_several_files_is_read_as_it_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.models.loading.start.SHARD_SIZE", "50KB")
    model = tiny_model()
    folder = save_causal(model, tiny_tokenizer(), tmp_path / "model")

    assert len(list(folder.glob("*.safetensors"))) > 1
    assert module_hash(load.load_causal(folder)) == module_hash(model)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)], ids=["full", "lora"])
def test_masters_are_saved_in_float32_and_rounding_is_counted(
    tiny: Path, tmp_path: Path, lora: LoraSettings | None
) -> None:
    model = start_causal(str(tiny), lora=lora, device="cpu", seed=1)
    assert rounded_away(model, {}) is None, "nothing was trained"
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    masters = {
        name: 1e-3 * torch.ones_like(weight) if ".lora_" in name else weight.detach() * (1 + 2**-10)
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    model = model.to(torch.bfloat16)
    for dtype in ("float32", "bfloat16"):
        save_causal(model, tiny_tokenizer(), tmp_path / dtype, weights=masters, dtype=dtype)
        saved = load_weights(tmp_path / dtype)
        assert {str(tensor.dtype) for tensor in saved.values()} == {f"torch.{dtype}"}
        name = "model.layers.0.self_attn.q_proj.weight"
        if lora is None:
            expected = masters[name]
        else:
            expected = start[name.replace(".weight", ".base_layer.weight")] + 2 * 1e-6 * 32 / 2
        torch.testing.assert_close(saved[name].float(), expected.to(saved[name].dtype).float(), rtol=0, atol=1e-6)
    assert model.dtype == torch.bfloat16, "the model itself is as it was"
    lost = rounded_away(model, masters)
    assert lost is not None
    # A change of 2^-10 of a number is an eighth to a quarter of the distance between two numbers of bfloat16. One of
    # 3.2e-5 is less than half of it for numbers of 2^-6 and more: 43 % of a normal distribution of deviation 0.02.
    low, high = (0.75, 0.875) if lora is None else (0.41, 0.46)
    assert low < lost < high


def test_a_stage_starts_from_the_base_and_the_adapter_where_weights_would_be_rounded(
    tiny: Path, tmp_path: Path
) -> None:
    first = adapted(tiny)
    folder = save_causal(first, tiny_tokenizer(), tmp_path / "sft" / "model")
    in_float32 = load_base(str(folder), dtype="float32")
    assert adapters_of(in_float32) is None
    narrow = load_base(str(folder), dtype="bfloat16")
    assert required_adapters(narrow).beneath == ("start",)
    assert required_adapters(narrow).active == ("start",)
    assert trainable_names(narrow) == []

    beneath = with_start(load.load_causal(tiny, dtype="float32"), tmp_path / "sft" / "adapter")
    assert module_hash(beneath) != module_hash(load.load_causal(tiny, dtype="float32"))
    for model in (in_float32, beneath):
        with_lora(model, LoraSettings(rank=2, alpha=2), name="policy", seed=8)
        with torch.no_grad():
            for name, parameter in required_adapters(model).parameters("policy"):
                if ".lora_B." in name:
                    parameter.fill_(0.02)
    with torch.no_grad():
        expected = in_float32(input_ids=TOKENS_BT).logits
        torch.testing.assert_close(beneath(input_ids=TOKENS_BT).logits, expected, rtol=1e-5, atol=1e-5)
        with using(beneath, None):
            torch.testing.assert_close(
                beneath(input_ids=TOKENS_BT).logits, first(input_ids=TOKENS_BT).logits, rtol=1e-5, atol=1e-5
            )
        again = save_causal(beneath, tiny_tokenizer(), tmp_path / "dpo" / "model")
        assert unmerged_base(again) == tiny
        witness = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), tmp_path / "dpo" / "adapter")
        for other in (AutoModelForCausalLM.from_pretrained(again), witness.eval()):
            torch.testing.assert_close(other(input_ids=TOKENS_BT).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changed", ["model", "base", "adapter"])
def test_a_model_base_or_adapter_that_has_changed_is_no_longer_taken_apart(
    tiny: Path, tmp_path: Path, changed: str
) -> None:
    folder = save_causal(adapted(tiny), tiny_tokenizer(), tmp_path / "sft" / "model")
    if changed == "adapter":
        shutil.rmtree(tmp_path / "sft" / "adapter")
    else:
        other = folder if changed == "model" else tiny
        shutil.rmtree(other)
        make_tiny(other, seed=9)
    assert unmerged_base(folder) is None
    assert adapters_of(load_base(str(folder), dtype="bfloat16")) is None


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
