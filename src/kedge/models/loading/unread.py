"""Models that get no memory before they are sharded: each process then reads its part of every weight, and no more.

The model is built without weights (they are on `meta`; buffers are computed as always), and brings along how to read
them. Where a file does not have a weight as the model needs it (another shape, weights that transformers puts together
or keeps in another type), or the model is not in a folder, process 0 reads all of it and sends the others their parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from kedge.core.errors import ModelError
from kedge.core.tensors.shards import Box, is_sharded_tensor, own_box
from kedge.models.forward.lora import required_adapters
from kedge.models.forward.merging import merge, merge_anew
from kedge.models.forward.sharding import fill_of, fill_when_sharded

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a weight is on disk."""

    file: Path
    key: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWeights:
    """Every weight of a model by its name, and those that the files do not have. Calling it fills a model."""

    places: Mapping[str, Place]
    dtype: torch.dtype
    """In which the model is read: one that keeps them in a wider type has the rounded values all the same."""
    missing: frozenset[str] = field(default=frozenset())

    def read(self, name: str) -> Tensor:
        """One weight, whole."""
        place = self.places[name]
        with _opened(place.file) as file:
            return self._converted(file.get_tensor(place.key))

    def _converted(self, values: Tensor) -> Tensor:
        return values.to(self.dtype) if values.is_floating_point() else values

    @torch.no_grad()
    def __call__(self, model: nn.Module, names: Collection[str]) -> None:
        with ExitStack() as opened:
            files = {
                file: opened.enter_context(_opened(file)) for file in {place.file for place in self.places.values()}
            }
            for name, weight in named_weights(model):
                if name in names:
                    place = self.places[_in_file(name)]
                    values = files[place.file].get_slice(place.key)
                    target, box = own_part(weight)
                    target.copy_(self._converted(values[box.slices] if box.size else values[...]))


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstProcessWeights:
    """Process 0 reads the model as it is read whole, and sends the others one weight after the other, of which they
    keep their part. Calling it fills a model."""

    read: Callable[[], PreTrainedModel]
    note: str
    """Why, for users."""

    @torch.no_grad()
    def __call__(self, model: nn.Module, names: Collection[str]) -> None:
        import torch.distributed as dist

        weights, error = _whole_weights(self.read) if dist.get_rank() == 0 else ({}, None)
        errors: list[Any] = [error]
        dist.broadcast_object_list(errors, src=0)
        if errors[0] is not None:
            raise errors[0]
        for name, weight in named_weights(model):
            if name in names:
                target, box = own_part(weight)
                values = torch.empty(weight.shape, dtype=weight.dtype, device=target.device)
                if weights:
                    values.copy_(weights[_in_file(name)])
                cast(Any, dist).broadcast(values, src=0)
                target.copy_(values[box.slices] if box.size else values)


def reader_of(unread: Callable[[], PreTrainedModel]) -> Callable[[str], Tensor]:
    """What reads single weights of the model that `unread` gives, which has none yet, when they are asked for."""

    @cache
    def read() -> Callable[[str], Tensor]:
        fill = fill_of(unread())
        if isinstance(fill, FileWeights):
            return fill.read
        assert isinstance(fill, FirstProcessWeights)
        return fill.read().state_dict().__getitem__

    return lambda name: read()(name)


def merged_unread(model: PreTrainedModel, name: str | None) -> PreTrainedModel:
    """A plain model without weights, which gets those of `model` with adapter `name` added when it is sharded.

    Each process adds matrix by matrix, whole, and keeps its part.
    """
    fill, adapters, twin = fill_of(model), required_adapters(model), merge(model, name=name)
    names = adapters.active if name is None else adapters.stack(name)
    if isinstance(fill, FirstProcessWeights):
        sent = FirstProcessWeights(read=lambda: merge_anew(model, fill.read(), name=name), note=fill.note)
        fill_when_sharded(twin, sent, note=sent.note)
        return twin
    assert isinstance(fill, FileWeights)

    @torch.no_grad()
    def fill_merged(target: nn.Module, wanted: Collection[str]) -> None:
        adapted = {f"{path}.weight": layer for path, layer in adapters.layers.items()}
        fill(target, [key for key in wanted if key not in adapted])
        for key, weight in named_weights(target):
            if key in adapted:
                own, box = own_part(weight)
                own.copy_(adapted[key].merged(names, base=fill.read(key).to(own.device))[box.slices])

    fill_when_sharded(twin, fill_merged)
    return twin


def _in_file(name: str) -> str:
    return name.replace(".base_layer", "")  # the layer below an adapter


def _whole_weights(read: Callable[[], PreTrainedModel]) -> tuple[dict[str, Tensor], ModelError | None]:
    try:
        return dict(named_weights(read())), None
    except ModelError as error:
        return {}, error


