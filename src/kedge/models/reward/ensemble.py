"""Ensembles of reward models: the score of each member, one combined score, and how much the members disagree.

LoRA members share one base in memory and on disk: the folder holds their adapters and heads in peft's format and names
the base. `PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(base, num_labels=K), member)`
loads a member without Kedge. Members trained in full have a folder of a whole reward model each.
Shape letters: M members, B sequences, T token positions, K objectives.
"""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kedge.algorithms.combine import ensemble_mean, uncertainty_weighted, worst_case
from kedge.core.errors import ModelError
from kedge.core.files import write_json
from kedge.core.seeds import seed_for
from kedge.core.world import ALONE, World, once
from kedge.models.forward.lora import has_adapters, with_lora
from kedge.models.forward.sharding import is_sharded
from kedge.models.loading.adapters import base_record, find_base, load_adapter, save_adapters
from kedge.models.loading.gather import factors_of
from kedge.models.loading.load import DTypeName
from kedge.models.loading.start import shared_folder
from kedge.models.reward.reward_files import (
    ENSEMBLE,
    FACTS,
    build,
    load,
    save,
    tokenizer_of,
)
from kedge.models.reward.reward_model import RewardFacts, RewardModel, facts_from, head_of, start_head
from kedge.models.settings import (
    BaseBits,
    Combine,
    LoraSettings,
    MeanOfMembers,
    SaveDType,
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
        """`scores_MBK`: the scores of each member, normalised by its own moments."""
        return torch.stack(
            [member.score_tokens(tokens_BT, attention_mask_BT, normalised=normalised) for member in self.members]
        )

    def score_tokens(self, tokens_BT: Tensor, attention_mask_BT: Tensor, *, normalised: bool = True) -> Tensor:
        """`scores_BK`: the members' scores combined."""
        return combined(self.member_scores(tokens_BT, attention_mask_BT, normalised=normalised), self.combine)


def combined(scores_MBK: Tensor, how: Combine) -> Tensor:
    """`scores_BK`: one score from those of the members.

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
    """`std_BK`: the population standard deviation over the members; high where they have learned different things.

    >>> disagreement(torch.tensor([[[1., 2.]], [[5., 2.]]])).tolist()
    [[2.0, 0.0]]
    """
    return scores_MBK.std(dim=0, correction=0)


def lora_members(base: RewardModel, lora: LoraSettings, *, count: int, seed: int) -> tuple[RewardModel, ...]:
    """`count` members over the weights of `base`, each with its own adapter and head; the first one is active.

    The model of `base` is changed in place: it carries the adapters of the members from now on.
    """
    model = base.model
    for index in range(count):
        model = with_lora(model, lora, name=_name(index), seed=seed_for(seed, "adapter", index))
        start_head(head_of(model), seed=seed_for(seed, "head", index))
    members = tuple(replace(base, model=model, adapter=_name(index)) for index in range(count))
    members[0].activate()
    return members


def save_ensemble(
    ensemble: Ensemble[RewardModel],
    folder: Path,
    *,
    weights: Sequence[Mapping[str, Tensor]] | None = None,
    dtype: SaveDType = "float32",
    world: World = ALONE,
) -> None:
    """Save to `folder`: `ensemble.json` and one folder a member.

    `weights` are the float32 masters of each member by the names of their parameters. Adapters are float32 always. The
    processes of `world` call it together, and the first one writes.
    """
    shared = _shared_model(ensemble)
    # Adapters keep their names, whatever the order of the members is.
    members = {
        (member.adapter if shared else None) or _name(index): member for index, member in enumerate(ensemble.members)
    }
    record: dict[str, Any] = {"members": list(members), "combine": ensemble.combine.model_dump()}
    precise = dict(ChainMap(*map(dict, weights or ()))) if shared else {}
    if shared is not None and is_sharded(shared):
        precise = factors_of(shared, precise)

    def write_adapters(base: PreTrainedModel, partial: Path) -> None:
        record["base"] = base_record(str(base.name_or_path), folder)
        save_adapters(base, partial, list(members), weights=precise)
        for name, member in members.items():
            write_json(partial / name / FACTS, member.facts.as_dict())
        ensemble.tokenizer.save_pretrained(partial)

    with shared_folder(world, folder) as partial:
        if shared is None:
            for index, (name, member) in enumerate(members.items()):
                save(member, partial / name, weights=weights[index] if weights else None, dtype=dtype, world=world)
        else:
            once(world, lambda: write_adapters(shared, partial))
        once(world, lambda: write_json(partial / ENSEMBLE, record))


def load_ensemble(
    folder: Path,
    *,
    dtype: DTypeName = "auto",
    device: str | torch.device = "cpu",
    base: str | Path | None = None,
    bits: BaseBits = 16,
    unread: bool = False,
) -> Ensemble[RewardModel]:
    """An ensemble from its folder. `base` says where the base of LoRA members is now, if it has moved.

    The weights of one that is left `unread` are read when it is sharded, but for adapters and heads.
    """
    record = read_record(folder / ENSEMBLE)
    combine: Combine = TypeAdapter[Combine](Combine).validate_python(record["combine"])
    names: list[str] = record["members"]
    if "base" not in record:
        members = tuple(load(folder / name, dtype=dtype, device=device, unread=unread, bits=bits) for name in names)
        return Ensemble(members=members, combine=combine)
    facts = [facts_from(read_record(folder / name / FACTS)) for name in names]
    source = find_base(folder, record["base"], base)
    model = build(
        source, objectives=facts[0].objectives, seed=0, dtype=dtype, device=device, bits=bits, unread=unread
    ).model
    for name in names:
        model = load_adapter(model, folder / name, name=name)
    tokenizer = tokenizer_of(folder)
    members = tuple(
        RewardModel(model=model, tokenizer=tokenizer, facts=member_facts, adapter=name)
        for name, member_facts in zip(names, facts, strict=True)
    )
    model.eval()
    return Ensemble(members=members, combine=combine)


def load_reward(
    source: str | Path,
    *,
    dtype: DTypeName = "auto",
    device: str | torch.device = "cpu",
    unread: bool = False,
    bits: BaseBits = 16,
) -> RewardModel | Ensemble[RewardModel]:
    """The reward model or ensemble at `source`; both are a `Scorer`. One that is left `unread` has to be sharded."""
    if (Path(source) / ENSEMBLE).is_file():
        return load_ensemble(Path(source), dtype=dtype, device=device, unread=unread, bits=bits)
    return load(source, dtype=dtype, device=device, unread=unread, bits=bits)


def read_record(path: Path) -> dict[str, Any]:
    """A JSON file that was saved with the weights of a member or an ensemble."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.parent}: not a whole ensemble of reward models ({path.name}: {error})") from error


def _name(index: int) -> str:
    return f"member-{index}"


def _shared_model(ensemble: Ensemble[RewardModel]) -> PreTrainedModel | None:
    """The model that carries the adapters of all members; None where they do not share one."""
    model = ensemble.members[0].model
    is_shared = all(member.model is model and member.adapter for member in ensemble.members)
    return model if is_shared and has_adapters(model) else None
