"""Models whose weights several processes hold in parts (FSDP2), put together layer by layer while they compute.

A parameter of a sharded model is a DTensor: this process has some of its rows. Weights that learn are float32 and their
own masters; they travel in the type that the model computes in, and gradients are added up in float32. FSDP2 gathers
weights in the forward pass of a module. Ours is not that of transformers, so `computing` is the forward pass of the
whole model and `through` that of one of its layers: within them weights are whole tensors.

Every process calls everything here that computes or gathers, in the same order. Left out: several models in one unit,
weights on the host, other dimensions than the first.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kedge.core.errors import ModelError
from kedge.models.forward.parts import local, num_parts

T = TypeVar("T")

_RECORD: Final = "kedge_sharding"
"""The attribute of a model that holds its `_Sharding`."""
_UNREAD: Final = "kedge_unread"
"""The attribute of a model on `meta` that holds its `_Unread`."""
_OWNER: Final = "kedge_owner"
"""The attribute of a parameter of a sharded model that leads to the model."""
_CALL: Final = "kedge_call"
"""The method of a sharded module that is a forward pass to FSDP2."""
_torch: Any = torch
"""Its operations on lists of tensors have no public names."""


@dataclass(slots=True, kw_only=True)
class _Sharding:
    """What is known of a sharded model. Not a part of the module tree."""

    mesh: Any
    dtype: torch.dtype
    """In which it computes."""
    blank: PreTrainedModel
    """The model as it was, without weights: they are on `meta`."""
    copy: PreTrainedModel | None = None
    """The model with all its weights, in the type in which it computes; made when it is first needed."""
    is_computing: bool = False
    note: str = ""
    """About how its weights were read."""


Fill = Callable[[PreTrainedModel, Collection[str]], None]
"""Gives the weights of these names their values; they have memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unread:
    fill: Fill
    note: str


def shard_model(
    model: PreTrainedModel, mesh: Any, *, dtype: torch.dtype | None = None, whole: Collection[nn.Parameter] = ()
) -> None:
    """Leave this process its part of the weights of `model`, in place. What learns is trainable already.

    The model computes in `dtype` (None: that of its weights). The parameters in `whole` stay as they are on every
    process, which adds up their gradients by itself: small heads that compute in float32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if getattr(model, "is_quantized", False):
        raise ModelError(
            "placement.weights: shard cannot cut a base of 8 or 4 bits: set base_bits: 16, or weights: replicate"
        )
    unread: _Unread | None = model.__dict__.pop(_UNREAD, None)
    dtype = dtype or model.dtype
    left_out = {id(parameter) for parameter in whole}
    _set_types(model, dtype, left_out)
    record = _Sharding(mesh=mesh, dtype=dtype, blank=_blank(model, dtype, left_out))
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
        "ignored_params": set(whole),
    }
    is_cut = num_parts(mesh) > 1  # else a whole layer is no larger than its part, and stays
    is_summed = mesh.size() > 1
    for block in blocks_of(model):
        block.register_forward_hook(_unview_output)  # before FSDP2's own, which sees what this one gives
        _register(fully_shard(block, reshard_after_forward=is_cut, **options), is_summed=is_summed)
    _register(fully_shard(model, reshard_after_forward=False, **options), is_summed=is_summed)
    if unread is not None:
        unread.fill(model, _give_memory(model, mesh))
        record.note = unread.note
    setattr(model, _RECORD, record)
    for parameter in model.parameters():
        setattr(parameter, _OWNER, weakref.ref(model))


def fill_when_sharded(model: PreTrainedModel, fill: Fill, *, note: str = "") -> None:
    """Have `fill` read the weights of a model on `meta` once each process knows which part of them is its own.

    `note` is what a user should know about how they are read.
    """
    setattr(model, _UNREAD, _Unread(fill=fill, note=note))


def reading_note(model: nn.Module) -> str:
    """What a user should know about how the weights of a sharded model were read; empty where there is nothing."""
    record = _record(model)
    return record.note if record else ""


def fill_of(model: nn.Module) -> Fill | None:
    """How the weights of a model are read that are not there yet; None where they are."""
    unread: _Unread | None = getattr(model, _UNREAD, None)
    return unread.fill if unread else None


def real_device(weight: Tensor) -> torch.device:
    """Where what stands beside a weight is made: on the CPU where the weight itself has no memory yet."""
    return torch.device("cpu") if weight.is_meta else weight.device


def _give_memory(model: PreTrainedModel, mesh: Any) -> set[str]:
    """Memory of its own part for every weight on `meta`; their names."""
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    weights = [*model.named_parameters(), *model.named_buffers()]
    names = {name for name, weight in weights if weight.is_meta}
    # As `to_empty`, which would also forget what has values already.
    module: Any = model
    module._apply(lambda weight: torch.empty_like(weight, device=device) if weight.is_meta else weight.to(device))
    return names


def _set_types(model: PreTrainedModel, dtype: torch.dtype, left_out: Collection[int]) -> None:
    """float32 for what learns, which adapters may do later, and the type of computation for what is frozen."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or id(parameter) in left_out:
            continue
        learns = parameter.requires_grad or ".lora_" in name
        own = torch.promote_types(parameter.dtype, torch.float32) if learns else dtype
        if parameter.dtype != own:
            parameter.data = parameter.detach().to(own)


