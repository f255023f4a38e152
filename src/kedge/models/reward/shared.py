"""The adapters of a reward model or ensemble for a base that is already in memory as a causal language model.

The score of a text is then the head at the last hidden state of that base under the adapter: no second base is loaded.
Shape letters: K objectives, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import PeftModel
from pydantic import TypeAdapter
from torch import Tensor

from kedge.core.errors import ModelError
from kedge.models.forward.lora import Module, fill_adapter, read_adapter
from kedge.models.reward.ensemble import read_about
from kedge.models.reward.reward_files import ADAPTER, BASE, ENSEMBLE, FACTS
from kedge.models.reward.reward_model import RewardFacts, facts_from
from kedge.models.settings import Combine, MeanOfMembers

_HEAD = "base_model.model.score.weight"
"""peft's name of the score head that an adapter brings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMembers:
    """Adapter folders on one base, what each one's scores mean, and how they become one score."""

    folders: tuple[Path, ...]
    facts: tuple[RewardFacts, ...]
    combine: Combine


def members_on(folder: Path, base_hash: str) -> SharedMembers | None:
    """The adapters of the reward model in `folder` if they were trained on the weights of `base_hash`, else None."""
    if (folder / ENSEMBLE).is_file():
        about = read_about(folder / ENSEMBLE)
        base: dict[str, Any] = about.get("base", {})
        names: list[str] = about["members"]
        combine: Combine = TypeAdapter[Combine](Combine).validate_python(about["combine"])
    elif (folder / ADAPTER / BASE).is_file():
        base, names, combine = read_about(folder / ADAPTER / BASE), [ADAPTER], MeanOfMembers()
    else:
        return None
    if base.get("hash") != base_hash:
        return None
    folders = tuple(folder / name for name in names)
    facts = tuple(facts_from(read_about(one / FACTS)) for one in folders)
    return SharedMembers(folders=folders, facts=facts, combine=combine)


def load_head(adapter_folder: Path) -> Tensor:
    """The score head (K, D) of an adapter, float32."""
    _, weights = read_adapter(adapter_folder)
    if _HEAD not in weights:
        raise ModelError(
            f"{adapter_folder}: no score head ('{_HEAD}') in it; this is not the adapter of a reward model"
        )
    return weights[_HEAD].float()


def load_body_adapter(model: Module, adapter_folder: Path, *, name: str) -> PeftModel:
    """The causal `model` with the adapter of a reward model, without its head; every weight comes from the file."""
    config, weights = read_adapter(adapter_folder)
    config.task_type, config.modules_to_save = "CAUSAL_LM", None
    body = {key: one for key, one in weights.items() if key != _HEAD}
    return fill_adapter(model, config, body, name=name, where=adapter_folder)
