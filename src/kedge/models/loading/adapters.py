"""Adapters in peft's format: `adapter_config.json` and `adapter_model.safetensors`, which peft loads and writes too.

Read are plain LoRA adapters on linear layers of the transformer blocks, with or without a score head. Anything else
that a config asks for is refused by its name, since leaving it out would compute another model.
Shape letters: K inputs and N outputs of a layer, R the rank of an adapter.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kedge.core.errors import ModelError
from kedge.core.files import write_json
from kedge.models.forward.lora import Adapter, Adapters, attach, linears, required_adapters
from kedge.models.loading.hashing import folder_hash

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base.json"
HEAD = "base_model.model.score.weight"
"""peft's name of the score head that is saved with an adapter."""
_PREFIX = "base_model.model."
_HEADS = ["classifier", "score"]
"""What peft saves in full with the adapters of a sequence-classification model."""

_READ = {
    "peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules",
    "modules_to_save", "init_lora_weights", "bias",
}  # fmt: skip
_WITHOUT_EFFECT = {
    "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version",
    "fan_in_fan_out", "layers_pattern", "megatron_core", "qalora_group_size", "runtime_config", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying",
}  # fmt: skip
"""Notes, how A and B were initialised, and what only counts beside another field, which is refused."""
_HARMLESS_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to initialise an adapter that leave the base's weights as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAdapter:
    """What a folder says of an adapter."""

    folder: Path
    rank: int
    alpha: float
    dropout: float
    rslora: bool
    is_target: Callable[[str], bool]
    """Whether a layer with this name has it."""
    targets: tuple[str, ...] | None
    """As they stand in the file; None for a pattern."""
    weights: Mapping[str, Tensor]


