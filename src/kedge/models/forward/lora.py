"""LoRA adapters on a frozen base: making and switching them. `merging` adds them to the base's weights; their files are
in `models/loading/adapters`.

The model stays the transformers model that it is: its linear layers are replaced by `LoraLinear`, which holds the
layer and any number of adapters by name. Those that are active are added to the layer's output. The adapter of a
reward model has its own score head. Left out: other kinds of adapters.
Shape letters: K inputs and N outputs of a layer, R the rank of an adapter.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kedge.core.errors import ModelError
from kedge.core.suggest import did_you_mean
from kedge.models.forward.low_rank import Product, add_low_rank, products
from kedge.models.forward.sharding import real_device
from kedge.models.settings import LoraSettings

REGISTRY = "lora_adapters"
"""The attribute of a model that holds its `Adapters`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """What is known of an adapter beside its weights."""

    rank: int
    alpha: float
    dropout: float
    rslora: bool
    targets: tuple[str, ...]
    """Last parts of the names of the layers that have it, or whole names."""

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class LoraLinear(nn.Module):
    """A linear layer with adapters. Those named in `active` are added to its output; with () it is the layer alone."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ParameterDict()
        """(R, K) by adapter."""
        self.lora_B = nn.ParameterDict()
        """(N, R) by adapter."""
        self.scaling: dict[str, float] = {}
        self.dropout: dict[str, float] = {}
        """The share of an adapter's inputs that is dropped in training."""
        self.active: tuple[str, ...] = ()
        self.is_transposed = isinstance(base_layer, Conv1D)
        self.is_plain = type(base_layer) in (nn.Linear, Conv1D)
        self.out_features, self.in_features = _shape(base_layer)
        self.train(base_layer.training)

    @property
    def weight(self) -> Tensor:
        """The base's, as it is stored."""
        return cast(Tensor, self.base_layer.weight)

    @property
    def bias(self) -> Tensor | None:
        return cast("Tensor | None", self.base_layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        product = self.product()
        return self._added(x) if product is None else products(x, [product])[0]

    def product(self) -> Product | None:
        """The layer with what is active on it, for `products`; None where that would not compute all of it."""
        names = self._names()
        drops = self.training and any(self.dropout[name] for name in names)
        # Autocast and quantised weights have to go through the base's own forward pass.
        if drops or not self.is_plain or torch.is_autocast_enabled(self.weight.device.type):
            return None
        return Product(
            weight_NK=self.weight.T if self.is_transposed else self.weight,
            bias_N=self.bias,
            adapters=tuple((self.lora_A[name], self.lora_B[name], self.scaling[name]) for name in names),
        )

    def _names(self) -> list[str]:
        return [name for name in self.active if name in self.lora_A]

    def _added(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        for name in self._names():
            kept = dropout(x, self.dropout[name], training=self.training)
            y = add_low_rank(y, kept, self.lora_A[name], self.lora_B[name], self.scaling[name])
        return y

    def add(self, name: str, adapter: Adapter, *, dtype: torch.dtype) -> None:
        """A new adapter, which changes nothing yet: B is zero. A is drawn from the global generator as peft draws it,
        so that a seed gives the same adapter there."""
        down = nn.Linear(self.in_features, adapter.rank, bias=False)
        up = nn.Linear(adapter.rank, self.out_features, bias=False)
        nn.init.kaiming_uniform_(down.weight, a=math.sqrt(5))
        nn.init.zeros_(up.weight)
        self.lora_A[name], self.lora_B[name] = (
            nn.Parameter(factor.weight.detach().to(real_device(self.weight), dtype)) for factor in (down, up)
        )
        self.scaling[name], self.dropout[name] = adapter.scaling, adapter.dropout

    def merged(
        self, names: Sequence[str], weights: Mapping[str, Tensor] | None = None, *, path: str = "", base: Any = None
    ) -> Tensor:
        """The base's matrix, as it is stored, with these adapters added; float32 at least.

        `weights` are more precise than the layer's own factors, by their names in a model where it is at `path`; `base`
        is the whole matrix of a layer that has a part of it.
        """
        stored: Tensor = (self.weight if base is None else base).detach()
        wide = stored.to(torch.promote_types(stored.dtype, torch.float32))
        wide_NK = wide.T if self.is_transposed else wide
        for name in names:
            if name in self.lora_A:
                a_RK, b_NR = (
                    (weights or {}).get(f"{path}.{part}.{name}", cast(Tensor, own[name])).detach().to(wide)
                    for part, own in (("lora_A", self.lora_A), ("lora_B", self.lora_B))
                )
                wide_NK = torch.addmm(wide_NK, b_NR, a_RK, alpha=self.scaling[name])
        return wide_NK.T.contiguous() if self.is_transposed else wide_NK


class ScoreHeads(nn.Module):
    """The score head of a reward model, and one for each of its adapters; the active adapter's is used."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_head = nn.ModuleDict()
        self.active: tuple[str, ...] = ()

    def current(self) -> nn.Linear:
        own = [name for name in self.active if name in self.lora_head]
        return cast(nn.Linear, self.lora_head[own[-1]]) if own else self.base_layer

    def forward(self, x: Tensor) -> Tensor:
        return self.current()(x)


@dataclass(slots=True, kw_only=True)
class Adapters:
    """All adapters of a model: where they are, and which are active."""

    layers: dict[str, LoraLinear] = field(default_factory=dict[str, LoraLinear])
    """By the layer's name in the model."""
    heads: ScoreHeads | None = None
    known: dict[str, Adapter] = field(default_factory=dict[str, Adapter])
    beneath: tuple[str, ...] = ()
    """Frozen adapters that belong to the base: they are active below every other."""
    active: tuple[str, ...] = ()

    def activate(self, names: tuple[str, ...]) -> None:
        if names == self.active:
            return
        self.active = names
        for module in (*self.layers.values(), *([self.heads] if self.heads else [])):
            # Not by `setattr`, in which a module looks for parameters: this happens at every switch between roles.
            module.__dict__["active"] = names

    def stack(self, name: str | None) -> tuple[str, ...]:
        """What is active with adapter `name`; None is the base alone."""
        if name is not None and name not in self.known:
            raise ModelError(
                f"no adapter named '{name}'{did_you_mean(name, self.known)}; there are {_list(self.known)}"
            )
        return (*self.beneath, *([] if name is None else [name]))

    def parameters(self, name: str) -> list[tuple[str, nn.Parameter]]:
        """The factors of an adapter and its score head, if any, by the names that they have in the model."""
        named = [
            (f"{path}.{part}.{name}", cast(nn.Parameter, factors[name]))
            for path, layer in self.layers.items()
            if name in layer.lora_A
            for part, factors in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B))
        ]
        if self.heads is not None and name in self.heads.lora_head:
            head = cast(nn.Linear, self.heads.lora_head[name])
            named += [(f"score.lora_head.{name}.{key}", weight) for key, weight in head.named_parameters()]
        return named


