"""Gradient accumulation and AdamW (Loshchilov & Hutter 2019) on float32 masters of the weights.

A weight in float32 is its own master. There are two backends: torch's own kernels and, on a GPU, one of ours that reads
the gradients in their own type and writes moments, masters and weights in a single pass. Both keep their state in
torch's optimiser, so that a run can be resumed with the other one. AdamW in 8 bits is that of bitsandbytes or torchao.
Weights that several processes hold in parts are in `sharded_adamw`, state in host memory in `offload`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from kedge.core.errors import ModelError
from kedge.core.optimiser import OptimiserSettings, eight_bit_package
from kedge.core.world import World
from kedge.models.training.offload import ApplyUpdates, StagedUpdates, apply_by_torch, move_moments

_torch: Any = torch
"""Its operations on lists of tensors have no public names."""
_WIDENED_TOGETHER = 64
"""Weights whose gradients are converted to float32 at a time: so many gradients are in memory twice."""


class AdamWBackend(Protocol):
    """One step: `clear`, `add` once or more, `step`, `settle`; among several processes `widen` and `add_up` before."""

    def allocate(self) -> None:
        """Take the memory that the first step needs: after that a step writes in place. Not for 8-bit packages, which
        allocate when they are asked to step."""
        ...

    def clear(self) -> None: ...
    def add(self, loss: Tensor, *, is_last: bool = True) -> None:
        """Add the gradients of `loss`, which is or is not the last one of the step."""
        ...

    def take(self, gradients: Sequence[Tensor | None]) -> None:
        """Have these as the sums, in the order of the weights, instead of `add`."""
        ...

    def gradients(self) -> list[Tensor | None]:
        """The sums, in the order of the weights; None for a weight that no loss has reached."""
        ...

    def widen(self) -> None:
        """Turn the sums into float32, in which they are added up: all the memory that this takes is taken here."""
        ...

    def add_up(self, world: World, reached: Sequence[bool]) -> None:
        """Add up the sums over all processes; `reached` are the weights that have a gradient on any of them."""
        ...

    def norm(self) -> Tensor:
        """The L2 norm of all gradients together."""
        ...

    def step(self, *, rate: float, scale: Tensor) -> None:
        """One step of AdamW with learning rate `rate` on the gradients times `scale`, a tensor of one number so that
        nobody has to wait for it. Where that is NaN the step changes nothing."""
        ...

    def settle(self, *, is_taken: bool) -> None:
        """Told what the scale of the last step was: a step that is not taken does not count, and its gradients stay."""
        ...


def adamw_backend(
    weights: Sequence[nn.Parameter],
    masters: Sequence[nn.Parameter],
    optimiser: torch.optim.Optimizer,
    *,
    on_host: bool = False,
) -> AdamWBackend:
    """The fastest backend for these weights. `masters[i]` is `weights[i]`, or a float32 copy of it.

    With `on_host` the moments are in host memory, and so are masters that are copies.
    """
    if not isinstance(optimiser, torch.optim.AdamW):
        return TorchAdamW(weights, masters, optimiser)
    on_gpu = all(weight.is_cuda and weight.is_contiguous() for weight in (weights if on_host else (*weights, *masters)))
    has_known_types = all(weight.dtype in (torch.float32, torch.bfloat16) for weight in weights)
    is_fused = on_gpu and has_known_types and find_spec("triton") is not None
    if not on_host:
        return (FusedAdamW if is_fused else TorchAdamW)(weights, masters, optimiser)
    entries = sum(weight.numel() for weight in weights)
    staged = StagedUpdates(_kernel() if is_fused else apply_by_torch, weights[0].device, entries=entries)
    return FusedAdamW(weights, masters, optimiser, staged=staged)


def _kernel() -> ApplyUpdates:
    """Ours, in Triton."""
    from kedge.models.training.kernels.adamw import apply_updates

    return apply_updates


def make_adamw(
    parameters: Sequence[nn.Parameter], settings: OptimiserSettings, device: torch.device
) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices alone: on biases and norms it only does harm."""
    groups = [
        {"params": [weight for weight in parameters if weight.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [weight for weight in parameters if weight.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (settings.beta1, settings.beta2)
    if settings.name == "adamw_8bit":
        # A package that the type checker need not know, for one of them may be installed.
        package = import_module({"bitsandbytes": "bitsandbytes.optim", "torchao": "torchao.optim"}[_package()])
        return package.AdamW8bit(groups, lr=settings.lr, betas=betas, eps=settings.eps)
    is_fused = device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.eps, fused=is_fused)


def _package() -> str:
    package = eight_bit_package()
    if package is None:
        raise ModelError("adamw_8bit needs bitsandbytes or torchao: pip install bitsandbytes")
    return package


def state_of(optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimiser in plain tensors and numbers."""
    state = optimiser.state_dict()
    moments = {key: {name: _plain(value) for name, value in of.items()} for key, of in state["state"].items()}
    groups = [{name: _number(value) for name, value in group.items()} for group in state["param_groups"]]
    return {"state": moments, "param_groups": groups}


def load_state_of(optimiser: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    rates = [group["lr"] for group in optimiser.param_groups]
    moments = {key: {name: _quantised(value) for name, value in of.items()} for key, of in state["state"].items()}
    optimiser.load_state_dict({"state": moments, "param_groups": [dict(group) for group in state["param_groups"]]})
    for group, rate in zip(optimiser.param_groups, rates, strict=True):
        if isinstance(rate, Tensor):  # torchao keeps it in a tensor, whose value changes
            group["lr"] = rate.fill_(group["lr"])


def _plain(value: Any) -> Any:
    """torchao's moments are tensors of a class of their own, made of codes and scales."""
    if not isinstance(value, Tensor) or type(value) in (Tensor, nn.Parameter):
        return value
    codes = cast(Any, value)
    return {"signed": codes.signed, **{name: getattr(codes, name) for name in codes.tensor_attrs}}


def _quantised(value: Any) -> Any:
    if not (isinstance(value, Mapping) and "codes" in value):
        return value
    parts = cast("Mapping[str, Any]", value)
    state = import_module("torchao.optim.subclass_8bit").OptimState8bit
    return state(parts["codes"], parts["scale"], parts["qmap"], parts["signed"], dtype=torch.float32)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


class TorchAdamW:
    """Gradients in `grad` of the masters, and an optimiser of torch's kind."""

    def __init__(
        self, weights: Sequence[nn.Parameter], masters: Sequence[nn.Parameter], optimiser: torch.optim.Optimizer
    ) -> None:
        self._weights, self._masters, self._optimiser = list(weights), list(masters), optimiser

    def allocate(self) -> None:
        if isinstance(self._optimiser, torch.optim.AdamW):
            for group in self._optimiser.param_groups:
                for master in group["params"]:
                    _moments(self._optimiser, master, step_on=master.device if group["fused"] else torch.device("cpu"))

    def clear(self) -> None:
        self._optimiser.zero_grad(set_to_none=True)

    def add(self, loss: Tensor, *, is_last: bool = True) -> None:
        del is_last
        if not _copied(self._weights, self._masters):
            loss.backward()
            return
        remaining = [
            (master, gradient)
            for master, gradient in zip(self._masters, _gradients(loss, self._weights), strict=True)
            if gradient is not None
        ]
        while remaining:  # the gradients of a part are freed before those of the next are converted
            part, remaining = remaining[:_WIDENED_TOGETHER], remaining[_WIDENED_TOGETHER:]
            for master, _ in part:
                master.grad = torch.zeros_like(master) if master.grad is None else master.grad
            _torch._foreach_add_([master.grad for master, _ in part], [gradient for _, gradient in part])

    def take(self, gradients: Sequence[Tensor | None]) -> None:
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = gradient

    def gradients(self) -> list[Tensor | None]:
        return [master.grad for master in self._masters]

    def widen(self) -> None:
        """Gradients have the type of their masters, which is float32 at least."""

    def add_up(self, world: World, reached: Sequence[bool]) -> None:
        for master, is_reached in zip(self._masters, reached, strict=True):
            if is_reached and master.grad is None:
                master.grad = torch.zeros_like(master)
        world.add(*present(self.gradients()))

    def norm(self) -> Tensor:
        return nn.utils.get_total_norm(present(self.gradients()))

    def step(self, *, rate: float, scale: Tensor) -> None:
        factor = scale.item()
        if math.isnan(factor):
            return
        if factor != 1:
            _torch._foreach_mul_(present(self.gradients()), factor)
        for group in self._optimiser.param_groups:
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        self._optimiser.step()
        self.publish()

    def settle(self, *, is_taken: bool) -> None:
        """Such a step was not asked of torch's optimiser."""

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters to the weights."""
        if copied := _copied(self._weights, self._masters):
            _torch._foreach_copy_(*map(list, zip(*copied, strict=True)))


class FusedAdamW:
    """Gradients of a single `add` keep the type that autograd gave them; one kernel does the whole step."""

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        masters: Sequence[nn.Parameter],
        optimiser: torch.optim.AdamW,
        *,
        staged: StagedUpdates | None = None,
    ) -> None:
        """With `staged`, which does the steps then, moments and masters that are copies are in host memory."""
        self._weights, self._masters, self._optimiser = list(weights), list(masters), optimiser
        self._staged = staged
        self._sums: list[Tensor | None] = []
        self._counts = torch.zeros(0)
        self._counted_N = torch.zeros(0, dtype=torch.bool)
        """The weights that the last step changed."""
        self._moments: list[list[tuple[int, Tensor, Tensor]]] = []
        self._state_of_moments: object = None
        self.clear()

    def allocate(self) -> None:
        if self._staged is not None:
            self._moments_of_groups()
            return
        for group in self._optimiser.param_groups:
            for master in group["params"]:
                self._state(master)

    def clear(self) -> None:
        self._sums = [None] * len(self._weights)

    def add(self, loss: Tensor, *, is_last: bool = True) -> None:
        del is_last
        gradients = _gradients(loss, self._weights)
        if not any(total is not None for total in self._sums):
            self._sums = gradients
            return
        for index in range(len(gradients)):  # each is freed as soon as it is added
            self._sums[index], gradients[index] = _sum(self._sums[index], gradients[index]), None

    def take(self, gradients: Sequence[Tensor | None]) -> None:
        self._sums = list(gradients)

    def gradients(self) -> list[Tensor | None]:
        return self._sums

    def widen(self) -> None:
        for index, total in enumerate(self._sums):
            self._sums[index] = None if total is None else total.float().contiguous()

    def add_up(self, world: World, reached: Sequence[bool]) -> None:
        for index, is_reached in enumerate(reached):
            if is_reached and self._sums[index] is None:
                self._sums[index] = torch.zeros_like(self._weights[index], dtype=torch.float32)
        world.add(*present(self._sums))

    def norm(self) -> Tensor:
        """Added up in the order of the weights: any other order of types would change the last bit."""
        gradients = present(self._sums)
        norms = gradients[:]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            indices = [index for index, gradient in enumerate(gradients) if gradient.dtype == dtype]
            of_type = _torch._foreach_norm([gradients[index] for index in indices], 2, torch.float32)
            for index, norm in zip(indices, of_type, strict=True):
                norms[index] = norm
        return torch.linalg.vector_norm(torch.stack(norms))

    @torch.no_grad()
    def step(self, *, rate: float, scale: Tensor) -> None:
        apply = self._staged or _kernel()
        groups = self._moments_of_groups()
        steps: list[float] = (self._counts + 1).tolist()
        for group, rows in zip(self._optimiser.param_groups, groups, strict=True):
            group["lr"] = rate
            kinds: dict[tuple[bool, torch.dtype, float], list[tuple[Tensor, ...]]] = {}
            for index, mean, square in rows:
                weight, master, gradient = self._weights[index], self._masters[index], self._sums[index]
                if gradient is None:
                    continue
                row = weight, master, gradient, mean, square
                kinds.setdefault((weight is master, gradient.dtype, steps[index]), []).append(row)
            for (_, _, step), tensors in kinds.items():
                weights, masters, gradients, means, squares = zip(*tensors, strict=True)
                apply(weights, masters, gradients, means, squares, group, scale=scale, step=step)
        self._counted_N = torch.tensor([gradient is not None for gradient in self._sums])
        self._counts += self._counted_N

    def settle(self, *, is_taken: bool) -> None:
        if is_taken:
            self.clear()  # frees the memory of the gradients for the next role
        else:
            self._counts -= self._counted_N.float()

    def _moments_of_groups(self) -> list[list[tuple[int, Tensor, Tensor]]]:
        """Of the weights of each group: index and moments. Their counts of steps become entries of one tensor, for
        hundreds of tensors of one number take longer than the rest of a step. torch's optimiser makes itself a new
        state when one is loaded, and as long as it has the same they are the same tensors."""
        if self._state_of_moments is not self._optimiser.state:
            if self._staged is not None:
                move_moments(self._optimiser, pinned=self._weights[0].is_cuda)
            states = [self._state(master) for master in self._masters]
            self._counts = torch.stack([state["step"] for state in states])
            for index, state in enumerate(states):
                state["step"] = self._counts[index]
            place = {id(master): index for index, master in enumerate(self._masters)}
            self._moments = [
                [
                    (index, states[index]["exp_avg"], states[index]["exp_avg_sq"])
                    for index in (place[id(master)] for master in group["params"])
                ]
                for group in self._optimiser.param_groups
            ]
            self._state_of_moments = self._optimiser.state
        return self._moments

    def _state(self, master: nn.Parameter) -> dict[str, Tensor]:
        """The state of torch's optimiser; its step count is on the CPU."""
        state = _moments(self._optimiser, master, step_on=torch.device("cpu"))
        if state["step"].is_cuda:
            state["step"] = state["step"].cpu()
        return state


def _moments(optimiser: torch.optim.AdamW, master: nn.Parameter, *, step_on: torch.device) -> dict[str, Tensor]:
    """The state of a weight as torch's AdamW makes it in its first step; `step_on` is where its step count is."""
    state: dict[str, Tensor] = optimiser.state[master]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=step_on)
        state |= {
            name: torch.zeros_like(master, memory_format=torch.preserve_format) for name in ("exp_avg", "exp_avg_sq")
        }
    return state


def _copied(weights: Sequence[nn.Parameter], masters: Sequence[nn.Parameter]) -> list[tuple[Tensor, Tensor]]:
    """The weights whose master is a copy, each with its master."""
    return [(weight, master) for weight, master in zip(weights, masters, strict=True) if weight is not master]


def _gradients(loss: Tensor, weights: Sequence[Tensor]) -> list[Tensor | None]:
    return list(cast(Sequence[Tensor | None], torch.autograd.grad(loss, list(weights), allow_unused=True)))


def present(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Those that are there."""
    return [gradient for gradient in gradients if gradient is not None]


def _sum(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """In float32, and never in place: gradients from autograd may share memory."""
    if total is None or gradient is None:
        return gradient if total is None else total
    return total.float() + gradient
