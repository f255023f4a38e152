"""From losses to weights: gradients added up, and AdamW (Loshchilov & Hutter 2019) on float32 masters of the weights.

A weight in float32 is its own master. There are two ways, torch's own kernels and, on a GPU, one of ours that reads the
gradients as they are and writes moments, masters and weights in a single pass. Their state is that of torch's
optimiser, so that a run can go on by the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

_torch: Any = torch
"""Its operations on lists of tensors have no public names."""
_AT_ONCE = 64
"""Weights whose gradients are widened together: so many are in memory twice."""


class AdamWBackend(Protocol):
    """One step: `clear`, `add` once or more, `step`."""

    def clear(self) -> None: ...
    def add(self, loss: Tensor) -> None:
        """Add the gradients of `loss`."""
        ...

    def gradients(self) -> list[Tensor | None]:
        """The sums, in the order of the weights; None for a weight that no loss has reached."""
        ...

    def norm(self) -> Tensor:
        """Of all gradients together."""
        ...

    def step(self, *, rate: float, scale: float) -> None:
        """Go down the gradients times `scale`."""
        ...

    def publish(self) -> None:
        """Write the weights from their masters."""
        ...


def adamw_backend(
    weights: Sequence[nn.Parameter], masters: Sequence[nn.Parameter], optimiser: torch.optim.AdamW
) -> AdamWBackend:
    """The fastest way for weights of this kind. `masters[i]` is `weights[i]`, or a float32 copy of it."""
    on_gpu = all(one.is_cuda and one.is_contiguous() for one in (*weights, *masters))
    plain = all(one.dtype in (torch.float32, torch.bfloat16) for one in weights)
    is_fused = on_gpu and plain and find_spec("triton") is not None
    return (FusedAdamW if is_fused else TorchAdamW)(weights, masters, optimiser)


class TorchAdamW:
    """Gradients in `grad` of the masters, and torch's AdamW."""

    def __init__(
        self, weights: Sequence[nn.Parameter], masters: Sequence[nn.Parameter], optimiser: torch.optim.AdamW
    ) -> None:
        self._weights, self._masters, self._optimiser = list(weights), list(masters), optimiser

    def clear(self) -> None:
        self._optimiser.zero_grad(set_to_none=True)

    def add(self, loss: Tensor) -> None:
        if not _copied(self._weights, self._masters):
            loss.backward()
            return
        waiting = [
            (master, one)
            for master, one in zip(self._masters, _gradients(loss, self._weights), strict=True)
            if one is not None
        ]
        while waiting:  # the gradients of a part are free before those of the next are widened
            part, waiting = waiting[:_AT_ONCE], waiting[_AT_ONCE:]
            for master, _ in part:
                master.grad = torch.zeros_like(master) if master.grad is None else master.grad
            _torch._foreach_add_([master.grad for master, _ in part], [one for _, one in part])

    def gradients(self) -> list[Tensor | None]:
        return [master.grad for master in self._masters]

    def norm(self) -> Tensor:
        return nn.utils.get_total_norm([one for one in self.gradients() if one is not None])

    def step(self, *, rate: float, scale: float) -> None:
        if scale != 1:
            _torch._foreach_mul_([one for one in self.gradients() if one is not None], scale)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()
        self.publish()

    def publish(self) -> None:
        _publish(self._weights, self._masters)


class FusedAdamW:
    """Gradients of a single `add` stay as autograd gave them; one kernel does the rest."""

    def __init__(
        self, weights: Sequence[nn.Parameter], masters: Sequence[nn.Parameter], optimiser: torch.optim.AdamW
    ) -> None:
        self._weights, self._masters, self._optimiser = list(weights), list(masters), optimiser
        self._sums: list[Tensor | None] = []
        self.clear()

    def clear(self) -> None:
        self._sums = [None] * len(self._weights)

    def add(self, loss: Tensor) -> None:
        found = _gradients(loss, self._weights)
        for at in range(len(found)):
            self._sums[at], found[at] = _sum(self._sums[at], found[at]), None

    def gradients(self) -> list[Tensor | None]:
        return self._sums

    def norm(self) -> Tensor:
        found = [one for one in self._sums if one is not None]
        by_type = [[one for one in found if one.dtype == dtype] for dtype in {one.dtype for one in found}]
        norms = [norm for part in by_type for norm in _torch._foreach_norm(part, 2, torch.float32)]
        return torch.linalg.vector_norm(torch.stack(norms))

    @torch.no_grad()
    def step(self, *, rate: float, scale: float) -> None:
        from kedge.models.training.kernels.adamw import Moved, move

        reached = {
            id(master): (weight, gradient)
            for weight, master, gradient in zip(self._weights, self._masters, self._sums, strict=True)
            if gradient is not None
        }
        for group in self._optimiser.param_groups:
            group["lr"] = rate
            masters = [master for master in group["params"] if id(master) in reached]
            if not masters:
                continue
            states = [self._state(master) for master in masters]
            _torch._foreach_add_([state["step"] for state in states], 1)
            moved = [
                Moved(
                    weight=reached[id(master)][0],
                    master=master,
                    gradient=reached[id(master)][1],
                    mean=state["exp_avg"],
                    square=state["exp_avg_sq"],
                    step=state["step"].item(),
                )
                for master, state in zip(masters, states, strict=True)
            ]
            move(moved, group, scale=scale)
        self.clear()  # the memory of the gradients is free for the next role

    def publish(self) -> None:
        _publish(self._weights, self._masters)

    def _state(self, master: nn.Parameter) -> dict[str, Tensor]:
        """As torch's optimiser has it, made when it is first needed; its step is counted on the host."""
        state: dict[str, Tensor] = self._optimiser.state[master]
        if not state:
            state["step"] = torch.zeros(())
            state |= {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
        elif state["step"].is_cuda:
            state["step"] = state["step"].cpu()
        return state


def _copied(weights: Sequence[nn.Parameter], masters: Sequence[nn.Parameter]) -> list[tuple[Tensor, Tensor]]:
    """The weights that have a master beside them, with it."""
    return [(weight, master) for weight, master in zip(weights, masters, strict=True) if weight is not master]


@torch.no_grad()
def _publish(weights: Sequence[nn.Parameter], masters: Sequence[nn.Parameter]) -> None:
    if copied := _copied(weights, masters):
        _torch._foreach_copy_(*map(list, zip(*copied, strict=True)))


def _gradients(loss: Tensor, weights: Sequence[Tensor]) -> list[Tensor | None]:
    return list(cast(Sequence[Tensor | None], torch.autograd.grad(loss, list(weights), allow_unused=True)))


def _sum(total: Tensor | None, one: Tensor | None) -> Tensor | None:
    """In float32, and never in place: what autograd gives may share memory."""
    if total is None or one is None:
        return one if total is None else total
    return total.float() + one
