"""Linear layers that read the same input, with the low-rank adapters on them, in as few products as they need.

y = x Wᵀ + bias + Σ s (x Aᵀ) Bᵀ for each layer. The matrices A of all of them are multiplied at once, and every product
is added into the one before it, so that nothing of the size of x or y is read or written for an addition or a scale.
Shape letters: T tokens, K inputs, N outputs of a layer, R the rank of an adapter, Z that of all adapters together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The weights of one layer; each of its adapters is A, B and its scale."""

    weight_NK: Tensor
    bias_N: Tensor | None = None
    adapters: tuple[tuple[Tensor, Tensor, float], ...] = ()


def products(x: Tensor, layers: Sequence[Product]) -> tuple[Tensor, ...]:
    """The outputs of all layers."""
    scales = tuple(tuple(scale for _, _, scale in layer.adapters) for layer in layers)
    weights = [layer.weight_NK for layer in layers]
    biases = [layer.bias_N for layer in layers]
    factors = [factor for layer in layers for a_RK, b_NR, _ in layer.adapters for factor in (a_RK, b_NR)]
    tensors = (x, *weights, *biases, *factors)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        ys = cast("tuple[Tensor, ...]", _Products.apply(x, scales, *weights, *biases, *factors))
    else:
        ys = _forward(x, scales, weights, biases, factors)[0]
    # Out here: what is a view inside of a backward pass of our own may not be changed in place, as Llama 4 does.
    return tuple(y_TN.view(*x.shape[:-1], y_TN.shape[-1]) for y_TN in ys)


def add_low_rank(base: Tensor, x: Tensor, a_RK: Tensor, b_NR: Tensor, scale: float) -> Tensor:
    """`base` + scale (x Aᵀ) Bᵀ for a `base` that has a backward pass of its own."""
    low_TR = linear(x, a_RK).reshape(-1, a_RK.shape[0])
    return torch.addmm(base.reshape(-1, base.shape[-1]), low_TR, b_NR.T, alpha=scale).view(base.shape)


Scales = tuple[tuple[float, ...], ...]
"""Of the adapters of each layer."""
Place = tuple[int, float, slice]
"""Of an adapter: its layer, its scale and its ranks among those of all."""


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: Scales, *tensors: Tensor | None) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        count = len(scales)
        weights, biases, factors = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
        ys, low_TZ, a_ZK = _forward(x, scales, weights, biases, factors)
        ctx.save_for_backward(x, low_TZ, a_ZK, *weights, *factors[1::2])
        ctx.scales = scales
        ctx.set_materialize_grads(False)
        return ys

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, low_TZ, a_ZK, *rest = cast("tuple[Any, ...]", ctx.saved_tensors)
        scales: Scales = ctx.scales
        count = len(scales)
        weights, bs = rest[:count], rest[count:]
        needs_x, _, *needs = ctx.needs_input_grad
        x_TK = x.reshape(-1, x.shape[-1])
        of_ys = [_upstream(of_y, x_TK, weight_NK) for of_y, weight_NK in zip(upstream, weights, strict=True)]
        adapters = list(zip(_spans(scales, bs), bs, strict=True))
        of_low_TZ = None if low_TZ is None else _of_low(of_ys, adapters, low_TZ)
        of_x_TK = _of_input(of_ys, weights, of_low_TZ, a_ZK) if needs_x else None
        of_weights = [y_TN.T @ x_TK if need else None for y_TN, need in zip(of_ys, needs[:count], strict=True)]
        of_biases = [y_TN.sum(0) if need else None for y_TN, need in zip(of_ys, needs[count : 2 * count], strict=True)]
        needs_a, needs_b = needs[2 * count :: 2], needs[2 * count + 1 :: 2]
        of_a_ZK = of_low_TZ.T @ x_TK if of_low_TZ is not None and any(needs_a) else None
        of_factors: list[Tensor | None] = []
        for ((layer, scale, span), _), need_a, need_b in zip(adapters, needs_a, needs_b, strict=True):
            of_factors.append(of_a_ZK[span] if need_a and of_a_ZK is not None else None)
            of_b = _scaled_product(of_ys[layer].T, low_TZ[:, span], scale) if need_b and low_TZ is not None else None
            of_factors.append(of_b)
        of_x = None if of_x_TK is None else of_x_TK.view(x.shape)
        return of_x, None, *of_weights, *of_biases, *of_factors


def _of_low(of_ys: Sequence[Tensor], adapters: Sequence[tuple[Place, Tensor]], low_TZ: Tensor) -> Tensor:
    """The gradient of x Aᵀ of all adapters."""
    of_low_TZ = torch.empty_like(low_TZ)
    for (layer, scale, span), b_NR in adapters:
        torch.addmm(low_TZ.new_empty(1, 1), of_ys[layer], b_NR, beta=0, alpha=scale, out=of_low_TZ[:, span])
    return of_low_TZ


def _of_input(
    of_ys: Sequence[Tensor], weights: Sequence[Tensor], of_low_TZ: Tensor | None, a_ZK: Tensor | None
) -> Tensor:
    of_x_TK = of_ys[0] @ weights[0]
    for of_y_TN, weight_NK in zip(of_ys[1:], weights[1:], strict=True):
        of_x_TK.addmm_(of_y_TN, weight_NK)
    if of_low_TZ is not None and a_ZK is not None:
        of_x_TK.addmm_(of_low_TZ, a_ZK)
    return of_x_TK


def _forward(
    x: Tensor,
    scales: Scales,
    weights: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    factors: Sequence[Tensor | None],
) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None]:
    """The outputs, a row a token; x times the A of all adapters, and these A, where there are any."""
    x_TK = x.reshape(-1, x.shape[-1])
    ys = [linear(x_TK, cast(Tensor, weight_NK), bias_N) for weight_NK, bias_N in zip(weights, biases, strict=True)]
    low_TZ = a_ZK = None
    if factors:
        a_s, bs = cast("Sequence[Tensor]", factors[::2]), cast("Sequence[Tensor]", factors[1::2])
        a_ZK = a_s[0] if len(a_s) == 1 else torch.cat(list(a_s))
        low_TZ = x_TK @ a_ZK.T
        for (layer, scale, span), b_NR in zip(_spans(scales, bs), bs, strict=True):
            ys[layer].addmm_(low_TZ[:, span], b_NR.T, alpha=scale)
    return tuple(ys), low_TZ, a_ZK


def _spans(scales: Scales, bs: Sequence[Tensor]) -> Iterator[Place]:
    start = 0
    flat = [(layer, scale) for layer, of_layer in enumerate(scales) for scale in of_layer]
    for (layer, scale), b_NR in zip(flat, bs, strict=True):
        yield layer, scale, slice(start, start + b_NR.shape[1])
        start += b_NR.shape[1]


def _upstream(of_y: Tensor | None, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """The gradient of a layer's output; 0 where nobody has used it."""
    if of_y is None:
        return x_TK.new_zeros(len(x_TK), len(weight_NK))
    return of_y.reshape(-1, of_y.shape[-1])


def _scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """scale · (left @ right) as one product: what `addmm` adds to is not read where it counts 0 times."""
    return torch.addmm(left.new_empty(1, 1), left, right, beta=0, alpha=scale)
