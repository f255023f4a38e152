from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tests.models.trainable import trainable_names
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from kedge.core.errors import ModelError
from kedge.models.forward.lora import has_adapters, required_adapters
from kedge.models.forward.merging import merge
from kedge.models.loading.tiny import make_tiny, tiny_model
from kedge.models.reward.ensemble import (
    Ensemble,
    Scorer,
    combined,
    disagreement,
    load_ensemble,
    load_reward,
    lora_members,
    save_ensemble,
)
from kedge.models.reward.reward_files import build, load, save
from kedge.models.reward.reward_model import Normaliser, RewardModel, head_of, reward_role
from kedge.models.settings import LoraSettings, MeanOfMembers, UncertaintyWeighted, WorstMember

TWO = ("helpful", "harmless")
TOKENS_BT = torch.tensor([[40, 41, 42, 258], [50, 258, 256, 256], [60, 61, 258, 256]])
MASK_BT = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]).bool()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "sft" / "model")


def three(tiny: Path) -> Ensemble[RewardModel]:
    """Members that differ: adapters as after some training, heads from their seeds, moments of their own."""
    base = build(tiny, objectives=TWO, seed=1, dtype="float32")
    members = lora_members(base, LoraSettings(rank=4), count=3, seed=7)
    with torch.no_grad():
        for index in range(3):
            for name, parameter in members[0].model.named_parameters():
                if name.endswith(f".lora_B.member-{index}"):
                    parameter.copy_(0.03 * torch.sin(torch.arange(parameter.numel()) + 5.0 * index).view_as(parameter))
    own = [Normaliser(mean=(0.1 * i, 1.0), std=(1.0 + i, 0.5)) for i in range(3)]
    changed = [replace(m, facts=replace(m.facts, normaliser=n)) for m, n in zip(members, own, strict=True)]
    return Ensemble(members=tuple(changed), combine=WorstMember())


def full(tiny: Path) -> Ensemble[RewardModel]:
    members = tuple(build(tiny, objectives=TWO, seed=seed, dtype="float32") for seed in (1, 2))
    return Ensemble(members=members, combine=UncertaintyWeighted(coef=2.0))


def one_by_one(ensemble: Ensemble[RewardModel]) -> Tensor:
    """Raw scores of each member as a plain model of its own, in plain transformers."""
    scores: list[Tensor] = []
    for member in ensemble.members:
        model = member.model
        plain = merge(model, name=member.adapter) if has_adapters(model) else model
        with torch.no_grad():
            scores.append(plain(TOKENS_BT, attention_mask=MASK_BT.long()).logits)
    return torch.stack(scores)


def test_members_share_one_base_and_score_as_if_alone(tiny: Path) -> None:
    ensemble = three(tiny)
    assert len({id(member.model) for member in ensemble.members}) == 1
    raw_MBK = one_by_one(ensemble)
    spread = (raw_MBK[0] - raw_MBK[1]).abs().min(), (raw_MBK[1] - raw_MBK[2]).abs().min()
    assert min(spread) > 1e-3
    scores = ensemble.member_scores(TOKENS_BT, MASK_BT, normalised=False)
    torch.testing.assert_close(scores, raw_MBK, rtol=1e-5, atol=1e-5)
    expected = torch.stack(
        [(raw_MBK[i] - torch.tensor([0.1 * i, 1.0])) / torch.tensor([1.0 + i, 0.5]) for i in range(3)]
    )
    torch.testing.assert_close(ensemble.member_scores(TOKENS_BT, MASK_BT), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ensemble.score_tokens(TOKENS_BT, MASK_BT), expected.amin(0), rtol=1e-5, atol=1e-5)
    assert ensemble.objectives == TWO
    assert ensemble.device == torch.device("cpu")


