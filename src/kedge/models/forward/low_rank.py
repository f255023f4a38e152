"""The products of a frozen linear layer with low-rank adapters, forward and backward, in as few launches as they need.

y = x Wᵀ + bias + Σ s (x Aᵀ) Bᵀ. Every product is added into the one before it, so that nothing of the size of y or x is
read or written for the sake of an addition or a scale.
Shape letters: T tokens, K inputs and N outputs of the layer, R the rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


def lora_linear(
    x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, factors: Sequence[Tensor], scales: Sequence[float]
) -> Tensor:
    """A linear layer with frozen weights and its adapters: `factors` are A, B, A, B, …, each pair with a scale."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *factors)):
        return cast(Tensor, _LoraLinear.apply(x, weight_NK, bias_N, tuple(scales), *factors))
    return _forward(x, weight_NK, bias_N, scales, factors)[0]


def add_low_rank(base: Tensor, x: Tensor, a_RK: Tensor, b_NR: Tensor, scale: float) -> Tensor:
    """`base` + scale (x Aᵀ) Bᵀ for a `base` that has a backward pass of its own."""
    low_TR = linear(x, a_RK).reshape(-1, a_RK.shape[0])
    return torch.addmm(base.reshape(-1, base.shape[-1]), low_TR, b_NR.T, alpha=scale).view(base.shape)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, scales: tuple[float, ...], *factors: Tensor
    ) -> Tensor:
        y, low = _forward(x, weight_NK, bias_N, scales, factors)
        ctx.save_for_backward(x, weight_NK, *factors, *low)
        ctx.scales = scales
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight_NK, *rest = cast(tuple[Tensor, ...], ctx.saved_tensors)
        scales: tuple[float, ...] = ctx.scales
        count = len(scales)
        factors, low = rest[: 2 * count], rest[2 * count :]
        needs_x, *needs_factors = (ctx.needs_input_grad[index] for index in (0, *range(4, 4 + 2 * count)))
        grad_TN = grad_y.reshape(-1, grad_y.shape[-1])
        x_TK = x.reshape(-1, x.shape[-1])
        grad_x_TK = grad_TN @ weight_NK if needs_x else None
        grads: list[Tensor | None] = []
        for index, scale in enumerate(scales):
            a_RK, b_NR = factors[2 * index], factors[2 * index + 1]
            needs_a, needs_b = needs_factors[2 * index], needs_factors[2 * index + 1]
            grad_low_TR = _scaled_product(grad_TN, b_NR, scale) if needs_x or needs_a else None
            if grad_x_TK is not None and grad_low_TR is not None:
                grad_x_TK.addmm_(grad_low_TR, a_RK)
            grads.append(grad_low_TR.T @ x_TK if needs_a and grad_low_TR is not None else None)
            grads.append(_scaled_product(grad_TN.T, low[index], scale) if needs_b else None)
        return (grad_x_TK.view(x.shape) if grad_x_TK is not None else None), None, None, None, *grads


def _forward(
    x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, scales: Sequence[float], factors: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The output, and x Aᵀ of each adapter."""
    x_TK = x.reshape(-1, x.shape[-1])
    y_TN = linear(x_TK, weight_NK, bias_N)
    low: list[Tensor] = []
    for scale, a_RK, b_NR in zip(scales, factors[::2], factors[1::2], strict=True):
        low_TR = x_TK @ a_RK.T
        y_TN.addmm_(low_TR, b_NR.T, alpha=scale)
        low.append(low_TR)
    return y_TN.view(*x.shape[:-1], y_TN.shape[-1]), low


def _scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """scale · (left @ right) as one product: what `addmm` adds to is not read where it counts 0 times."""
    return torch.addmm(left.new_empty(1, 1), left, right, beta=0, alpha=scale)
