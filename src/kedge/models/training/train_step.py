"""One exact optimiser step over some parameters, from any number of loss terms and micro-batches.

Every micro-batch is divided by the weight of the whole step, so that cutting the step differently changes nothing. A
step whose loss or gradient is not finite is refused before it reaches the weights. Processes that learn together
compute a share of the micro-batches each, and add up gradients and totals before the step.

On a GPU parameters are bfloat16, and a float32 master of each takes the updates, which bfloat16 would round away;
masters are what is saved. In float32, as on the CPU, a parameter is its own master. Masters and moments may live in
host memory between the updates (`offload`), which changes no number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from kedge.core.errors import CheckpointError, ConfigError, ModelError, NumericsError
from kedge.core.loss import widen
from kedge.core.optimiser import OptimiserSettings
from kedge.core.world import passes_of
from kedge.models.forward.host_memory import host_copies
from kedge.models.forward.parts import is_part, local, part_of
from kedge.models.forward.sharding import is_sharded
from kedge.models.training.adamw import AdamWBackend, adamw_backend, load_state_of, make_adamw, state_of
from kedge.models.training.passes import Cut, InferenceSize, Passes, PassSize, same_random_numbers
from kedge.models.training.sharded_adamw import ShardedAdamW, as_parts, own_parts, own_parts_of
from kedge.models.training.totals import HOST, Share, Sums, Totals, added, read

BatchT = TypeVar("BatchT")
Named = Sequence[tuple[str, nn.Parameter]]

_GRADIENT_BYTES = 4
"""Of a float32 gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(Generic[BatchT]):
    """A loss to minimise. `weight` counts the items of a batch, from its data alone; `sums` runs the model on it."""

    weight: Callable[[BatchT], float]
    sums: Callable[[BatchT], Sums]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term(Generic[BatchT]):
    """One term of a step's loss: the mean of an objective over its own batches, times `coef`."""

    objective: Objective[BatchT]
    batches: Cut[BatchT]
    """The micro-batches for a size of passes."""
    coef: float = 1.0
    name: str = ""
    """Prefix of the names of its metrics."""


class TrainedWeights:
    """What is trained of `module`: `named` parameters with their masters, which outlive an optimiser: several rounds go
    on with them."""

    def __init__(
        self, module: nn.Module, named: Named, masters: Sequence[nn.Parameter], *, on_host: bool = False
    ) -> None:
        """`on_host`: masters that are copies are in host memory, where an optimiser's moments belong too."""
        self.module, self.named, self.masters, self.on_host = module, list(named), list(masters), on_host

    def weights(self) -> dict[str, Tensor]:
        """By the names of their parameters, in full precision; the next step changes them."""
        return _weights(self.named, self.masters)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        _load_weights(self.named, self.masters, weights)


def trained_weights(
    model: nn.Module, *, dtype: torch.dtype | None = None, head: nn.Module | None = None, on_host: bool = False
) -> TrainedWeights:
    """What is trainable of `model`, to be computed in `dtype`; None leaves the types as they are.

    The frozen weights of the model are converted too. `head`, a part of the model, stays in float32. With `on_host`
    masters that are copies are in host memory from the beginning.
    """
    if is_sharded(model):
        dtype = None  # parts are in the types that they learn in, and are gathered in that of computation
    of_head = {id(parameter) for parameter in head.parameters()} if head else set[int]()

    def own_dtype(parameter: nn.Parameter) -> torch.dtype:
        return parameter.dtype if dtype is None or id(parameter) in of_head else dtype

    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    masters = _masters([(parameter, own_dtype(parameter)) for _, parameter in named], on_host=on_host)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype.itemsize > own_dtype(parameter).itemsize:
            parameter.data = parameter.detach().to(own_dtype(parameter))
    return TrainedWeights(model, named, masters, on_host=on_host)


def _masters(typed: Sequence[tuple[nn.Parameter, torch.dtype]], *, on_host: bool) -> list[nn.Parameter]:
    """The weights of parameters that will be computed in these types, in float32 at least: a parameter itself where
    that is enough."""
    copied = [
        parameter
        for parameter, dtype in typed
        if parameter.dtype.itemsize <= 2 or dtype.itemsize < parameter.dtype.itemsize
    ]
    homes = host_copies(copied) if on_host else [widen(parameter.detach()) for parameter in copied]
    copies = {id(parameter): nn.Parameter(home) for parameter, home in zip(copied, homes, strict=True)}
    return [copies.get(id(parameter), parameter) for parameter, _ in typed]


