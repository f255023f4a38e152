"""Models as plain transformers objects, from wherever one may be: an alias, a folder, a run or stage, the hub."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kedge.core.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kedge.models.loading.load import DTypeName


def load_model(
    place: str | os.PathLike[str], *, dtype: str | None = None, device: str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and the tokenizer of an alias, a model folder, the folder of a run or stage, or a hub id.

    A reward model comes as the sequence-classification model that it is. `dtype` is float32, bfloat16, float16, or auto
    (the fast one on `device`); without one, the weights have the type that they were saved in.
    """
    return load_from(_found(place), dtype=dtype, device=device)


def load_from(place: str | Path, *, dtype: str | None, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The same for the model's own place."""
    from kedge.data.tokenizer import load_tokenizer
    from kedge.models.loading.load import load_causal
    from kedge.models.loading.resolve import resolve
    from kedge.models.reward.reward_files import load
    from kedge.models.reward.reward_model import head_of

    if isinstance(place, Path) and _is_ensemble(place):
        members = ", ".join(str(path.parent) for path in sorted(place.glob("*/config.json")))
        hint = f"load a member: {members}" if members else "its members are adapters on one base, which peft loads"
        raise ModelError(f"{place}: an ensemble of reward models, and not one model; {hint}")
    source = resolve(place)
    config = _config(source) if isinstance(source, Path) else {}
    name = cast("DTypeName", dtype or config.get("dtype") or "auto")
    if any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or ()):
        reward = load(source, dtype=name, device=device)
        head_of(reward.model).to(reward.model.dtype)  # Kedge reads it in float32; transformers wants one type
        return reward.model, reward.tokenizer
    return load_causal(source, dtype=name, device=device), load_tokenizer(source)


def _found(place: str | os.PathLike[str]) -> str | Path:
    """The model's own folder; what is no folder (an alias, a hub id, a typing error) is left to the loader."""
    from kedge.models.loading.resolve import is_model, model_of_stage

    folder = Path(place)
    if not folder.is_dir() or is_model(folder):
        return folder if folder.is_dir() or not isinstance(place, str) else place
    if (made := model_of_stage(folder)) != folder or is_model(made := folder / "model"):
        return made
    stages = [stage / "model" for stage in sorted(folder.iterdir()) if is_model(stage / "model")]
    if len(stages) == 1:
        return stages[0]
    if stages:
        raise ModelError(f"{place}: holds {len(stages)} models; name one: {', '.join(map(str, stages))}")
    raise ModelError(f"{place}: no model here; expected a folder with config.json, or a run in which a stage made one")


def _is_ensemble(folder: Path) -> bool:
    return (folder / "ensemble.json").is_file()


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))
