"""The weights that a stage trains: in the type that they are computed in, and in float32 for the optimiser and files.

On a GPU parameters are bfloat16, and a float32 master of each takes the updates, which bfloat16 would round away. In
float32, as on the CPU, a parameter is its own master. Masters outlive an optimiser: several rounds go on with them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from kedge.core.errors import CheckpointError

Named = Sequence[tuple[str, nn.Parameter]]


class TrainedWeights:
    """`named` parameters with their masters; `module` is the model that they belong to."""

    def __init__(self, module: nn.Module, named: Named, masters: Sequence[nn.Parameter]) -> None:
        self.module, self.named, self.masters = module, list(named), list(masters)

    def weights(self) -> dict[str, Tensor]:
        """By the names of their parameters, in full precision; the next step changes them."""
        return {name: master.detach() for (name, _), master in zip(self.named, self.masters, strict=True)}

    def held(self) -> AbstractContextManager[None]:
        """Inside of the block the model has its weights in full precision: for saving."""
        return holding(self.named, self.weights())

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        if list(weights) != [name for name, _ in self.named]:
            raise CheckpointError(
                "this checkpoint is of other trainable weights than the model has; was the recipe changed?"
            )
        for (_, parameter), master, weight in zip(self.named, self.masters, weights.values(), strict=True):
            master.copy_(weight)
            if parameter is not master:
                parameter.copy_(master)


def trained_weights(
    model: nn.Module, *, dtype: torch.dtype | None = None, head: nn.Module | None = None
) -> TrainedWeights:
    """What is trainable of `model`, to be computed in `dtype`; None leaves the types as they are.

    The frozen weights of the model are converted too. `head`, a part of the model, stays in float32.
    """
    of_head = {id(parameter) for parameter in head.parameters()} if head else set[int]()
    named: list[tuple[str, nn.Parameter]] = []
    masters: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        own_dtype = parameter.dtype if dtype is None or id(parameter) in of_head else dtype
        if parameter.requires_grad:
            named.append((name, parameter))
            masters.append(_master(parameter, own_dtype))
        if parameter.is_floating_point() and parameter.dtype.itemsize > own_dtype.itemsize:
            parameter.data = parameter.detach().to(own_dtype)
    return TrainedWeights(model, named, masters)


@contextmanager
def holding(named: Named, weights: Mapping[str, Tensor]) -> Generator[None]:
    """Inside of the block the parameters are `weights`, in the type that these have: what is saved then is exact."""
    before = [parameter.data for _, parameter in named]
    for name, parameter in named:
        parameter.data = weights[name].detach()
    try:
        yield
    finally:
        for (_, parameter), data in zip(named, before, strict=True):
            parameter.data = data


def _master(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """The weights of a parameter that will be computed in `dtype`, in float32 at least: itself where that is enough."""
    if parameter.dtype.itemsize <= 2:
        return nn.Parameter(parameter.detach().float())
    return nn.Parameter(parameter.detach()) if dtype.itemsize < parameter.dtype.itemsize else parameter