def _blank(model: PreTrainedModel, dtype: torch.dtype, left_out: Collection[int]) -> PreTrainedModel:
    """The same modules with parameters that have no memory."""
    empty: dict[int, Any] = {}
    for parameter in model.parameters():
        own = parameter.dtype if id(parameter) in left_out or not parameter.is_floating_point() else dtype
        blank = torch.empty(parameter.shape, dtype=own, device="meta")
        empty[id(parameter)] = nn.Parameter(blank, requires_grad=False)
    return copy.deepcopy(model, empty)


def _register(unit: Any, *, is_summed: bool) -> None:
    """Make `_CALL` a forward pass of a unit, and have its gradients added up where FSDP2 would take their mean."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    setattr(unit, _CALL, MethodType(_call, unit))
    register_fsdp_forward_method(unit, _CALL)
    if is_summed:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _call(module: nn.Module, compute: Callable[..., T], *arguments: Any) -> T:
    del module
    return compute(*arguments)


def _unview_output(module: nn.Module, given: Any, output: Any) -> Any:
    """Some layers (OPT's) give a view."""
    del module, given
    return _unviewed(output)


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """The transformer blocks, lowest first."""
    decoder, count = cast(nn.Module, model.get_decoder()), model.config.get_text_config().num_hidden_layers
    for child in decoder.children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise ModelError(f"{type(decoder).__name__}: no list of its {count} transformer blocks was found in it")


# Computing


def is_sharded(model: nn.Module) -> bool:
    return hasattr(model, _RECORD)


def class_name(model: nn.Module) -> str:
    """The name of its class in transformers, of which FSDP2 makes one of its own."""
    return type(model).__name__.removeprefix("FSDP")


def compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """The type in which a model computes; that of the weights that learn may be wider."""
    record = _record(model)
    return model.dtype if record is None else record.dtype


def computing(model: nn.Module, compute: Callable[[], T]) -> T:
    """What `compute` gives, as a forward pass of the model: its weights outside of layers are whole within."""
    record = _record(model)
    if record is None or record.is_computing:
        return compute()
    record.is_computing = True
    try:
        result: T = getattr(model, _CALL)(lambda: _unviewed(compute()))
    finally:
        record.is_computing = False
    if not torch.is_grad_enabled():
        _release(model)
    return result


def _unviewed(result: Any) -> Any:
    """FSDP2 hangs a hook on every output of a pass, and a view may lose it."""
    if isinstance(result, tuple):
        return tuple(map(_unviewed, cast("tuple[Any, ...]", result)))
    return result.clone() if isinstance(result, Tensor) and result.requires_grad and result._is_view() else result


Through = Callable[..., Tensor]
"""From a function and its arguments to what it gives."""


def through(layer: nn.Module) -> Through | None:
    """For a layer that is a unit of a sharded model, what runs a function as its forward pass: its weights are whole
    within. Tensors that need a gradient must be arguments. None where weights are always whole."""
    return getattr(layer, _CALL, None)


def _record(model: nn.Module) -> _Sharding | None:
    return getattr(model, _RECORD, None)


def _units(model: nn.Module) -> Iterator[Any]:
    """The layers, and the model itself with what else it has."""
    return (module for module in model.modules() if hasattr(module, _CALL))


def sharded_models(weights: Iterable[Tensor]) -> list[nn.Module]:
    """The models that these weights are parts of, each once."""
    owners = (getattr(weight, _OWNER, None) for weight in weights)
    models = {id(model): model for owner in owners if owner is not None and (model := owner()) is not None}
    return list(models.values())


def until_last_pass(model: nn.Module, *, is_last: bool) -> None:
    """Before the backward pass of one of several passes of a step: where a part is the whole, weights stay gathered and
    gradients are not cut until the last of them. Elsewhere that would take the memory that cutting saves."""
    record = _record(model)
    if record is not None and num_parts(record.mesh) == 1:
        root: Any = model
        root.set_requires_gradient_sync(is_last)
        root.set_reshard_after_backward(is_last)


def forget_sums(model: nn.Module) -> None:
    """Drop the gradients of passes that no last pass came after: a step was given up."""
    for group in (group for unit in _units(model) for group in _groups(unit)):
        for weight in group.fsdp_params:
            weight.unsharded_accumulated_grad = None
            if hasattr(weight, "_unsharded_param"):
                weight._unsharded_param.grad = None


def _groups(unit: Any) -> list[Any]:
    """What FSDP2 knows of the weights of a unit; torch 2.11 has one group at most."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in (groups if groups is not None else [state._fsdp_param_group]) if group is not None]


_MOST_PASSES: Final = 1000
"""FSDP2 remembers the order of all passes since the last backward; that of a frozen model would grow for ever."""


def _release(model: nn.Module) -> None:
    """Let go of whole weights: after a pass without gradients nothing else does, and they would outlive an update."""
    order = None
    for unit in _units(model):
        unit.reshard()
        for group in _groups(unit):
            order = group.comm_ctx.post_forward_order
            if len(group._post_forward_indices) > _MOST_PASSES:
                group._post_forward_indices.clear()
    if order is not None and len(order) > _MOST_PASSES * 100:
        order.clear()


# Copies with all weights


@torch.no_grad()
def whole_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, or, of a sharded one, a copy with all weights as they are now in the type in which it computes.

    It is always the same copy, whose weights stay where they are in memory: frozen ones are filled in once.
    """
    record = _record(model)
    if record is None:
        return model
    is_new = record.copy is None
    if record.copy is None:
        record.copy = _allocated(record.blank, model.device)
    named = model.named_parameters()
    _fill(record.copy, model, {name for name, parameter in named if is_new or parameter.requires_grad})
    return record.copy


def _fill(target: PreTrainedModel, model: PreTrainedModel, wanted: Collection[str]) -> None:
    """Copy the weights with these names, gathered layer by layer."""
    targets = dict(target.named_parameters())
    for unit, names in _own_names(model):
        if own := [name for name in names if name in wanted]:
            unit.unshard()
            sources = [model.get_parameter(name).detach() for name in own]
            _torch._foreach_copy_([targets[name] for name in own], sources)
            unit.reshard()


def drop_copy(model: PreTrainedModel) -> None:
    """Give back the memory of the copy."""
    record = _record(model)
    if record is not None:
        record.copy = None


@torch.no_grad()
def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A sharded model as it is now, frozen and sharded alike."""
    record = _record(model)
    assert record is not None
    sources, dtype = dict(model.named_parameters()), record.dtype

    @torch.no_grad()
    def fill(target: PreTrainedModel, names: Collection[str]) -> None:
        for name, parameter in target.named_parameters():
            if name in names:
                local(parameter).copy_(local(sources[name]).to(dtype))

    target = copy.deepcopy(record.blank)
    fill_when_sharded(target, fill)
    shard_model(target, record.mesh, dtype=dtype)
    return target


def blank_of(model: PreTrainedModel) -> PreTrainedModel:
    """A model without memory for its weights, a sharded one as it was before; it is not to be changed."""
    if (record := _record(model)) is not None:
        return record.blank
    empty: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, empty)


def _allocated(blank: PreTrainedModel, device: str | torch.device) -> PreTrainedModel:
    memory: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
        for parameter in blank.parameters()
    }
    return copy.deepcopy(blank, memory).eval()


def _own_names(model: PreTrainedModel) -> Iterator[tuple[Any, list[str]]]:
    """The units of a sharded model with the names of the parameters that belong to each."""
    blocks = {id(block) for block in blocks_of(model)}
    inner = {name: block for name, block in model.named_modules() if id(block) in blocks}
    by_unit: dict[str, list[str]] = {name: [] for name in inner}
    by_unit[""] = []
    for name, _ in model.named_parameters():
        owner = next((unit for unit in inner if name.startswith(f"{unit}.")), "")
        by_unit[owner].append(name)
    return ((inner[unit] if unit else model, names) for unit, names in by_unit.items())
