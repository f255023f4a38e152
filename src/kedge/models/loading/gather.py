"""Models that are sharded, or have adapters, saved weight by weight: only one is whole, or merged, at a time.

All processes gather; process 0 merges adapters, rounds and writes. Files, their cuts and their bytes are those that
transformers writes for the same model in one process.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from kedge.core.world import World, acting_alone, portable
from kedge.models.forward.lora import adapters_of
from kedge.models.forward.merging import merge
from kedge.models.forward.parts import gathered, is_part
from kedge.models.forward.sharding import blank_of
from kedge.models.loading.tensor_file import TensorFile

T = TypeVar("T")
SHARD_SIZE = "2GB"
"""Of the files of a saved model, which are hashed at the same time."""
Reread = Callable[[str], Tensor]
"""The weight of the base with this name, in float32, from its files."""
Stream = Iterator[tuple[str, Tensor]]
"""Weights by the names that the model has for them, in the order in which they are saved; on process 0."""


@dataclass(frozen=True, kw_only=True)
class GatheredModel:
    """A model as it is saved, weight by weight."""

    model: PreTrainedModel
    plain: PreTrainedModel
    """That model without memory: adapters are merged in, and all of it has the type in which it is saved."""
    weights: Mapping[str, Tensor]
    """More precise than the model's own, by the names of its parameters."""
    factors: Mapping[str, Tensor]
    """The weights of adapters and of their heads, whole, by the names of their parameters."""
    names: tuple[str, ...]
    """The adapters that are merged in."""
    reread: Reread | None
    """Where weights that do not learn were rounded in memory, what reads them again; called by process 0 alone."""
    world: World

    def save(self, write: Callable[[Stream], T]) -> T:
        """What process 0 gives or refuses that writes the stream of weights, the same on all: they call it together."""
        stream = self._stream()
        if self.world.size == 1:
            return write(stream)
        result: Any = None, None
        if self.world.rank == 0:
            try:
                with acting_alone():
                    result = write(stream), None
            except BaseException as error:  # the others gather until the end
                result = None, error
        for _ in stream:
            pass
        value, error = self.world.same((result[0], result[1] and portable(result[1])))
        if error is not None:
            raise result[1] or error
        return value

    def write_into(self, folder: Path, stream: Stream) -> None:
        """Settings and weights in the Hugging Face layout."""
        if self._files is None:
            # Copies: the memory of one that is gathered may be larger than it is, which would be counted.
            weights = {key: weight.clone() for key, weight in stream}
            self.plain.load_state_dict(weights, strict=False, assign=True)
            self.plain.tie_weights()
            self.plain.save_pretrained(folder, max_shard_size=SHARD_SIZE)
            return
        self.plain.save_pretrained(folder, state_dict={})  # its settings
        (folder / "model.safetensors").unlink(missing_ok=True)
        for name, like in self._files.items():
            with TensorFile(folder / name, like, {"format": "pt"}) as file:
                for saved_as in file.names:
                    key, weight = next(stream)
                    assert key == self._names[saved_as]
                    file.add(saved_as, weight)
        if len(self._files) > 1:
            by_name = {key: name for name, like in self._files.items() for key in like}
            sizes = {
                "total_parameters": self.plain.num_parameters(),
                "total_size": sum(tensor.nbytes for like in self._files.values() for tensor in like.values()),
            }
            text = json.dumps({"metadata": sizes, "weight_map": by_name}, indent=2, sort_keys=True)
            (folder / "model.safetensors.index.json").write_text(f"{text}\n", encoding="utf-8")

    @cached_property
    def _saved(self) -> dict[str, Tensor]:
        """What is saved, without memory, as the model calls it: of tied weights one."""
        left_out: Any = getattr(self.plain, "_keys_to_ignore_on_save", None) or ()
        state = {key: weight for key, weight in self.plain.state_dict().items() if key not in left_out}
        return remove_tied_weights_from_state_dict(state, self.plain)

    @cached_property
    def _as_in_files(self) -> dict[str, Tensor]:
        """The same as its files have it, which may call it otherwise, or keep it in several weights."""
        return revert_weight_conversion(self.plain, dict(self._saved))

    @cached_property
    def _names(self) -> dict[str, str]:
        """By the names in the files those of the model, of weights that are the same in both."""
        own = {id(weight): key for key, weight in self._saved.items()}
        return {saved_as: own[id(weight)] for saved_as, weight in self._as_in_files.items() if id(weight) in own}

    @cached_property
    def _files(self) -> dict[str, dict[str, Tensor]] | None:
        """What is in which file; None where transformers saves weights otherwise than the model has them."""
        if self._names.keys() != self._as_in_files.keys():
            return None
        split = split_torch_state_dict_into_shards(
            self._as_in_files, filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD_SIZE
        )
        return {name: {key: self._as_in_files[key] for key in keys} for name, keys in split.filename_to_tensors.items()}

    def _stream(self) -> Stream:
        """In the order in which they are written. Each process calls it to its end."""
        if self._files is None:
            order = TensorFile(Path(), self._saved, {}).names
        else:
            files = self._files.items()
            order = [self._names[key] for name, like in files for key in TensorFile(Path(name), like, {}).names]
        own: dict[str, Tensor] = self.model.state_dict(keep_vars=True)
        for key in order:
            weight = self._weight(key, own)
            if weight is not None and self.world.rank == 0:
                yield key, weight.detach().to("cpu", self._saved[key].dtype)

    def _weight(self, key: str, own: Mapping[str, Tensor]) -> Tensor | None:
        path, _, leaf = key.rpartition(".")
        adapters = adapters_of(self.model)
        if adapters is not None and adapters.heads is not None and path == "score":
            heads = [name for name in self.names if f"score.lora_head.{name}.{leaf}" in self.factors]
            below = f"score.lora_head.{heads[-1]}.{leaf}" if heads else f"score.base_layer.{leaf}"
            return self.factors[below] if heads else self._base(below, key, own)
        layer = adapters.layers.get(path) if adapters else None
        if layer is None:
            return self._base(key, key, own)
        base = self._base(f"{path}.base_layer.{leaf}", key, own)
        if base is None or leaf != "weight":
            return base
        return layer.merged(self.names, self.factors, path=path, base=base)

    def _base(self, name: str, key: str, own: Mapping[str, Tensor]) -> Tensor | None:
        """A weight without adapters; None on processes that have no use for it."""
        if name in self.weights:
            return gathered(self.weights[name])
        if self.reread is None or not is_part(own[name]):
            return gathered(own[name])
        return None if self.world.rank else self.reread(key)


def gathered_model(
    model: PreTrainedModel,
    *,
    world: World,
    weights: Mapping[str, Tensor] | None,
    dtype: torch.dtype,
    name: str | None = None,
    reread: Reread | None = None,
) -> GatheredModel:
    """What is saved of a model: adapter `name` (what is active if None) merged in. All processes call it."""
    adapters = adapters_of(model)
    plain = merge(blank_of(model), name=name, dtype=dtype)
    plain.config = copy.deepcopy(model.config)
    if model.can_generate():
        plain.generation_config = copy.deepcopy(model.generation_config)
    return GatheredModel(
        model=model,
        plain=plain,
        weights=weights or {},
        factors=factors_of(model, weights),
        names=() if adapters is None else adapters.active if name is None else adapters.stack(name),
        reread=reread,
        world=world,
    )


@torch.no_grad()
def factors_of(model: PreTrainedModel, weights: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """The weights of adapters and their heads, whole: they are small. All processes call it."""
    return {
        name: gathered((weights or {}).get(name, parameter)).detach()
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }
