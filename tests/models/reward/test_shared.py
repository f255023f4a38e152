"""Reward models as adapters for a base that somebody else has in memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from kedge.core.errors import ModelError
from kedge.models.forward.lora import using, with_lora
from kedge.models.loading.hashing import folder_hash
from kedge.models.loading.load import load_causal
from kedge.models.loading.tiny import make_tiny
from kedge.models.reward.ensemble import Ensemble, lora_members, save_ensemble
from kedge.models.reward.reward_files import build, load, save
from kedge.models.reward.reward_model import Normaliser, RewardModel
from kedge.models.reward.shared import load_backbone_adapter, load_head, members_on
from kedge.models.settings import LoraSettings, MeanOfMembers, UncertaintyWeighted

TWO = ("helpful", "harmless")
TOKENS_BT = torch.tensor([[40, 41, 42, 258], [50, 258, 256, 256], [60, 61, 258, 256]])
MASK_BT = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]).bool()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "sft" / "model")


def members(tiny: Path, count: int) -> tuple[RewardModel, ...]:
    """Adapters as after some training, with moments of their own."""
    reward_models = lora_members(
        build(tiny, objectives=TWO, seed=1, dtype="float32"), LoraSettings(rank=4), count=count, seed=7
    )
    with torch.no_grad():
        for index in range(count):
            for name, parameter in reward_models[0].model.named_parameters():
                if name.endswith(f".lora_B.member-{index}"):
                    parameter.copy_(0.03 * torch.sin(torch.arange(parameter.numel()) + 5.0 * index).view_as(parameter))
    own = [Normaliser(mean=(0.1 + i, 1.0), std=(1.0 + i, 0.5)) for i in range(count)]
    return tuple(
        replace(reward_model, facts=replace(reward_model.facts, normaliser=normaliser))
        for reward_model, normaliser in zip(reward_models, own, strict=True)
    )


def raw_scores(causal: PreTrainedModel, name: str, head_KD: Tensor) -> Tensor:
    with torch.no_grad(), using(causal, name):
        hidden_BTD = causal.get_decoder()(TOKENS_BT, use_cache=False).last_hidden_state
    return hidden_BTD[torch.arange(len(MASK_BT)), MASK_BT.sum(dim=1) - 1] @ head_KD.T


def test_one_model_on_a_causal_base(tiny: Path, tmp_path: Path) -> None:
    (reward,) = members(tiny, 1)
    save(reward, tmp_path / "reward")
    shared = members_on(tmp_path / "reward", folder_hash(tiny))
    assert shared is not None
    assert shared.folders == (tmp_path / "reward" / "adapter",)
    assert shared.facts == (reward.facts,)
    assert shared.combine == MeanOfMembers()
    head_KD = load_head(shared.folders[0])
    assert (head_KD.dtype, tuple(head_KD.shape)) == (torch.float32, (2, 96))
    causal = load_backbone_adapter(load_causal(tiny, dtype="float32"), shared.folders[0], name="judge")
    expected = load(tmp_path / "reward", dtype="float32").score_tokens(TOKENS_BT, MASK_BT, normalised=False)
    assert expected.std(dim=0).min() > 1e-3
    torch.testing.assert_close(raw_scores(causal, "judge", head_KD), expected, rtol=1e-5, atol=1e-5)


def test_an_ensemble_beside_a_policy_on_one_base(tiny: Path, tmp_path: Path) -> None:
    reward_models = members(tiny, 3)
    save_ensemble(Ensemble(members=reward_models, combine=UncertaintyWeighted(coef=2.0)), tmp_path / "reward")
    shared = members_on(tmp_path / "reward", folder_hash(tiny))
    assert shared is not None
    assert shared.combine == UncertaintyWeighted(coef=2.0)
    assert shared.facts == tuple(reward_model.facts for reward_model in reward_models)
    causal = with_lora(load_causal(tiny, dtype="float32"), LoraSettings(rank=2), name="policy", seed=3)
    for index, folder in enumerate(shared.folders):
        causal = load_backbone_adapter(causal, folder, name=f"judge-{index}")
    for index, (folder, member) in enumerate(zip(shared.folders, reward_models, strict=True)):
        expected = member.score_tokens(TOKENS_BT, MASK_BT, normalised=False)
        torch.testing.assert_close(
            raw_scores(causal, f"judge-{index}", load_head(folder)), expected, rtol=1e-5, atol=1e-5
        )


def test_other_bases_and_full_models_share_nothing(tiny: Path, tmp_path: Path) -> None:
    save(members(tiny, 1)[0], tmp_path / "one")
    save_ensemble(Ensemble(members=members(tiny, 2), combine=MeanOfMembers()), tmp_path / "several")
    save(build(tiny, seed=1, dtype="float32"), tmp_path / "full")
    whole = tuple(build(tiny, seed=seed, dtype="float32") for seed in (1, 2))
    save_ensemble(Ensemble(members=whole, combine=MeanOfMembers()), tmp_path / "full-ensemble")
    other = folder_hash(make_tiny(tmp_path / "other", seed=1))
    assert members_on(tmp_path / "one", other) is None
    assert members_on(tmp_path / "several", other) is None
    for name in ("full", "full-ensemble"):
        assert members_on(tmp_path / name, folder_hash(tiny)) is None


def test_the_folder_keeps_the_adapter_and_is_a_plain_model(tiny: Path, tmp_path: Path) -> None:
    (reward,) = members(tiny, 1)
    folder = tmp_path / "reward" / "model"
    save(reward, folder)
    assert sorted(path.name for path in (folder / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "base.json",
        "kedge_reward.json",
    ]
    about = json.loads((folder / "adapter" / "base.json").read_text())
    assert (folder / "adapter" / about["relative"]).resolve() == tiny
    assert (about["source"], about["hash"]) == (str(tiny), folder_hash(tiny))
    raw_BK = reward.score_tokens(TOKENS_BT, MASK_BT, normalised=False)
    whole = AutoModelForSequenceClassification.from_pretrained(folder)
    base = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=2)
    adapted = PeftModel.from_pretrained(base, folder / "adapter").eval()
    for model in (whole, adapted):
        with torch.no_grad():
            logits_BK = model(TOKENS_BT, attention_mask=MASK_BT.long()).logits
        torch.testing.assert_close(logits_BK, raw_BK, rtol=1e-5, atol=1e-5)


def test_damaged_adapters_are_refused(tiny: Path, tmp_path: Path) -> None:
    save(members(tiny, 1)[0], tmp_path / "reward")
    adapter = tmp_path / "reward" / "adapter"
    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)
    key = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    save_file({name: weight for name, weight in weights.items() if name != key}, file)
    with pytest.raises(ModelError, match=rf"weight '{key}' is not in the file and would start as random"):
        load_backbone_adapter(load_causal(tiny, dtype="float32"), adapter, name="judge")
    save_file({name: weight for name, weight in weights.items() if "score" not in name}, file)
    with pytest.raises(ModelError, match=r"no score head .*not the adapter of a reward model"):
        load_head(adapter)
    (adapter / "kedge_reward.json").unlink()
    with pytest.raises(ModelError, match=r"not a whole .*kedge_reward\.json"):
        members_on(tmp_path / "reward", folder_hash(tiny))
