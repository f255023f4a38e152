from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tests.models.trainable import trainable_names
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from kedge.core.errors import ModelError
from kedge.models.forward.lora import (
    LoraLinear,
    required_adapters,
    using,
    with_lora,
)
from kedge.models.forward.merging import merge
from kedge.models.loading import load
from kedge.models.loading.adapters import load_adapter, save_adapters
from kedge.models.loading.load import quantisation
from kedge.models.loading.tiny import tiny_model
from kedge.models.settings import LoraSettings

LAYERS, WIDTH, KV_WIDTH, MLP_WIDTH = 2, 96, 48, 288
SMALL = LoraSettings(rank=4, alpha=8.0)
TOKENS_BT = torch.tensor([[7, 70, 21, 9], [1, 99, 3, 44]])


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS_BT).logits


def fill_b(model: nn.Module, adapter: str, value: float) -> None:
    """B starts as zero; an adapter that does something needs another one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(f".lora_B.{adapter}"):
                parameter.copy_(
                    value * torch.sin(torch.arange(parameter.numel(), dtype=torch.float32)).view_as(parameter)
                )


def test_all_linears_of_the_blocks_learn_and_nothing_else() -> None:
    model = with_lora(tiny_model(), SMALL, name="policy", seed=3)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert list(shapes) == trainable_names(model)
    inputs = {"q_proj": WIDTH, "k_proj": WIDTH, "v_proj": WIDTH, "o_proj": WIDTH}
    inputs |= {"gate_proj": WIDTH, "up_proj": WIDTH, "down_proj": MLP_WIDTH}
    outputs = inputs | {"k_proj": KV_WIDTH, "v_proj": KV_WIDTH, "gate_proj": MLP_WIDTH, "up_proj": MLP_WIDTH}
    outputs |= {"down_proj": WIDTH}
    assert len(shapes) == LAYERS * 7 * 2
    for name, shape in shapes.items():
        part = name.split(".lora_")[0].rpartition(".")[2]
        assert shape == ((4, inputs[part]) if ".lora_A." in name else (outputs[part], 4))


def test_a_new_adapter_changes_nothing_and_a_trained_one_adds_scaled_b_times_a() -> None:
    plain = logits(tiny_model())
    model = with_lora(tiny_model(), SMALL, name="policy", seed=3)
    assert torch.equal(logits(model), plain)
    fill_b(model, "policy", 0.3)
    expected = tiny_model()
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            if "_proj" in name:
                at = name.removesuffix(".weight")
                change = weights[f"{at}.lora_B.policy"] @ weights[f"{at}.lora_A.policy"]
                parameter.add_(change, alpha=8.0 / 4)
    assert not torch.allclose(logits(model), plain, rtol=1e-2)
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-4, atol=1e-5)


def test_chosen_targets_and_dropout() -> None:
    settings = LoraSettings(rank=2, targets=("v_proj", "q_proj"), dropout=0.5)
    model = with_lora(tiny_model(), settings, name="policy", seed=0)
    parts = [name.split(".lora_")[0].rpartition(".")[2] for name in trainable_names(model)]
    assert parts == ["q_proj", "q_proj", "v_proj", "v_proj"] * LAYERS
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    assert [layer.dropout for layer in layers] == [{"policy": 0.5}] * (2 * LAYERS)
    q_proj, x = layers[0], torch.ones(4, WIDTH)
    with torch.no_grad():
        q_proj.lora_A["policy"].fill_(1.0)
        q_proj.lora_B["policy"].fill_(1.0)
    added = (q_proj.train()(x) - q_proj.base_layer(x)) / (2 * q_proj.scaling["policy"])
    torch.testing.assert_close(added, added[:, :1].round().expand_as(added))  # twice as many as were not dropped
    assert 0 < added.min() < added.max() < 2 * WIDTH
    torch.testing.assert_close(
        q_proj.eval()(x), q_proj.base_layer(x) + 2 * WIDTH * q_proj.scaling["policy"], rtol=1e-5, atol=1e-4
    )


def test_unknown_target() -> None:
    with pytest.raises(ModelError, match=r"'q_porj': no linear layer of LlamaForCausalLM .*did you mean 'q_proj'"):
        with_lora(tiny_model(), LoraSettings(targets=("q_porj",)), name="policy", seed=0)


def test_the_seed_alone_decides_and_the_global_generator_is_left_alone() -> None:
    def first_a(seed: int, noise: int) -> torch.Tensor:
        torch.manual_seed(noise)
        model = with_lora(tiny_model(), SMALL, name="policy", seed=seed)
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(noise)))
        return dict(model.named_parameters())[trainable_names(model)[0]]

    assert torch.equal(first_a(5, noise=1), first_a(5, noise=2))
    assert not torch.equal(first_a(5, noise=1), first_a(6, noise=1))


def test_several_adapters_on_one_base() -> None:
    model = with_lora(tiny_model(), SMALL, name="first", seed=1)
    fill_b(model, "first", 0.2)
    first = logits(model)
    model = with_lora(model, LoraSettings(rank=2), name="second", seed=2)
    assert len(trainable_names(model)) == LAYERS * 7 * 2
    assert all(name.endswith(".second") for name in trainable_names(model))
    assert torch.equal(logits(model), logits(tiny_model()))
    trainable = trainable_names(model)
    with using(model, "first"):
        assert torch.equal(logits(model), first)
    assert required_adapters(model).active == ("second",)
    assert trainable_names(model) == trainable
    model.requires_grad_(False)
    with using(model, "first"):
        pass
    assert trainable_names(model) == []


def test_adapter_names() -> None:
    model = with_lora(tiny_model(), SMALL, name="first", seed=1)
    with pytest.raises(ModelError, match=r"named 'first' is already there"):
        with_lora(model, SMALL, name="first", seed=1)
    for name in ("keys", "training", "a.b", ""):
        with pytest.raises(ModelError, match="adapter name"):
            with_lora(tiny_model(), SMALL, name=name, seed=1)


def test_merging_leaves_the_model_as_it_is() -> None:
    model = with_lora(tiny_model(), SMALL, name="first", seed=1)
    fill_b(model, "first", 0.2)
    model = with_lora(model, SMALL, name="second", seed=2)
    fill_b(model, "second", 0.4)
    second = logits(model)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    trainable = trainable_names(model)

    merged = {name: merge(model, name=name) for name in ("first", "second")}
    for name, plain in merged.items():
        assert type(plain) is type(tiny_model())
        assert [key for key, _ in plain.named_parameters()] == [key for key, _ in tiny_model().named_parameters()]
        with using(model, name):
            torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(merged["first"]), logits(merged["second"]), rtol=1e-2)
    torch.testing.assert_close(logits(merge(model)), second, rtol=1e-5, atol=1e-5)

    assert torch.equal(logits(model), second)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert trainable_names(model) == trainable
    embedding = merged["first"].get_parameter("model.embed_tokens.weight")
    assert embedding.data_ptr() == model.get_parameter("model.embed_tokens.weight").data_ptr()
    assert merged["first"].get_parameter("lm_head.weight") is embedding


def test_a_merged_model_is_saved_like_any_other(tmp_path: Path) -> None:
    model = with_lora(tiny_model(), SMALL, name="policy", seed=1)
    fill_b(model, "policy", 0.2)
    merge(model).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == set(tiny_model().state_dict()) - {"lm_head.weight"}
    loaded = type(tiny_model()).from_pretrained(tmp_path)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)


def test_matrices_that_are_kept_the_other_way_round() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=16, n_embd=16, n_layer=1, n_head=2)).eval()
    model = with_lora(plain, SMALL, name="policy", seed=1)
    parts = {name.split(".lora_")[0].rpartition(".")[2] for name in trainable_names(model)}
    assert parts == {"c_attn", "c_proj", "c_fc"}
    fill_b(model, "policy", 0.2)
    torch.testing.assert_close(logits(merge(model)), logits(model), rtol=1e-5, atol=1e-5)


def test_recomputed_activations_give_the_same_gradients() -> None:
    def gradients(*, recompute: bool) -> list[torch.Tensor | None]:
        model = with_lora(tiny_model(), SMALL, name="policy", seed=3).train()
        fill_b(model, "policy", 0.3)
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(input_ids=TOKENS_BT, labels=TOKENS_BT).loss.backward()
        return [parameter.grad for _, parameter in required_adapters(model).parameters("policy")]

    for grad, expected in zip(gradients(recompute=True), gradients(recompute=False), strict=True):
        assert grad is not None
        assert expected is not None
        assert torch.equal(grad, expected)


def test_a_base_that_learns_and_autocast_are_computed_too() -> None:
    model = with_lora(tiny_model(), SMALL, name="policy", seed=3)
    fill_b(model, "policy", 0.3)
    expected = logits(model)
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(layer, LoraLinear)
    layer.weight.requires_grad_(True)
    model(input_ids=TOKENS_BT).logits.sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(logits(model).float(), expected, rtol=0, atol=0.2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch's own compiler
def test_a_layer_compiles_as_one_graph_for_all_lengths() -> None:
    model = with_lora(tiny_model(), SMALL, name="policy", seed=3)
    fill_b(model, "policy", 0.3)
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(layer, LoraLinear)
    compiled = torch.compile(layer, dynamic=True, fullgraph=True)

    def results(call: Any, length: int) -> list[torch.Tensor]:
        x = torch.sin(torch.arange(2 * length * WIDTH, dtype=torch.float32)).view(2, length, WIDTH).requires_grad_()
        y = call(x)
        return [y, *torch.autograd.grad(y.square().sum(), (x, layer.lora_A["policy"], layer.lora_B["policy"]))]

    for length in (3, 5, 8):
        torch.testing.assert_close(results(compiled, length), results(layer, length), rtol=1e-4, atol=1e-4)
    x = torch.ones(2, 4, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-5)
        with using(model, None):
            torch.testing.assert_close(compiled(x), layer.base_layer(x), rtol=1e-5, atol=1e-5)


def test_adapters_are_saved_and_loaded(tmp_path: Path) -> None:
    model = with_lora(tiny_model(), SMALL, name="first", seed=1)
    fill_b(model, "first", 0.2)
    expected = logits(model)
    save_adapters(model, tmp_path, ["first"])
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    state = torch.random.get_rng_state()
    loaded = load_adapter(with_lora(tiny_model(), SMALL, name="other", seed=9), tmp_path / "first", name="again")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(logits(loaded), expected)


def test_adapters_that_cannot_be_loaded(tmp_path: Path) -> None:
    save_adapters(with_lora(tiny_model(), SMALL, name="first", seed=1), tmp_path, ["first"])
    folder = tmp_path / "first"
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    key = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"

    save_file({name: weight for name, weight in weights.items() if name != key}, file)
    with pytest.raises(ModelError, match=r"up_proj\.lora_B\.weight' is not in the file and would start as random"):
        load_adapter(tiny_model(), folder, name="first")
    save_file(weights | {"base_model.model.model.layers.7.q_proj.lora_A.weight": torch.zeros(1)}, file)
    with pytest.raises(ModelError, match=r"layers\.7\.q_proj\.lora_A\.weight' has no place in the base"):
        load_adapter(tiny_model(), folder, name="first")
    save_file(weights, file)
    with pytest.raises(ModelError, match=r"has shape \(\d+, \d+\), the base needs"):
        load_adapter(tiny_model(hidden=32), folder, name="first")
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as a LoRA adapter"):
        load_adapter(tiny_model(), folder, name="first")
    file.unlink()
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelError, match=r"first: no adapter_model\.safetensors"):
        load_adapter(tiny_model(), folder, name="first")


def test_quantised_bases_need_cuda_and_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert quantisation(16, "cpu") == {}
    with pytest.raises(ModelError, match="weights of 4 bits need a CUDA device, found 'cpu'"):
        quantisation(4, "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="weights of 8 bits need 'bitsandbytes': pip install bitsandbytes"):
        quantisation(8, "cuda")


def test_quantised_bases_are_not_merged_into(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_lora(tiny_model(), SMALL, name="first", seed=1)
    monkeypatch.setattr(model, "is_quantized", True, raising=False)
    with pytest.raises(ModelError, match="cannot be merged into a quantised base"):
        merge(model)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 0},
        {"alpha": 0},
        {"dropout": 1.0},
        {"targets": ()},
        {"targets": "some"},
        {"rnak": 4},
        {"use_dora": True},
    ],
)
def test_settings_have_ranges(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        LoraSettings.model_validate(wrong)
    assert LoraSettings.model_validate(json.loads('{"targets": ["q_proj"]}')).targets == ("q_proj",)