def named_weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and the buffers that are saved, by name; what is tied once."""
    saved = model.state_dict(keep_vars=True)
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
    return [*model.named_parameters(), *buffers]


def own_part(weight: Tensor) -> tuple[Tensor, Box]:
    """The memory of what this process has of a weight, and which part that is."""
    if is_sharded_tensor(weight):
        return cast(Tensor, cast(Any, weight)._local_tensor), own_box(weight)
    return weight, Box(offset=(0,) * weight.ndim, size=tuple(weight.shape))


def without_weights(
    loader: Any,
    source: Path | str,
    config: Any,
    *,
    dtype: torch.dtype,
    read: Callable[[], PreTrainedModel],
    **options: Any,
) -> tuple[PreTrainedModel, set[str]]:
    """A model of the class that `loader` gives for `config`, whose weights are read when it is sharded; and the names
    of those that its files do not have.

    `read` gives the whole model on the CPU, or refuses: process 0 asks for it where parts cannot be read.
    """
    with torch.random.fork_rng(devices=[]), _parameters_without_memory():
        model: PreTrainedModel = loader.from_config(config, dtype=dtype, **options)
    model.name_or_path = config.name_or_path = str(source)
    if model.can_generate():
        _take_generation_config(model, source)
    weights, reason = _weights_in_files(model, source, dtype)
    if weights is None:
        note = f"process 0 reads all of {source} and sends the others their parts, for {reason}"
        fill_when_sharded(model, FirstProcessWeights(read=read, note=note), note=note)
    else:
        fill_when_sharded(model, weights)
    return model.eval(), set(weights.missing) if weights else set()


def _take_generation_config(model: PreTrainedModel, source: Path | str) -> None:
    with suppress(OSError):  # without a file of its own it is derived from the model's settings
        model.generation_config = GenerationConfig.from_pretrained(source)


@contextmanager
def _parameters_without_memory() -> Generator[None]:
    """Parameters that are made inside of the block have none; buffers are computed, for no file has them."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _weights_in_files(model: PreTrainedModel, source: Path | str, dtype: torch.dtype) -> tuple[FileWeights | None, str]:
    """Where each weight is; or None, and why the files cannot be read weight by weight."""
    if not isinstance(source, Path):
        _keep_usual_changes(model)
        return None, "it is not in a folder"
    stored = _renamed(model, stored_in(source))
    if reason := _changed_on_reading(model, dtype):
        return None, reason
    _untie(model, stored)
    names = _names(model)
    places: dict[str, Place] = {}
    missing: set[str] = set()
    for name, weight in named_weights(model):
        place = next((stored[key] for alias in names[name] for key in _keys(model, alias) if key in stored), None)
        if place is None:
            missing.add(name)
            continue
        if place.shape != tuple(weight.shape):
            return None, f"'{name}' has the shape {place.shape} in the files, and {tuple(weight.shape)} in the model"
        places |= dict.fromkeys(names[name], place)
    return FileWeights(places=places, dtype=dtype, missing=frozenset(missing)), ""


def _renamed(model: PreTrainedModel, stored: Mapping[str, Place]) -> dict[str, Place]:
    """What is in the files by the names that transformers gives it on reading (GPT-NeoX's `embed_out` is `lm_head`).

    The model keeps the changes that its files needed, as one that transformers has read: it is saved as they are.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    renamed = {rename_source_key(key, renamings, converters)[0]: place for key, place in stored.items()}
    setattr(model, "_weight_conversions", [change for change in changes if change.was_used()])  # noqa: B010
    return renamed


def _keep_usual_changes(model: PreTrainedModel) -> None:
    """The same of a model whose files only process 0 sees: those that files of its kind need."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    changes = get_model_conversion_mapping(model, add_legacy=False)
    setattr(model, "_weight_conversions", [change for change in changes if not isinstance(change, PrefixChange)])  # noqa: B010


def _changed_on_reading(model: PreTrainedModel, dtype: torch.dtype) -> str:
    """Why transformers would not give the weights as they are in the files, in `dtype`; empty where it does."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    own: Any = model
    if dtype != torch.float32 and (own._keep_in_fp32_modules or own._keep_in_fp32_modules_strict):
        return "some of its weights are read in another type than the others"
    if any(isinstance(change, WeightConverter) for change in get_model_conversion_mapping(model)):
        return "its weights are put together from several in the files"
    return ""


def _names(model: nn.Module) -> dict[str, list[str]]:
    """By the name of each weight all of its names: those that are tied to it."""
    by_id: dict[int, list[str]] = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        by_id.setdefault(id(weight), []).append(name)
    return {names[0]: names for names in by_id.values()} | {name: names for names in by_id.values() for name in names}


def _untie(model: PreTrainedModel, stored: Mapping[str, Place]) -> None:
    """Weights that are tied by the settings of a model, and stored with other values, are weights of their own."""
    for names in {tuple(names) for names in _names(model).values() if len(names) > 1}:
        places = {name: stored[key] for name in names for key in _keys(model, name) if key in stored}
        if len(places) < 2:
            continue
        first, *others = places
        for name in others:
            if not _is_same(places[first], places[name]):
                path, _, leaf = name.rpartition(".")
                weight = nn.Parameter(torch.empty_like(model.get_parameter(name)))
                setattr(model.get_submodule(path), leaf, weight)
                tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
                tied.pop(name, None)


def _is_same(one: Place, other: Place) -> bool:
    with _opened(one.file) as file, _opened(other.file) as others:
        return torch.equal(file.get_tensor(one.key), others.get_tensor(other.key))


def _keys(model: PreTrainedModel, name: str) -> dict[str, None]:
    """What a weight may be called in files: with or without the name of the decoder, which some leave out."""
    prefix = f"{model.base_model_prefix}."
    return dict.fromkeys((name, prefix + name, name.removeprefix(prefix)))


def stored_in(folder: Path) -> dict[str, Place]:
    """The weights in the safetensors files of a model's folder."""
    index = folder / _INDEX
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.is_file() else {_SINGLE}
    stored: dict[str, Place] = {}
    for name in sorted(names):
        with _opened(folder / name) as file:
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                stored[key] = Place(file=folder / name, key=key, shape=tuple(file.get_slice(key).get_shape()))
    return stored


@contextmanager
def _opened(file: Path) -> Generator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: damaged or not whole ({error}); copy or download it again") from error