def test_scoring_leaves_the_base_and_the_training_as_they_were(tiny: Path) -> None:
    ensemble = three(tiny)
    ensemble.members[1].activate()
    model = ensemble.members[0].model
    model.train()
    trainable = trainable_names(model)
    assert len(trainable) == 2 * 7 * 2 + 1
    assert all(name.removesuffix(".weight").endswith(".member-1") for name in trainable)
    ensemble.score_tokens(TOKENS_BT, MASK_BT)
    assert required_adapters(model).active == ("member-1",)
    assert model.training
    assert trainable_names(model) == trainable
    weights = dict(model.named_parameters())
    for name, parameter in tiny_model().model.named_parameters():
        at = name.replace("_proj.weight", "_proj.base_layer.weight")
        assert torch.equal(weights[f"model.{at}"], parameter)


def test_members_start_from_their_seeds(tiny: Path) -> None:
    def start(seed: int) -> tuple[list[Tensor], list[Tensor]]:
        members = lora_members(build(tiny, seed=1, dtype="float32"), LoraSettings(rank=4), count=2, seed=seed)
        weights = dict(members[0].model.named_parameters())
        at = "model.layers.0.self_attn.q_proj.lora_A"
        heads: list[Tensor] = []
        for member in members:
            member.activate()
            heads.append(head_of(member.model).weight.detach())
        return [weights[f"{at}.member-{index}"].detach() for index in range(2)], heads

    (a, heads), (same_a, same_heads), (other_a, other_heads) = start(3), start(3), start(4)
    for index in range(2):
        assert torch.equal(a[index], same_a[index])
        assert torch.equal(heads[index], same_heads[index])
        assert not torch.equal(a[index], other_a[index])
        assert not torch.equal(heads[index], other_heads[index])
    assert not torch.equal(a[0], a[1])
    assert not torch.equal(heads[0], heads[1])


def test_an_ensemble_of_adapters_is_saved_and_loaded(tiny: Path, tmp_path: Path) -> None:
    ensemble = three(tiny)
    folder = tmp_path / "reward" / "model"
    save_ensemble(ensemble, folder)
    assert sorted(path.name for path in folder.glob("member-*/*")) == sorted(
        3 * ["adapter_config.json", "adapter_model.safetensors", "kedge_reward.json"]
    )
    assert not list(folder.glob("*.safetensors"))
    again = load_reward(folder, dtype="float32")
    assert isinstance(again, Ensemble)
    assert again.combine == WorstMember()
    assert [member.facts for member in again.members] == [member.facts for member in ensemble.members]
    assert len({id(member.model) for member in again.members}) == 1
    assert again.tokenizer.pad_token_id == 256
    before = ensemble.member_scores(TOKENS_BT, MASK_BT)
    assert torch.equal(again.member_scores(TOKENS_BT, MASK_BT), before)


def test_the_order_of_members_is_theirs_whatever_the_adapters_are_called(tiny: Path, tmp_path: Path) -> None:
    ensemble = three(tiny)
    turned = replace(ensemble, members=ensemble.members[::-1])
    save_ensemble(turned, tmp_path / "saved")
    again = load_ensemble(tmp_path / "saved", dtype="float32")
    expected = one_by_one(ensemble).flip(0)
    scores = again.member_scores(TOKENS_BT, MASK_BT, normalised=False)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


def test_plain_peft_loads_a_member(tiny: Path, tmp_path: Path) -> None:
    ensemble = three(tiny)
    save_ensemble(ensemble, tmp_path / "saved")
    base = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=2)
    model = PeftModel.from_pretrained(base, tmp_path / "saved" / "member-1").eval()
    with torch.no_grad():
        scores = model(TOKENS_BT, attention_mask=MASK_BT.long()).logits
    torch.testing.assert_close(scores, one_by_one(ensemble)[1], rtol=1e-5, atol=1e-5)


