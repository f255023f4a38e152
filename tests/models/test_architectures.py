"""Users bring models of their own: each runs as transformers computes it, or is refused with words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.architectures import CASES, Case, outcome, row_of, write_model
from transformers import AutoModelForCausalLM

from kedge.core.errors import ModelError
from kedge.models.forward import heads
from kedge.models.forward.backbones import backbone_of
from kedge.models.forward.lora import required_adapters, with_lora
from kedge.models.loading.load import load_causal
from kedge.models.reward.reward_files import build
from kedge.models.settings import LoraSettings
from kedge.rollout.cache import for_decoding

BY_NAME = {case.name: case for case in CASES}
PAGE = Path(__file__).parents[2] / "docs/architectures.md"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_model_trains_as_in_transformers_or_is_refused(case: Case, tmp_path: Path) -> None:
    found = outcome(case, tmp_path)
    assert (found.rows, found.reward, found.sampling) == (case.rows, case.reward, case.sampling)
    assert found.distance < 1e-4
    assert found.mismatch < 1e-4


def loaded(name: str, folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(write_model(BY_NAME[name], folder), dtype=torch.float32)


def test_a_decoder_whose_last_norm_has_another_name_is_read(tmp_path: Path) -> None:
    model = loaded("GPT-NeoX", tmp_path).eval()
    tokens_BT = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]])
    mask_BT = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).bool()
    with torch.no_grad():
        logp_BT = heads.language_model(model).logprobs(tokens_BT, mask_BT, mask_BT)
        plain_TV = model(input_ids=tokens_BT[1:, :3]).logits[0].log_softmax(-1)
    torch.testing.assert_close(logp_BT[1, 1:3], plain_TV[[0, 1], [10, 11]])


def test_logits_that_are_changed_in_a_way_no_setting_tells_of_are_refused(tmp_path: Path) -> None:
    model = loaded("GPT-NeoX", tmp_path)
    forward = model.forward

    def halved(**named: object) -> object:
        output = forward(**named)
        output.logits = output.logits / 2
        return output

    heads.output_head(model)
    model.forward = halved
    with pytest.raises(ModelError, match="computes more than its output matrix from hidden states to logits"):
        heads.output_head(model)


def test_tokens_that_see_later_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="its tokens see those after them"):
        backbone_of(loaded("BERT", tmp_path))


def test_adapters_are_on_layers_that_are_products_and_nothing_else(tmp_path: Path) -> None:
    """The router of experts is a linear layer by its class, and gives out choices."""
    write_model(BY_NAME["Llama 4 (text)"], tmp_path)
    model = with_lora(load_causal(tmp_path, dtype="float32"), LoraSettings(rank=2), name="policy", seed=0)
    tokens_BT = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]])
    mask_BT = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).bool()
    heads.language_model(model).logprobs(tokens_BT, mask_BT, mask_BT).sum().backward()
    adapters = required_adapters(model)
    assert {path.rpartition(".")[2] for path in adapters.layers} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    learning = [weight for name, weight in adapters.parameters("policy") if ".lora_B." in name]
    assert all(weight.grad is not None and weight.grad.any() for weight in learning)


def test_layers_that_are_never_called_cannot_have_adapters(tmp_path: Path) -> None:
    write_model(BY_NAME["Mamba"], tmp_path)
    model = with_lora(load_causal(tmp_path, dtype="float32"), LoraSettings(rank=2), name="policy", seed=0)
    with pytest.raises(ModelError, match=r"LoRA targets dt_proj: .* `targets: \[in_proj, out_proj, x_proj\]`"):
        backbone_of(model)
    learns = LoraSettings(rank=2, targets=("in_proj", "out_proj", "x_proj"))
    backbone_of(with_lora(load_causal(tmp_path, dtype="float32"), learns, name="policy", seed=0))


def test_layers_that_keep_another_state_cannot_sample(tmp_path: Path) -> None:
    model = loaded("LFM 2", tmp_path)
    with pytest.raises(ModelError, match=r"layers that are no attention \(conv\)"), for_decoding(model):
        pass


def test_a_model_without_a_class_is_told_in_a_line(tmp_path: Path) -> None:
    write_model(BY_NAME["OLMoE"], tmp_path)
    with pytest.raises(ModelError, match=r"transformers has no such class for it; train the reward model from") as told:
        build(tmp_path, seed=0)
    assert len(str(told.value)) < 300 + len(str(tmp_path))


def test_the_page_has_the_rows_that_are_tested() -> None:
    text = PAGE.read_text()
    assert [row for row in map(row_of, CASES) if row not in text] == []
    assert text.count("\n| ") - 1 == len(CASES)