def adapters_of(model: nn.Module) -> Adapters | None:
    return getattr(model, REGISTRY, None)


def has_adapters(model: nn.Module) -> bool:
    return adapters_of(model) is not None


def required_adapters(model: nn.Module) -> Adapters:
    adapters = adapters_of(model)
    if adapters is None:
        raise ModelError(f"{type(model).__name__} has no adapters; add one first")
    return adapters


def with_lora(model: PreTrainedModel, settings: LoraSettings, *, name: str, seed: int) -> PreTrainedModel:
    """`model` with one more adapter, which is active; it and its score head, if any, are all that is trainable.

    The model is changed in place. A new adapter changes no output: its B is zero, its A is drawn from the seed.
    """
    adapter = Adapter(
        rank=settings.rank,
        alpha=settings.alpha,
        dropout=settings.dropout,
        rslora=settings.rslora,
        targets=tuple(_targets(model, settings.targets)),
    )
    paths = [path for path in linears(model) if _last(path) in adapter.targets]
    return attach(model, adapter, paths, name=name, seed=seed)


def attach(model: PreTrainedModel, adapter: Adapter, paths: Sequence[str], *, name: str, seed: int) -> PreTrainedModel:
    """As `with_lora`, on the layers with these names."""
    adapters = adapters_of(model) or Adapters()
    _check_name(adapters, name)
    # Adapters are initialised on the CPU, so its generator is the only one to seed and to restore.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for path in paths:
            layer = adapters.layers.get(path)
            if layer is None:
                layer = LoraLinear(model.get_submodule(path))
                layer.active = adapters.active
                adapters.layers[path] = layer
                model.set_submodule(path, layer)
            layer.add(name, adapter, dtype=layer.weight.dtype if layer.is_plain else model.dtype)
    _add_head(model, adapters, name)
    adapters.known[name] = adapter
    setattr(model, REGISTRY, adapters)
    activate(model, name)
    return model