def _weights(named: Named, masters: Sequence[nn.Parameter]) -> dict[str, Tensor]:
    return {name: master.detach() for (name, _), master in zip(named, masters, strict=True)}


@torch.no_grad()
def _load_weights(named: Named, masters: Sequence[nn.Parameter], weights: Mapping[str, Tensor]) -> None:
    if list(weights) != [name for name, _ in named]:
        raise CheckpointError(
            "this checkpoint is of other trainable weights than the model has; was the recipe changed?"
        )
    for (_, parameter), master, weight in zip(named, masters, weights.values(), strict=True):
        local(master).copy_(part_of(weight, master))
        if parameter is not master:
            parameter.copy_(master)


class TrainStep:
    """AdamW over `named` parameters, and the number of steps taken."""

    def __init__(
        self,
        named: Named,
        settings: OptimiserSettings,
        *,
        total_steps: int,
        owner: str = "",
        masters: Sequence[nn.Parameter] | None = None,
        passes: Passes | None = None,
        on_host: bool = False,
    ) -> None:
        """`owner` precedes the names of parameters in errors, where several roles have parameters of the same name.

        `masters` are the weights in full precision; without them, copies of those that are in lower precision.
        `passes` says how much of a step is computed at once. With `on_host` moments are in host memory between the
        updates, and so are masters that are copies: where they are given, they have to be there.
        """
        self.settings = settings
        self.passes = passes or Passes()
        self._owner = f"{owner}'s " if owner else ""
        self.total_steps = total_steps
        self.step = 0
        self.named = list(named)
        self.device = device = self.named[0][1].device
        self.inference = InferenceSize(device, world=self.passes.world)
        parameters = [parameter for _, parameter in self.named]
        typed = [(parameter, parameter.dtype) for parameter in parameters]
        self._masters = list(masters or _masters(typed, on_host=on_host))
        self._is_sharded = any(map(is_part, parameters))
        self.on_host = on_host
        if on_host:
            _refuse_on_host(settings, is_sharded=self._is_sharded)
        if self._is_sharded:
            _refuse_blocks(settings)
            own = own_parts_of(self._masters)
            self._optimiser = make_adamw(own, settings, device)
            backend = adamw_backend(own, own, self._optimiser)
            self._backend: AdamWBackend = ShardedAdamW(self._masters, backend, self.passes.world)
            self._allocate()  # a state that says how moments are cut can be loaded part by part
        else:
            self._optimiser = make_adamw(self._masters, settings, device)
            self._backend = adamw_backend(parameters, self._masters, self._optimiser, on_host=on_host)

    def learn(self, *terms: Term[Any]) -> dict[str, float]:
        """One optimiser step; returns means over the step. A step that is refused counts, and changes no weight."""
        self.step += 1
        self._allocate()
        if self.passes.size is None:
            self._choose_passes(terms)
        shares = self.passes.run(self.device, lambda size: self._share(terms, size), lambda size: _all(terms, size))
        norm = self._norm(shares)
        totals = [
            (term, added(parts, self.device))
            for term, *parts in zip(terms, *(share.totals for share in shares), strict=True)
        ]
        loss = torch.stack([term.coef * total.loss for term, total in totals]).sum()
        means = {f"{term.name}{name}": value for term, total in totals for name, value in total.means().items()}
        is_finite = (loss + norm).isfinite()
        clip_scale = (self.settings.clip / (norm + 1e-6)).clamp(max=1)
        rate = learning_rate(self.settings, self.step, self.total_steps)
        # The update is launched before anything is read, so that the GPU does not wait for the host that launches it.
        self._update(rate, torch.where(is_finite, clip_scale, math.nan))
        *metrics, is_taken = read([*means.values(), norm, is_finite])
        self._backend.settle(is_taken=bool(is_taken))
        if not is_taken:
            raise NumericsError(f"step {self.step}: {self._non_finite(loss)}; the weights are unchanged")
        return {**dict(zip([*means, "grad_norm"], metrics, strict=True)), "lr": rate}

    def _allocate(self) -> None:
        """Before the first pass of the first step: what is left free after that is what passes may take."""
        if self._optimiser.state:
            return
        try:
            self._backend.allocate()
        except torch.OutOfMemoryError as error:
            num_bytes = self.moment_bytes * sum(local(master).numel() for master in self._masters)
            raise ModelError(
                f"out of memory for the moments of the {self._owner}optimiser ({num_bytes / 2**30:.2f} GiB): train "
                "adapters (lora) or fewer layers, or set the optimiser's name to adamw_8bit"
            ) from error

    def _update(self, rate: float, scale: Tensor) -> None:
        """The update writes in place. Where it fails even so, nothing may go on from weights that it left half done."""
        try:
            self._backend.step(rate=rate, scale=scale)
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"step {self.step}: out of memory in the {self._owner}update itself, which may have changed a part of "
                "the weights: the run ends here. Resume it from its last checkpoint, with a smaller micro_batch or "
                "memory.recompute: true"
            ) from error

    def _share(self, terms: Sequence[Term[Any]], size: PassSize) -> Share:
        """The gradients of this process's share of all terms, from nothing; and what else it adds to the step."""
        world = self.passes.world
        self._backend.clear()
        cut = [list(term.batches(size)) for term in terms]  # they are read twice
        weights = [self._weight(term, batches) for term, batches in zip(terms, cut, strict=True)]
        own = list(passes_of(world, [(number, batch) for number, batches in enumerate(cut) for batch in batches]))
        totals = [Totals(weight=weight) for weight in weights]
        for place, ((number, batch), counts) in enumerate(own, start=1):
            self._accumulate(terms[number], batch, totals[number], counts=counts, is_last=place == len(own))
        if world.size == 1:
            return Share(totals=totals, norm=self._backend.norm())
        self._backend.widen()
        return Share(
            totals=[total.on(HOST) for total in totals],
            reached=[gradient is not None for gradient in self._backend.gradients()],
        )

    def _norm(self, shares: Sequence[Share]) -> Tensor:
        """The norm of the whole gradient, which is added up over the processes before."""
        if (norm := shares[0].norm) is not None:
            return norm
        reached = [any(reaches) for reaches in zip(*(share.reached for share in shares), strict=True)]
        self._backend.add_up(self.passes.world, reached)
        return self._backend.norm()

    def _weight(self, term: Term[Any], batches: Sequence[Any]) -> float:
        weight = sum(term.objective.weight(batch) for batch in batches)
        if weight <= 0:
            raise NumericsError(
                f"step {self.step}: nothing in it counts (weight {weight:g}); the weights are unchanged"
            )
        return weight

    def _choose_passes(self, terms: Sequence[Term[Any]]) -> None:
        """Decide `micro_batch: auto` with passes over parts of this step, which leave no trace."""

        def trial(size: PassSize) -> int:
            largest = [(term, term.batches(size)[:1]) for term in terms]
            with same_random_numbers(self.device):
                for term, batches in largest:
                    for batch in batches:
                        self._accumulate(term, batch, Totals(weight=1.0))
            self._backend.clear()
            return sum(batch.num_tokens for _, batches in largest for batch in batches)

        is_fresh = not self._optimiser.state
        num_weights = sum(local(master).numel() for master in self._masters)
        self.passes.choose(
            self.device,
            tokens_of=lambda size: [batch.num_tokens for batch in _all(terms, size)],
            trial=trial,
            # Moments in 8 bits, which the first update allocates, and float32 sums of the gradients of several passes.
            reserved_bytes=num_weights * (self.moment_bytes * is_fresh + _GRADIENT_BYTES),
        )

    def _accumulate(
        self, term: Term[Any], batch: Any, totals: Totals, *, counts: bool = True, is_last: bool = True
    ) -> None:
        """Add the gradients of a batch to those of the step, and its sums to `totals`, if it counts."""
        sums = term.objective.sums(batch)
        self._backend.add(sums.loss * (term.coef / totals.weight if counts else 0.0), is_last=is_last)
        if counts:
            totals.add(sums)

    def measure(self, objective: Objective[BatchT], batches: Cut[BatchT]) -> dict[str, float]:
        """The same means, without gradients and without a step."""
        with torch.no_grad():
            parts = self.inference.each(batches, lambda batch: (objective.weight(batch), objective.sums(batch)))
        own = Totals(weight=sum(weight for weight, _ in parts))
        for _, sums in parts:
            own.add(sums)
        world = self.passes.world
        shares = [own] if world.size == 1 else world.gather(own.on(HOST))
        means = replace(added(shares, self.device), weight=sum(share.weight for share in shares)).means()
        return dict(zip(means, read(list(means.values())), strict=True))

    def weights(self) -> dict[str, Tensor]:
        """The trained weights by the names of their parameters, in full precision."""
        return _weights(self.named, self._masters)

    @property
    def moment_bytes(self) -> int:
        """Memory of the two moments of one weight."""
        return 2 if self.settings.name == "adamw_8bit" else 8

    def copy_bytes(self) -> int:
        """Memory of the float32 masters of parameters in lower precision."""
        pairs = zip(self.named, self._masters, strict=True)
        return sum(master.nbytes for (_, parameter), master in pairs if parameter is not master)

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs: trained weights, optimiser, step, size of the passes.

        Of sharded weights it has tensors of which this process holds a part.
        """
        optimiser = state_of(self._optimiser)
        return {
            "step": self.step,
            "weights": self.weights(),
            "optimiser": as_parts(optimiser, self._in_groups()) if self._is_sharded else optimiser,
            "passes": self.passes.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        _load_weights(self.named, self._masters, state["weights"])
        optimiser = own_parts(state["optimiser"], self._in_groups()) if self._is_sharded else state["optimiser"]
        load_state_of(self._optimiser, optimiser)
        if self.on_host and self._optimiser.state:
            self._backend.allocate()  # what was loaded goes to where it belongs
        self.passes.load(state["passes"])
        self.step = int(state["step"])

    def _in_groups(self) -> list[nn.Parameter]:
        """The masters in the order of the optimiser's groups."""
        return [master for is_matrix in (True, False) for master in self._masters if (master.ndim >= 2) == is_matrix]

    def _non_finite(self, loss: Tensor) -> str:
        """What is not finite, in words: the loss, the first such gradient by name, or their norm."""
        if not torch.isfinite(loss):
            return f"the {self._owner}loss is {loss.item()}"
        gradients = zip(self.named, self._backend.gradients(), strict=True)
        names = [name for (name, _), grad in gradients if grad is not None and not torch.isfinite(grad).all()]
        if self._is_sharded:  # each process knows of its parts
            seen = {name for own in self.passes.world.gather(names) for name in own}
            names = [name for name, _ in self.named if name in seen]
        if not names:
            return f"the norm of the {self._owner}gradient is not finite"
        return f"the gradient of {self._owner}{names[0]} is not finite"


