"""Several reward models as one judge: the score of each member, one combined score, and how much they disagree.

LoRA members share one base in memory and on disk: the folder holds their adapters and heads in peft's format and names
the base. `PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(base, num_labels=K), member)`
reads one without Kedge. Members trained in full are N folders of reward models.
Shape letters: M members, B sequences, T token positions, K objectives.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from peft import PeftModel
from pydantic import TypeAdapter
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kedge.algorithms.combine import ensemble_mean, uncertainty_weighted, worst_case
from kedge.core.errors import ModelError
from kedge.core.files import write_json
from kedge.core.seeds import seed_for
from kedge.models.forward.lora import base_of, load_adapter, save_adapters, with_lora
from kedge.models.loading.load import DTypeName
from kedge.models.reward.base_link import about_base, find_base
from kedge.models.reward.reward_files import ENSEMBLE, FACTS, build, load, save, tokenizer_of, whole_folder
from kedge.models.reward.reward_model import RewardFacts, RewardModel, facts_from, head_of, start_head
from kedge.models.settings import (
    BaseBits,
    Combine,
    LoraSettings,
    MeanOfMembers,
    UncertaintyWeighted,
    WorstMember,
)


class Scorer(Protocol):
    """What a reward model and an ensemble have in common."""

    @property
    def objectives(self) -> tuple[str, ...]: ...
    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...
    @property
    def device(self) -> torch.device: ...
    def score_tokens(self, tokens_BT: Tensor, attention_mask_BT: Tensor, *, normalised: bool = True) -> Tensor: ...


class Member(Scorer, Protocol):
    """A scorer that knows what its scores mean."""

    @property
    def facts(self) -> RewardFacts: ...


MemberT_co = TypeVar("MemberT_co", bound=Member, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ensemble(Generic[MemberT_co]):
    members: tuple[MemberT_co, ...]
    combine: Combine

    def __post_init__(self) -> None:
        if len({member.objectives for member in self.members}) != 1:
            raise ModelError(
                "an ensemble needs one or more members with the same objectives, "
                f"found {[list(member.objectives) for member in self.members]}"
            )

    @property
    def objectives(self) -> tuple[str, ...]:
        return self.members[0].objectives

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.members[0].tokenizer

    @property
    def device(self) -> torch.device:
        return self.members[0].device

    def member_scores(self, tokens_BT: Tensor, attention_mask_BT: Tensor, *, normalised: bool = True) -> Tensor:
        """`scores_MBK`: what each member says, each normalised by its own moments."""
        each = [member.score_tokens(tokens_BT, attention_mask_BT, normalised=normalised) for member in self.members]
        return torch.stack(each)

    def score_tokens(self, tokens_BT: Tensor, attention_mask_BT: Tensor, *, normalised: bool = True) -> Tensor:
        """`scores_BK`: the members' scores combined."""
        return combined(self.member_scores(tokens_BT, attention_mask_BT, normalised=normalised), self.combine)


def combined(scores_MBK: Tensor, how: Combine) -> Tensor:
    """
    >>> combined(torch.tensor([[[1.]], [[3.]]]), WorstMember()).tolist()
    [[1.0]]
    """
    match how:
        case MeanOfMembers():
            return ensemble_mean(scores_MBK)
        case WorstMember():
            return worst_case(scores_MBK)
        case UncertaintyWeighted(coef=coef):
            return uncertainty_weighted(scores_MBK, coef=coef)


def disagreement(scores_MBK: Tensor) -> Tensor:
    """`std_BK` over the members, of the population; high where they have learned different things.

    >>> disagreement(torch.tensor([[[1., 2.]], [[5., 2.]]])).tolist()
    [[2.0, 0.0]]
    """
    return scores_MBK.std(dim=0, correction=0)


def lora_members(base: RewardModel, lora: LoraSettings, *, count: int, seed: int) -> tuple[RewardModel, ...]:
    """`count` members over the weights of `base`, each with its own adapter and head; the first one is active.

    The model of `base` is changed in place and answers for the members from now on.
    """
    model = base.model
    for index in range(count):
        model = with_lora(model, lora, name=_name(index), seed=seed_for(seed, "adapter", index))
        start_head(head_of(model), seed=seed_for(seed, "head", index))
    members = tuple(replace(base, model=model, adapter=_name(index)) for index in range(count))
    members[0].activate()
    return members


def save_ensemble(ensemble: Ensemble[RewardModel], folder: Path) -> None:
    """Write `folder` as a whole: `ensemble.json` and one folder a member."""
    shared = _shared_model(ensemble)
    # Adapters keep their names, which may come in another order than they were made in.
    own = {
        (member.adapter if shared else None) or _name(index): member for index, member in enumerate(ensemble.members)
    }
    about: dict[str, Any] = {"members": list(own), "combine": ensemble.combine.model_dump()}
    with whole_folder(folder) as beside:
        if shared is None:
            for name, member in own.items():
                save(member, beside / name)
        else:
            about["base"] = about_base(str(base_of(shared).name_or_path), folder)
            save_adapters(shared, beside, list(own))
            for name, member in own.items():
                write_json(beside / name / FACTS, member.facts.as_dict())
            ensemble.tokenizer.save_pretrained(beside)
        write_json(beside / ENSEMBLE, about)


def load_ensemble(
    folder: Path,
    *,
    dtype: DTypeName = "auto",
    device: str | torch.device = "cpu",
    base: str | Path | None = None,
    bits: BaseBits = 16,
) -> Ensemble[RewardModel]:
    """An ensemble from its folder. `base` says where the base of LoRA members is now, if it has moved."""
    about = read_about(folder / ENSEMBLE)
    combine: Combine = TypeAdapter[Combine](Combine).validate_python(about["combine"])
    names: list[str] = about["members"]
    if "base" not in about:
        members = tuple(load(folder / name, dtype=dtype, device=device) for name in names)
        return Ensemble(members=members, combine=combine)
    facts = [facts_from(read_about(folder / name / FACTS)) for name in names]
    source = find_base(folder, about["base"], base)
    trunk = build(source, objectives=facts[0].objectives, seed=0, dtype=dtype, device=device, bits=bits)
    model = trunk.model
    for name in names:
        model = load_adapter(model, folder / name, name=name)
    tokenizer = tokenizer_of(folder)
    members = tuple(
        RewardModel(model=model, tokenizer=tokenizer, facts=fact, adapter=name)
        for name, fact in zip(names, facts, strict=True)
    )
    model.eval()
    return Ensemble(members=members, combine=combine)


def load_reward(
    source: str | Path, *, dtype: DTypeName = "auto", device: str | torch.device = "cpu"
) -> RewardModel | Ensemble[RewardModel]:
    """The reward model or ensemble at `source`; both are a `Scorer`."""
    if (Path(source) / ENSEMBLE).is_file():
        return load_ensemble(Path(source), dtype=dtype, device=device)
    return load(source, dtype=dtype, device=device)


def read_about(path: Path) -> dict[str, Any]:
    """A file beside the weights of a member or an ensemble."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.parent}: not a whole ensemble of reward models ({path.name}: {error})") from error


def _name(index: int) -> str:
    return f"member-{index}"


def _shared_model(ensemble: Ensemble[RewardModel]) -> PeftModel | None:
    """The model whose adapters the members are; None where they do not all live on one."""
    model = ensemble.members[0].model
    is_shared = all(member.model is model and member.adapter for member in ensemble.members)
    return model if is_shared and isinstance(model, PeftModel) else None