def activate(model: PreTrainedModel, name: str) -> None:
    """Make an adapter active, and it alone trainable."""
    adapters = required_adapters(model)
    adapters.activate(adapters.stack(name))
    model.requires_grad_(False)
    for _, parameter in adapters.parameters(name):
        parameter.requires_grad_(True)


@contextmanager
def using(model: PreTrainedModel, name: str | None) -> Generator[None]:
    """Adapter `name` is active inside of the block (None: the base alone); what is trainable does not change."""
    adapters = required_adapters(model)
    before = adapters.active
    adapters.activate(adapters.stack(name))
    try:
        yield
    finally:
        adapters.activate(before)


@contextmanager
def refusing_unused(model: PreTrainedModel) -> Generator[None]:
    """An error at the end of the block, in which the model computes, where no layer of a target was called: some models
    (Mamba) multiply by a layer's weight themselves, and an adapter on it would never learn."""
    adapters = adapters_of(model)
    layers = {} if adapters is None else adapters.layers
    called: set[str] = set()

    def note(path: str) -> Callable[..., None]:
        return lambda *_: called.add(_last(path))

    hooks = [layer.register_forward_pre_hook(note(path)) for path, layer in layers.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if unused := sorted({_last(path) for path in layers} - called):
        others = ", ".join(sorted(called)) or "none"
        raise ModelError(
            f"LoRA targets {_list(unused)}: {type(model).__name__} takes their weights and never calls them as layers, "
            f"so that an adapter would learn nothing; name the others: `targets: [{others}]`"
        )


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def is_quantised(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "is_quantized", False))


def linears(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The linear layers of the transformer blocks by their names in the model, with or without an adapter."""
    blocks = {id(module) for module in cast(nn.Module, model.get_decoder()).modules()}
    return {
        path: module
        for path, module in model.named_modules()
        if id(module) in blocks and _is_linear(module) and not path.endswith(".base_layer")
    }


def _is_linear(module: nn.Module) -> bool:
    """Whether a layer's output is its matrix times its input. Routers of experts are linear by class, and give out
    choices of their own; bitsandbytes computes the same product from few bits."""
    if isinstance(module, Conv1D | LoraLinear):
        return True
    kind = type(module)
    is_product = kind.forward is nn.Linear.forward or kind.__module__.startswith("bitsandbytes")
    return isinstance(module, nn.Linear) and is_product


def _shape(layer: nn.Module) -> tuple[int, int]:
    """Outputs and inputs; the matrix of a quantised layer has another shape."""
    if isinstance(layer, Conv1D):
        return cast(int, layer.nf), layer.weight.shape[0]
    assert isinstance(layer, nn.Linear)
    return layer.out_features, layer.in_features


def _add_head(model: PreTrainedModel, adapters: Adapters, name: str) -> None:
    """Of a reward model, each adapter has its own copy of the score head."""
    head: Any = getattr(model, "score", None)
    if head is None:
        return
    if adapters.heads is None:
        adapters.heads = ScoreHeads(head)
        cast(Any, model).score = adapters.heads
    adapters.heads.lora_head[name] = copy.deepcopy(adapters.heads.base_layer)


def _check_name(adapters: Adapters, name: str) -> None:
    if name in adapters.known:
        raise ModelError(f"an adapter named '{name}' is already there ({_list(adapters.known)})")
    is_taken = hasattr(nn.ParameterDict(), name) or hasattr(nn.ModuleDict(), name)
    if not re.fullmatch(r"[A-Za-z][\w-]*", name) or is_taken:
        raise ModelError(f"adapter name '{name}': use letters, digits, '-' and '_', and no name of a method ('keys')")


def _targets(model: PreTrainedModel, names: str | Sequence[str]) -> list[str]:
    """The names of the layers that get an adapter: these, or all of them for a string (`all`)."""
    known = {_last(path) for path in linears(model)}
    if isinstance(names, str):
        return sorted(known)
    for name in names:
        if name not in known:
            raise ModelError(
                f"LoRA target '{name}': no linear layer of {type(model).__name__} has that name"
                f"{did_you_mean(name, known)}; there are {_list(sorted(known))}"
            )
    return sorted(names)


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)
