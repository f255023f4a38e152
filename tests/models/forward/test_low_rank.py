"""Linear layers that read the same input: each gives what it gives alone, and so do all gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from kedge.models.forward.low_rank import Product, products

SHAPES = [(2, 3, 5), (7, 5), (7,), (2, 5), (7, 2), (3, 5), (7, 3), (4, 5), (2, 5), (4, 2), (6, 5), (6,)]
"""x; a layer with a bias and two adapters; one with an adapter; one with a bias."""


def tensors(dtype: torch.dtype, frozen: tuple[int, ...] = ()) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]
    return [tensor.requires_grad_(index not in frozen) for index, tensor in enumerate(drawn)]


def together(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    w1, c1, a, b, c, d, w2, e, f, w3, c3 = rest
    layers = [
        Product(weight_NK=w1, bias_N=c1, adapters=((a, b, 0.5), (c, d, 2.0))),
        Product(weight_NK=w2, adapters=((e, f, 3.0),)),
        Product(weight_NK=w3, bias_N=c3),
    ]
    return products(x, layers)


def apart(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    w1, c1, a, b, c, d, w2, e, f, w3, c3 = rest
    first = linear(x, w1, c1) + 0.5 * x @ a.T @ b.T + 2.0 * x @ c.T @ d.T
    return first, linear(x, w2) + 3.0 * x @ e.T @ f.T, linear(x, w3, c3)


def test_gradients_are_those_of_the_function() -> None:
    assert torch.autograd.gradcheck(together, tuple(tensors(torch.float64)))
    (y, *_) = together(*(given := tensors(torch.float64)))
    (grad,) = torch.autograd.grad(y.square().sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("frozen", [(), (0,), (1, 2, 7, 10, 11), (0, 3, 4, 5, 8), (0, 1, 2, 4, 6, 7, 9, 10, 11)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_only_what_needs_a_gradient_gets_one(frozen: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    ours, plain = tensors(dtype, frozen), tensors(dtype, frozen)
    for actual, expected in zip(together(*ours), apart(*plain), strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=10 * tolerance)
    torch.cat([y.square().flatten() for y in together(*ours)]).sum().backward()
    torch.cat([y.square().flatten() for y in apart(*plain)]).sum().backward()
    for index, (tensor, other) in enumerate(zip(ours, plain, strict=True)):
        assert (tensor.grad is None) == (other.grad is None) == (index in frozen)
        if tensor.grad is not None and other.grad is not None:
            scale = other.grad.abs().max().item()
            torch.testing.assert_close(tensor.grad, other.grad, rtol=0, atol=scale * tolerance)


def test_an_output_that_nobody_uses_adds_nothing() -> None:
    ours, plain = tensors(torch.float32), tensors(torch.float32)
    together(*ours)[1].sum().backward()
    apart(*plain)[1].sum().backward()
    assert ours[1].grad is not None
    assert not ours[1].grad.any()
    torch.testing.assert_close(ours[0].grad, plain[0].grad)


def test_an_output_may_be_changed_in_place() -> None:
    """As Llama 4 adds its experts to the output of a linear layer."""
    ours, plain = tensors(torch.float32), tensors(torch.float32)
    for given, outputs in ((ours, together(*ours)), (plain, apart(*plain))):
        outputs[0].mul_(2).add_(given[0].sum()).square().sum().backward()
    torch.testing.assert_close(ours[0].grad, plain[0].grad)