def test_an_ensemble_in_full_is_saved_and_loaded(tiny: Path, tmp_path: Path) -> None:
    ensemble = full(tiny)
    save_ensemble(ensemble, tmp_path / "saved")
    shutil.rmtree(tiny)
    again = load_reward(tmp_path / "saved", dtype="float32")
    assert isinstance(again, Ensemble)
    assert again.combine == UncertaintyWeighted(coef=2.0)
    raw_MBK = one_by_one(ensemble)
    torch.testing.assert_close(again.member_scores(TOKENS_BT, MASK_BT), raw_MBK, rtol=1e-5, atol=1e-5)
    mean_BK, gap_BK = raw_MBK.mean(0), (raw_MBK[0] - raw_MBK[1]) / 2  # the variance of two is half their gap, squared
    scores = again.score_tokens(TOKENS_BT, MASK_BT)
    torch.testing.assert_close(scores, mean_BK - 2.0 * gap_BK**2, rtol=1e-4, atol=1e-5)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved" / "member-1")
    with torch.no_grad():
        logits = plain(TOKENS_BT, attention_mask=MASK_BT.long()).logits
    torch.testing.assert_close(logits, raw_MBK[1], rtol=1e-5, atol=1e-5)


def test_adapters_on_bases_of_their_own_are_saved_in_full(tiny: Path, tmp_path: Path) -> None:
    members = [lora_members(build(tiny, seed=1), LoraSettings(rank=4), count=1, seed=seed)[0] for seed in (1, 2)]
    ensemble = Ensemble(members=tuple(members), combine=MeanOfMembers())
    save_ensemble(ensemble, tmp_path / "saved")
    assert (tmp_path / "saved" / "member-1" / "model.safetensors").is_file()
    again = load_ensemble(tmp_path / "saved")
    expected = ensemble.member_scores(TOKENS_BT, MASK_BT)
    torch.testing.assert_close(again.member_scores(TOKENS_BT, MASK_BT), expected, rtol=1e-5, atol=1e-5)


def test_a_base_that_moved(tiny: Path, tmp_path: Path) -> None:
    ensemble = three(tiny)
    save_ensemble(ensemble, tmp_path / "reward")
    expected = ensemble.score_tokens(TOKENS_BT, MASK_BT)

    def scores_at(folder: Path, base: Path | None = None) -> Tensor:
        return load_ensemble(folder, dtype="float32", base=base).score_tokens(TOKENS_BT, MASK_BT)

    (tmp_path / "elsewhere").mkdir()
    for name in ("sft", "reward"):
        (tmp_path / name).rename(tmp_path / "elsewhere" / name)
    assert torch.equal(scores_at(tmp_path / "elsewhere" / "reward"), expected)
    (tmp_path / "elsewhere" / "sft").rename(tmp_path / "away")
    with pytest.raises(ModelError, match=r"the base of its members is not at .*sft/model; .* as `base`"):
        scores_at(tmp_path / "elsewhere" / "reward")
    assert torch.equal(scores_at(tmp_path / "elsewhere" / "reward", tmp_path / "away" / "model"), expected)
    other = make_tiny(tmp_path / "other", seed=1)
    with pytest.raises(ModelError, match=r"the weights in .*other are not those of the base"):
        scores_at(tmp_path / "elsewhere" / "reward", other)


def test_one_loader_for_both(tiny: Path, tmp_path: Path) -> None:
    def score(judge: Scorer) -> Tensor:
        return judge.score_tokens(TOKENS_BT, MASK_BT)

    reward = build(tiny, objectives=TWO, seed=1, dtype="float32")
    save(reward, tmp_path / "one")
    loaded = load_reward(tmp_path / "one", dtype="float32")
    assert isinstance(loaded, RewardModel)
    assert torch.equal(score(loaded), score(reward))
    save_ensemble(full(tiny), tmp_path / "two")
    assert score(load_reward(tmp_path / "two")).shape == (3, 2)
    with pytest.raises(ModelError, match="two is an ensemble of reward models; load it with load_reward"):
        load(tmp_path / "two")
    with pytest.raises(ModelError, match=r"one: not a whole ensemble .*\(ensemble\.json: .*No such file"):
        load_ensemble(tmp_path / "one")