def _refuse_blocks(settings: OptimiserSettings) -> None:
    if settings.name == "adamw_8bit":
        raise ConfigError(
            "adamw_8bit keeps moments in blocks that cannot be cut by the rows of a weight: with placement.weights: "
            "shard, set the optimiser's name to adamw"
        )


def _refuse_on_host(settings: OptimiserSettings, *, is_sharded: bool) -> None:
    if settings.name == "adamw_8bit":
        raise ConfigError(
            "adamw_8bit keeps its state as its package does, on the device: with memory.offload: [optimiser], set the "
            "optimiser's name to adamw"
        )
    if is_sharded:
        raise ConfigError("sharded weights are not moved to host memory: use placement.weights: replicate")


def _all(terms: Sequence[Term[Any]], size: PassSize) -> list[Any]:
    return [batch for term in terms for batch in term.batches(size)]


def learning_rate(settings: OptimiserSettings, step: int, total: int) -> float:
    """The rate of step `step` (counted from 1) out of `total`: a straight rise, then the schedule down to zero.

    >>> half = OptimiserSettings(lr=1.0, schedule="linear", warmup=0.5)
    >>> [learning_rate(half, step, 4) for step in (1, 2, 3, 4)]
    [0.5, 1.0, 1.0, 0.5]
    >>> learning_rate(OptimiserSettings(lr=1.0, schedule="cosine", warmup=0.0), 3, 4)
    0.5
    """
    # Rounded first: 0.07 · 100 is a little more than 7 in binary, and would make 8 steps.
    rising = math.ceil(round(settings.warmup * total, 9))
    if step <= rising:
        return settings.lr * step / rising
    progress = (step - rising - 1) / max(1, total - rising)
    match settings.schedule:
        case "constant":
            return settings.lr
        case "linear":
            return settings.lr * (1 - progress)
        case "cosine":
            return settings.lr * (1 + math.cos(math.pi * progress)) / 2
