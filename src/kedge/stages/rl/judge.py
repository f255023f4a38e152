"""The judge that a folder holds, ready to score: a reward model, or the members of an ensemble."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kedge.core.errors import ConfigError, ModelError
from kedge.core.findings import Finding
from kedge.data.template import template_hash
from kedge.models.forward.backbones import backbone_of
from kedge.models.forward.host_memory import MovedWeights
from kedge.models.forward.sharding import is_sharded, shard_model
from kedge.models.loading.resolve import is_model, model_of_stage
from kedge.models.reward.ensemble import Ensemble, Member, load_reward
from kedge.models.reward.reward_files import ENSEMBLE
from kedge.models.reward.reward_model import RewardFacts, RewardModel, RewardRole, freeze, role_of
from kedge.models.settings import BaseBits, Combine, MeanOfMembers
from kedge.stages.shared.device import checked_device
from kedge.stages.shared.encoding import Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A reward model, or the members of an ensemble, ready to score."""

    place: str
    members: tuple[Member, ...]
    combine: Combine
    max_length: int
    """Tokens of the longest text that is scored whole."""
    turn: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered around all that it is asked of one batch: its weights may be elsewhere before and after."""

    @property
    def facts(self) -> RewardFacts:
        return self.members[0].facts

    @property
    def encoder(self) -> Encoder:
        tokenizer = self.members[0].tokenizer
        return Encoder(tokenizer=tokenizer, max_length=self.max_length, truncate=self.facts.truncate)


class LoadJudge(Protocol):
    """Opens the judge at a place; one that is left `unread` has to be sharded before it is asked."""

    def __call__(self, place: str, /, *, unread: bool) -> Judge: ...


def load_judge(reward: str, *, device: str, unread: bool = False, bits: BaseBits = 16) -> Judge:
    """The judge in a folder: of a model, an ensemble, or a run or stage that made one; its weights of so many bits."""
    place = find_judge(reward)
    on = checked_device(device)
    loaded = load_reward(place, dtype="auto", device=on, unread=unread, bits=bits)
    is_many = isinstance(loaded, Ensemble)
    members = loaded.members if is_many else (loaded,)
    combine = loaded.combine if is_many else MeanOfMembers()
    return judge_of(str(place), members, combine, base=members[0].model)


def load_standing(
    reward: str, *, device: str, compiled: bool = False, unread: bool = False, bits: BaseBits = 16
) -> Judge:
    """The same judge for a stage that asks it often: frozen for good, its layers compiled if asked. One that is left
    `unread` has to be sharded before it is asked."""
    judge = load_judge(reward, device=device, unread=unread, bits=bits)
    members: list[Member] = []
    for member in judge.members:
        if isinstance(member, RewardModel):
            freeze(member, compiled=compiled)
        members.append(role_of(member) if isinstance(member, RewardModel) and not unread else member)
    return replace(judge, members=tuple(members))


def moved(judge: Judge) -> Judge:
    """The same judge, whose weights are in host memory but for its turns."""
    models = {id(model): model for member in judge.members if (model := _model_of(member)) is not None}
    return replace(judge, turn=MovedWeights(models.values()).turn)


def sharded(judge: Judge, mesh: Any) -> Judge:
    """The same judge, of whose weights this process holds a part; those that it shares with the policy are cut."""
    members: list[Member] = []
    for member in judge.members:
        if isinstance(member, RewardModel):
            if not is_sharded(member.model):
                heads: Any = member.model.score
                shard_model(member.model, mesh, whole=list(heads.parameters()))
            members.append(role_of(member))
            continue
        assert isinstance(member, RewardRole)
        backbone: Any = member.backbone
        members.append(replace(member, backbone=backbone_of(backbone.model, getattr(backbone, "adapter", None))))
    return replace(judge, members=tuple(members))


def is_cut(judge: Judge) -> bool:
    """Whether its weights are sharded."""
    return any(is_sharded(model) for member in judge.members if (model := _model_of(member)) is not None)


def _model_of(member: Member) -> PreTrainedModel | None:
    return getattr(getattr(member, "backbone", None), "model", None)


def judge_of(place: str, members: tuple[Member, ...], combine: Combine, *, base: PreTrainedModel) -> Judge:
    """Members as a judge; `base` is the model whose window they have."""
    config: Any = base.config
    window: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    longest = members[0].facts.max_length or window or sys.maxsize
    return Judge(place=place, members=members, combine=combine, max_length=longest)


def combining(judge: Judge, combine: Combine | None) -> Judge:
    """The same judge, its members combined as asked; None leaves that as it is."""
    if combine is None:
        return judge
    if len(judge.members) == 1:
        raise ConfigError(
            f"combine: {combine.kind} was asked for, and {judge.place} is one reward model; leave `combine` out, or "
            "train an ensemble (members: 3)"
        )
    return replace(judge, combine=combine)


def template_findings(judge: Judge) -> list[Finding]:
    """A warning where the folder's template is not the one that the model was trained on."""
    stored, found = judge.facts.template_hash, template_hash(judge.members[0].tokenizer)
    if not stored or found == stored:
        return []
    return [
        Finding(
            level="warning",
            code="score.template",
            message="The chat template in this folder is not the one that the reward model was trained on, so it reads "
            "another format than it learned, and its scores mean little.",
            where=judge.place,
            fix="put back the tokenizer files that were saved with the model, or train it again",
            evidence={"trained": stored, "found": found},
        )
    ]


def find_judge(reward: str) -> str | Path:
    """The folder of the model itself; what is no folder (a hub id, a typing error) is left to the loader."""
    place = Path(reward)
    if not place.is_dir() or is_model(place):
        return reward
    if (made := model_of_stage(place)) != place or is_model(made := place / "model"):
        return made
    stages = [stage for stage in sorted(place.iterdir()) if is_reward_model(stage / "model")]
    if len(stages) == 1:
        return stages[0] / "model"
    if stages:
        raise ModelError(f"{place}: holds {len(stages)} reward models; name one: {', '.join(map(str, stages))}")
    raise ModelError(
        f"{place}: no reward model here; expected a folder with config.json or {ENSEMBLE}, or a run in which a stage "
        "of kind reward has finished"
    )


def is_reward_model(folder: Path) -> bool:
    """Whether a folder is that of a reward model, or of an ensemble of them."""
    if not (folder / "config.json").is_file():
        return (folder / ENSEMBLE).is_file()
    named: Sequence[str] = _config(folder).get("architectures") or ()
    return any(name.endswith("ForSequenceClassification") for name in named)


def _config(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ModelError(f"{folder}: its config.json is damaged: {error}") from error