def test_an_ensemble_with_a_hole(tiny: Path, tmp_path: Path) -> None:
    save_ensemble(three(tiny), tmp_path / "saved")
    (tmp_path / "saved" / "member-1" / "kedge_reward.json").write_text('{"objectives": ["a"]}')
    with pytest.raises(ModelError, match="kedge_reward: max_length, mean, std, template_hash, truncate missing"):
        load_reward(tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved" / "member-1")
    with pytest.raises(ModelError, match=r"member-1: not a whole ensemble of reward models \(kedge_reward\.json"):
        load_reward(tmp_path / "saved")


def test_members_must_agree_on_what_they_judge(tiny: Path) -> None:
    members = (build(tiny, objectives=("a",), seed=1), build(tiny, objectives=("b",), seed=2))
    with pytest.raises(ModelError, match=r"same objectives, found \[\['a'\], \['b'\]\]"):
        Ensemble(members=members, combine=MeanOfMembers())
    with pytest.raises(ModelError, match=r"one or more members .* found \[\]"):
        Ensemble(members=(), combine=MeanOfMembers())


def test_combining_and_disagreement() -> None:
    scores_MBK = torch.tensor([[[1.0, 0.0], [2.0, 5.0]], [[4.0, 0.0], [2.0, 6.0]], [[7.0, 3.0], [5.0, 1.0]]])
    assert combined(scores_MBK, MeanOfMembers()).tolist() == [[4.0, 1.0], [3.0, 4.0]]
    assert combined(scores_MBK, WorstMember()).tolist() == [[1.0, 0.0], [2.0, 1.0]]
    # variances of the population: (9 + 0 + 9)/3, (1 + 1 + 4)/3, (1 + 1 + 4)/3, (1 + 4 + 9)/3
    variance_BK = torch.tensor([[6.0, 2.0], [2.0, 14 / 3]])
    weighted = combined(scores_MBK, UncertaintyWeighted(coef=0.5))
    torch.testing.assert_close(weighted, torch.tensor([[4.0, 1.0], [3.0, 4.0]]) - 0.5 * variance_BK)
    torch.testing.assert_close(disagreement(scores_MBK), variance_BK.sqrt())


def test_the_folder_says_what_it_is(tiny: Path, tmp_path: Path) -> None:
    save_ensemble(three(tiny), tmp_path / "saved")
    about = json.loads((tmp_path / "saved" / "ensemble.json").read_text())
    assert about["members"] == ["member-0", "member-1", "member-2"]
    assert about["combine"] == {"kind": "worst_case"}
    assert about["base"]["relative"] == "../sft/model"
    facts = json.loads((tmp_path / "saved" / "member-2" / "kedge_reward.json").read_text())
    assert (facts["objectives"], facts["mean"], facts["std"]) == (["helpful", "harmless"], [0.2, 1.0], [3.0, 0.5])


@pytest.mark.parametrize("make", [three, full])
def test_as_reward_roles_the_members_say_the_same_and_learn_no_more(
    tiny: Path, make: Callable[[Path], Ensemble[RewardModel]]
) -> None:
    ensemble = make(tiny)
    expected_MBK = ensemble.member_scores(TOKENS_BT, MASK_BT)
    roles = tuple(reward_role(member, compiled=False) for member in ensemble.members)
    found_MBK = Ensemble(members=roles, combine=ensemble.combine).member_scores(TOKENS_BT, MASK_BT)
    torch.testing.assert_close(found_MBK, expected_MBK, rtol=1e-4, atol=1e-6)
    assert not any(parameter.requires_grad for member in ensemble.members for parameter in member.model.parameters())
    assert [role.facts for role in roles] == [member.facts for member in ensemble.members]
