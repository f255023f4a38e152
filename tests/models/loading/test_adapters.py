"""Adapters in peft's format, with peft itself as the witness: the same files, the same numbers, the same gradients."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tests.models.loading.refused_adapters import CASES, attempt
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kedge.core.errors import ModelError
from kedge.models.forward.lora import LoraLinear, adapters_of, required_adapters, using, with_lora
from kedge.models.loading.adapters import load_adapter, save_adapter
from kedge.models.loading.tiny import make_tiny, tiny_model
from kedge.models.reward.ensemble import lora_members
from kedge.models.reward.reward_files import build
from kedge.models.settings import LoraSettings

TOKENS_BT = torch.tensor([[7, 70, 21, 9], [1, 99, 3, 44]])
SMALL = LoraSettings(rank=4, alpha=8.0)


def gpt2() -> GPT2LMHeadModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=16, n_embd=16, n_layer=2, n_head=2)).eval()


def qwen2() -> Qwen2ForCausalLM:
    """Its queries, keys and values have biases."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1,
        )  # fmt: skip
        return Qwen2ForCausalLM(config).eval()


BASES: dict[str, Callable[[], PreTrainedModel]] = {"llama": tiny_model, "gpt2": gpt2, "qwen2": qwen2}


def trained(model: nn.Module) -> None:
    """As after some training: a new adapter changes nothing."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def logprobs(model: Any) -> Tensor:
    return model(input_ids=TOKENS_BT).logits.log_softmax(-1)


def files(folder: Path) -> tuple[bytes, dict[str, Any]]:
    config = json.loads((folder / "adapter_config.json").read_text())
    return (folder / "adapter_model.safetensors").read_bytes(), config


@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize(
    "settings",
    [SMALL, LoraSettings(rank=3, alpha=5.5, rslora=True, dropout=0.25)],
    ids=["lora", "rslora"],
)
def test_peft_loads_ours_and_saves_the_same_again(family: str, settings: LoraSettings, tmp_path: Path) -> None:
    model = with_lora(BASES[family](), settings, name="policy", seed=3)
    trained(model)
    save_adapter(model, tmp_path / "ours", name="policy")
    witness: Any = PeftModel.from_pretrained(BASES[family](), tmp_path / "ours", is_trainable=True)
    witness.eval()
    assert witness.peft_config["default"].lora_dropout == settings.dropout

    expected, actual = logprobs(witness), logprobs(model)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(actual, logprobs(BASES[family]()), atol=1e-2)
    expected[..., 5].sum().backward()
    actual[..., 5].sum().backward()
    gradients = {name: weight.grad for name, weight in witness.named_parameters() if weight.requires_grad}
    assert len(gradients) == len(required_adapters(model).parameters("policy"))
    for name, parameter in required_adapters(model).parameters("policy"):
        gradient = gradients[f"base_model.model.{name.removesuffix('.policy')}.default.weight"]
        assert gradient is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6)

    witness.save_pretrained(tmp_path / "again")
    (weights, config), (weights_again, config_again) = files(tmp_path / "ours"), files(tmp_path / "again")
    assert weights_again == weights
    config["target_modules"], config_again["target_modules"] = map(
        sorted, (config["target_modules"], config_again["target_modules"])
    )
    assert {name: config_again[name] for name in config} == config


@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize("targets", ["suffixes", "pattern", "excluded", "all-linear"])
def test_what_peft_saved_loads_here(family: str, targets: str, tmp_path: Path) -> None:
    names = ["c_attn", "c_fc"] if family == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    block = "transformer.h.1" if family == "gpt2" else "model.layers.1"
    where: dict[str, Any] = {
        "suffixes": {"target_modules": names},
        "pattern": {"target_modules": rf".*\.1\..*({'|'.join(names)})"},
        "excluded": {"target_modules": names, "exclude_modules": rf"{block}\..*"},
        "all-linear": {"target_modules": "all-linear"},
    }[targets]
    config = LoraConfig(
        r=2, lora_alpha=3, use_rslora=True, task_type="CAUSAL_LM", fan_in_fan_out=family == "gpt2", **where
    )
    torch.manual_seed(1)
    witness: Any = get_peft_model(BASES[family](), config).eval()
    trained(witness)
    witness.save_pretrained(tmp_path / "theirs")
    model = load_adapter(BASES[family](), tmp_path / "theirs", name="policy")
    torch.testing.assert_close(logprobs(model), logprobs(witness), rtol=0, atol=1e-5)
    assert not torch.allclose(logprobs(model), logprobs(BASES[family]()), atol=1e-3)
    save_adapter(model, tmp_path / "ours", name="policy")
    assert files(tmp_path / "ours")[0] == files(tmp_path / "theirs")[0]
    again: Any = PeftModel.from_pretrained(BASES[family](), tmp_path / "ours").eval()
    assert torch.equal(logprobs(again), logprobs(witness))


def test_a_seed_gives_the_adapter_that_peft_gives() -> None:
    model = with_lora(tiny_model(), SMALL, name="policy", seed=3)
    torch.manual_seed(3)
    targets = list(required_adapters(model).known["policy"].targets)
    witness: Any = get_peft_model(tiny_model(), LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    theirs = dict(witness.named_parameters())
    for name, parameter in required_adapters(model).parameters("policy"):
        assert torch.equal(parameter, theirs[f"base_model.model.{name.removesuffix('.policy')}.default.weight"])


def test_score_heads_are_those_of_peft(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "base")
    members = lora_members(build(tiny, objectives=("a", "b"), seed=1, dtype="float32"), SMALL, count=2, seed=7)
    model = members[0].model
    trained(model)
    mask_BT = torch.ones_like(TOKENS_BT)
    for index, member in enumerate(members):
        folder = tmp_path / f"member-{index}"
        save_adapter(model, folder, name=f"member-{index}")
        base = AutoModelForSequenceClassification.from_pretrained(
            tiny, num_labels=2, pad_token_id=model.config.pad_token_id
        )
        witness: Any = PeftModel.from_pretrained(base, folder).eval()
        with torch.no_grad(), using(model, f"member-{index}"):
            scores_BK = model(input_ids=TOKENS_BT, attention_mask=mask_BT).logits
            torch.testing.assert_close(scores_BK, witness(TOKENS_BT, attention_mask=mask_BT).logits, atol=1e-5, rtol=0)
            torch.testing.assert_close(member.score_tokens(TOKENS_BT, mask_BT.bool()), scores_BK, atol=1e-5, rtol=0)
        witness.save_pretrained(tmp_path / "again")
        assert files(tmp_path / "again")[0] == files(folder)[0]
    other = load_adapter(build(tiny, objectives=("a", "b"), seed=9).model, tmp_path / "member-1", name="judge")
    with torch.no_grad(), using(model, "member-1"):
        torch.testing.assert_close(
            other(input_ids=TOKENS_BT, attention_mask=mask_BT).logits,
            model(input_ids=TOKENS_BT, attention_mask=mask_BT).logits,
        )


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_plain_lora_is_refused_by_name(case: str) -> None:
    assert attempt(case) is None


def test_the_masters_are_what_is_saved(tmp_path: Path) -> None:
    """In bfloat16 an adapter is a rounded copy of what was learnt."""
    model = with_lora(tiny_model().to(torch.bfloat16), SMALL, name="policy", seed=3)
    named = required_adapters(model).parameters("policy")
    assert {parameter.dtype for _, parameter in named} == {torch.bfloat16}
    masters = {name: torch.randn(parameter.shape) for name, parameter in named}
    save_adapter(model, tmp_path, name="policy", weights=masters)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved.keys() == {f"base_model.model.{name.removesuffix('.policy')}.weight" for name in masters}
    for name, master in masters.items():
        assert torch.equal(saved[f"base_model.model.{name.removesuffix('.policy')}.weight"], master)


def test_an_adapter_beneath_is_part_of_the_base_and_of_what_is_saved(tmp_path: Path) -> None:
    first = with_lora(tiny_model(), LoraSettings(rank=2, alpha=6, targets=("q_proj", "up_proj")), name="old", seed=1)
    trained(first)
    save_adapter(first, tmp_path / "first", name="old")
    model = load_adapter(tiny_model(), tmp_path / "first", name="start")
    adapters = required_adapters(model)
    adapters.beneath = ("start",)
    with_lora(model, LoraSettings(rank=4, alpha=4, targets=("q_proj", "v_proj"), rslora=True), name="policy", seed=2)
    with using(model, None), torch.no_grad():
        assert adapters.active == ("start",)
        torch.testing.assert_close(logprobs(model), logprobs(first), rtol=0, atol=1e-6)
    with torch.no_grad():
        for name, parameter in adapters.parameters("policy"):
            if ".lora_B." in name:
                parameter.copy_(0.1 * torch.cos(torch.arange(parameter.numel())).view_as(parameter))
    save_adapter(model, tmp_path / "both", name="policy")
    witness: Any = PeftModel.from_pretrained(tiny_model(), tmp_path / "both").eval()
    assert witness.peft_config["default"].r == 2 + 4
    torch.testing.assert_close(logprobs(model), logprobs(witness), rtol=0, atol=1e-5)
    assert not torch.allclose(logprobs(model), logprobs(first), atol=1e-2)
    logprobs(model).sum().backward()
    assert all(parameter.grad is None for _, parameter in adapters.parameters("start"))


def test_models_without_adapters_say_so() -> None:
    model: LlamaForCausalLM = tiny_model()
    assert adapters_of(model) is None
    with pytest.raises(ModelError, match="LlamaForCausalLM has no adapters"):
        required_adapters(model)
    with_lora(model, SMALL, name="policy", seed=0)
    assert isinstance(model.get_submodule("model.layers.0.mlp.up_proj"), LoraLinear)
    with pytest.raises(ModelError, match=r"no adapter named 'polciy'.*did you mean 'policy'"), using(model, "polciy"):
        pass
