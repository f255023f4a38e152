"""The adapters of a reward model or ensemble on a base that is already in memory as a causal language model.

A score is then the adapter's head at the last hidden state of that base: no second base is loaded.
Shape letters: K objectives, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor
from transformers import PreTrainedModel

from kedge.core.errors import ModelError
from kedge.models.loading.adapters import BASE, HEAD, fill_adapter, read_adapter
from kedge.models.loading.start import ADAPTER, ENSEMBLE
from kedge.models.reward.ensemble import read_record
from kedge.models.reward.reward_files import FACTS
from kedge.models.reward.reward_model import RewardFacts, facts_from
from kedge.models.settings import Combine, MeanOfMembers


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMembers:
    """Adapter folders on one base, the facts of each, and how their scores are combined."""

    folders: tuple[Path, ...]
    facts: tuple[RewardFacts, ...]
    combine: Combine


def members_on(folder: Path, base_hash: str) -> SharedMembers | None:
    """The adapters of the reward model in `folder` if they were trained on the weights of `base_hash`, else None."""
    if (folder / ENSEMBLE).is_file():
        record = read_record(folder / ENSEMBLE)
        base: dict[str, Any] = record.get("base", {})
        names: list[str] = record["members"]
        combine: Combine = TypeAdapter[Combine](Combine).validate_python(record["combine"])
    elif (folder / ADAPTER / BASE).is_file():
        base, names, combine = read_record(folder / ADAPTER / BASE), [ADAPTER], MeanOfMembers()
    else:
        return None
    if base.get("hash") != base_hash:
        return None
    folders = tuple(folder / name for name in names)
    facts = tuple(facts_from(read_record(adapter / FACTS)) for adapter in folders)
    return SharedMembers(folders=folders, facts=facts, combine=combine)


def load_head(adapter_folder: Path) -> Tensor:
    """The score head (K, D) of an adapter, float32."""
    weights = read_adapter(adapter_folder).weights
    if HEAD not in weights:
        raise ModelError(f"{adapter_folder}: no score head ('{HEAD}') in it; this is not the adapter of a reward model")
    return weights[HEAD].float()


def load_backbone_adapter(model: PreTrainedModel, adapter_folder: Path, *, name: str) -> PreTrainedModel:
    """The causal `model` with the adapter of a reward model, without its head; every weight comes from the file."""
    return fill_adapter(model, read_adapter(adapter_folder), name=name, with_head=False)