def save_adapters(
    model: PreTrainedModel, folder: Path, names: Sequence[str], *, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Each adapter in a folder of its name below `folder`."""
    for name in names:
        save_adapter(model, folder / name, name=name, weights=weights)


def save_adapter(
    model: PreTrainedModel, folder: Path, *, name: str, weights: Mapping[str, Tensor] | None = None
) -> None:
    """One adapter in `folder` itself. `weights` are more precise than the model's own, by its parameters' names."""
    adapters = required_adapters(model)
    adapter, tensors = _stacked(adapters, name, weights or {})
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / CONFIG, _config(model, adapters, adapter, name))


def load_adapter(model: PreTrainedModel, folder: Path, *, name: str) -> PreTrainedModel:
    """`model` with the adapter that `folder` holds. Every weight must come from the file; nothing is unpickled."""
    return fill_adapter(model, read_adapter(folder), name=name)


def read_adapter(folder: Path) -> SavedAdapter:
    """The settings and the weights of the adapter in `folder`, its score head included if it has one."""
    for part in (CONFIG, WEIGHTS):
        if not (folder / part).is_file():
            raise ModelError(f"{folder}: no {part}; this is not a LoRA adapter saved with safetensors")
    try:
        config: Any = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        weights = load_file(folder / WEIGHTS)
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG} holds no mapping")
        return _read(folder, cast("dict[str, Any]", config), weights)
    except (OSError, ValueError, TypeError, re.error, SafetensorError) as error:
        raise ModelError(f"{folder}: cannot be read as a LoRA adapter: {error}") from error


def fill_adapter(model: PreTrainedModel, saved: SavedAdapter, *, name: str, with_head: bool = True) -> PreTrainedModel:
    """`model` with a new adapter of exactly the saved weights; one too many or too few is an error.

    Without `with_head` the score head of the saved adapter is left out.
    """
    file = saved.folder / WEIGHTS
    weights = {key: tensor for key, tensor in saved.weights.items() if with_head or key != HEAD}
    paths = [path for path in linears(model) if saved.is_target(path)]
    expected = {f"{_PREFIX}{path}.{part}.weight": path for path in paths for part in ("lora_A", "lora_B")}
    if hasattr(model, "score"):
        expected[HEAD] = "score"
    for key in sorted(expected.keys() ^ weights.keys()):
        side = "is not in the file and would start as random numbers" if key in expected else _why_no_place(key)
        raise ModelError(f"{file}: weight '{key}' {side}; is this the adapter of another model?")
    adapter = Adapter(
        rank=saved.rank,
        alpha=saved.alpha,
        dropout=saved.dropout,
        rslora=saved.rslora,
        targets=saved.targets or tuple(paths),
    )
    attach(model, adapter, paths, name=name, seed=0)
    with torch.no_grad():
        for key, parameter in _by_file_key(required_adapters(model), name).items():
            if parameter.shape != weights[key].shape:
                shape, needed = tuple(weights[key].shape), tuple(parameter.shape)
                raise ModelError(f"{file}: weight '{key}' has shape {shape}, the base needs {needed}")
            parameter.copy_(weights[key])
    return model


def base_record(source: str, folder: Path) -> dict[str, str]:
    """What is saved with adapters in `folder` about their base: where it is, and the hash of its weights.

    A hub model is recorded by its name alone.
    """
    place = Path(source)
    if not place.is_dir():
        return {"source": source}
    # The relative path survives a move of both folders together; the hash tells another model at the same place.
    return {
        "source": source,
        "relative": os.path.relpath(place, folder.absolute()),
        "hash": folder_hash(place),
    }


def find_base(folder: Path, record: Mapping[str, str], given: str | Path | None) -> str | Path:
    """The base of the adapters in `folder`, or the one at `given`; it must have the weights that `record` names."""
    if given is None and "hash" not in record:
        return record["source"]
    places = [folder / record["relative"], Path(record["source"])] if given is None else [Path(given)]
    base = next((place.resolve() for place in places if place.is_dir()), None)
    if base is None:
        raise ModelError(
            f"{folder}: the base of its members is not at {places[-1]}; LoRA members need it: put it back, or give the "
            "folder where it is now as `base`"
        )
    if "hash" in record and folder_hash(base) != record["hash"]:
        raise ModelError(f"{folder}: the weights in {base} are not those of the base that its members were trained on")
    return base


def _by_file_key(adapters: Adapters, name: str) -> dict[str, Tensor]:
    """The parameters of an adapter by their names in peft's file."""
    return {
        _PREFIX + path.replace(f".lora_head.{name}.weight", f".{name}").removesuffix(f".{name}") + ".weight": parameter
        for path, parameter in adapters.parameters(name)
    }


def _stacked(adapters: Adapters, name: str, precise: Mapping[str, Tensor]) -> tuple[Adapter, dict[str, Tensor]]:
    """An adapter with those beneath it as one of the sum of their ranks, and its tensors by their names in the file."""
    adapter, tensors = adapters.known[name], _tensors(adapters, name, precise)
    if not adapters.beneath:
        return adapter, tensors
    parts = [(adapters.known[part], _tensors(adapters, part, precise)) for part in adapters.beneath]
    parts.append((adapter, {key: tensor for key, tensor in tensors.items() if key != HEAD}))
    shapes = {key: tensor.shape for _, own in parts for key, tensor in own.items()}
    rank = sum(part.rank for part, _ in parts)
    stacked: dict[str, Tensor] = {key: tensor for key, tensor in tensors.items() if key == HEAD}
    for key, shape in shapes.items():
        if key.endswith("lora_A.weight"):
            blocks = [own.get(key, torch.zeros(part.rank, shape[1])) for part, own in parts]
            stacked[key] = torch.cat(blocks)
        else:
            ratios = [part.scaling / adapter.scaling for part, _ in parts]
            blocks = [own.get(key, torch.zeros(shape[0], part.rank)) for part, own in parts]
            stacked[key] = torch.cat([ratio * block for ratio, block in zip(ratios, blocks, strict=True)], dim=1)
    targets = tuple(sorted({target for part, _ in parts for target in part.targets}))
    whole = replace(adapter, rank=rank, alpha=adapter.scaling * rank, rslora=False, targets=targets)
    return whole, stacked


def _tensors(adapters: Adapters, name: str, precise: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of one adapter in float32 by their names in the file."""
    named = zip(_by_file_key(adapters, name).items(), adapters.parameters(name), strict=True)
    return {
        key: precise.get(path, parameter).detach().float().cpu().contiguous() for (key, parameter), (path, _) in named
    }


def _config(model: PreTrainedModel, adapters: Adapters, adapter: Adapter, name: str) -> dict[str, Any]:
    has_head = adapters.heads is not None and name in adapters.heads.lora_head
    layers = [layer for layer in adapters.layers.values() if name in layer.lora_A]
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if has_head else "CAUSAL_LM",
        "base_model_name_or_path": str(model.name_or_path) or None,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rslora,
        "use_dora": False,
        "target_modules": sorted(adapter.targets),
        "modules_to_save": _HEADS if has_head else None,
        "bias": "none",
        "fan_in_fan_out": any(isinstance(layer.base_layer, Conv1D) for layer in layers),
        "init_lora_weights": True,
    }


def _read(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> SavedAdapter:
    _refuse_other_kinds(folder / CONFIG, config)
    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    is_listed = not isinstance(targets, str) and not excluded
    return SavedAdapter(
        folder=folder,
        rank=int(config.get("r", 8)),
        alpha=float(config.get("lora_alpha", 8)),
        dropout=float(config.get("lora_dropout", 0.0)),
        rslora=bool(config.get("use_rslora", False)),
        is_target=lambda path: _matches(targets, path) and not (excluded and _matches(excluded, path)),
        targets=tuple(sorted(targets)) if is_listed and targets else None,
        weights=weights,
    )


def _matches(names: Any, path: str) -> bool:
    """peft's rule: a list has whole names or their last parts; a text is a regular expression for the whole name."""
    if names == "all-linear":
        return True
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in names or ())


def _refuse_other_kinds(file: Path, config: Mapping[str, Any]) -> None:
    """Every field that would change what the adapter computes, other than those of plain LoRA."""
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise ModelError(f"{file}: an adapter of kind {kind}; only LORA is read. Merge it with peft, and use the model")
    wrong = [name for name, value in config.items() if name not in _READ | _WITHOUT_EFFECT and value]
    if config.get("bias", "none") != "none":
        wrong.append("bias")
    if config.get("init_lora_weights", True) not in _HARMLESS_STARTS:
        wrong.append("init_lora_weights")
    if set(config.get("modules_to_save") or ()) - set(_HEADS):
        wrong.append("modules_to_save")
    if wrong:
        fields = "; ".join(f"{name}: {json.dumps(config[name])[:80]}" for name in wrong)
        dora = " (DoRA)" if "use_dora" in wrong else ""
        raise ModelError(
            f"{file}: {fields}{dora}: not plain LoRA, which is all that is computed here; merge the adapter with peft "
            "(merge_and_unload), and use the merged model"
        )


def _why_no_place(key: str) -> str:
    if "lora_embedding_" in key:
        return "belongs to an embedding, and adapters are on linear layers of the transformer blocks alone"
    if ".lm_head." in key:
        return "belongs to the output matrix, and adapters are on linear layers of the transformer blocks alone"
    return "has no place in the base"
