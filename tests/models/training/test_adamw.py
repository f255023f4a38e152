"""From losses to weights: torch's way against AdamW by hand, and the way in one pass against torch's.

The kernel needs a GPU, or Triton's interpreter, which rounds bfloat16 otherwise and is given float32 alone:

TRITON_INTERPRET=1 pytest -m gpu tests/models/test_adamw.py        # with triton >= 3.8 installed
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from kedge.models.training.adamw import AdamWBackend, FusedAdamW, TorchAdamW, adamw_backend

SHAPES = [(7, 33), (5000,), (1,), (64, 96)]
RATE, BETAS, EPS, DECAY = 0.01, (0.9, 0.98), 1e-6, 0.1


class Setup:
    """Weights of a type, their masters and their optimiser; matrices decay."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(1)
        first = [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]
        self.weights = [nn.Parameter(one) for one in first]
        is_wide = dtype == torch.float32
        self.masters = [one if is_wide else nn.Parameter(one.detach().float()) for one in self.weights]
        groups = [
            {"params": [one for one in self.masters if one.ndim > 1], "weight_decay": DECAY},
            {"params": [one for one in self.masters if one.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimiser = torch.optim.AdamW(groups, lr=1.0, betas=BETAS, eps=EPS)

    def loss(self, number: int = 0) -> Tensor:
        """Whose gradients differ from call to call, and from weight to weight."""
        generator = torch.Generator().manual_seed(number)
        parts = [
            (one.float() * torch.randn(one.shape, generator=generator).to(one.device)).square().sum()
            for one in self.weights
        ]
        return torch.stack(parts).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_first_step_by_hand(dtype: torch.dtype) -> None:
    setup = Setup(dtype)
    before = [one.detach().clone() for one in setup.masters]
    way = adamw_backend(setup.weights, setup.masters, setup.optimiser)
    way.clear()
    way.add(setup.loss())
    gradients = [one.clone() for one in way.gradients() if one is not None]
    assert way.norm().item() == pytest.approx(math.sqrt(sum(one.square().sum().item() for one in gradients)), rel=1e-5)
    way.step(rate=RATE, scale=0.5)
    for master, old, gradient in zip(setup.masters, before, gradients, strict=True):
        # The moments of one step, corrected, are the gradient and its square.
        decayed = old * (1 - RATE * DECAY) if old.ndim > 1 else old
        expected = decayed - RATE * gradient / 2 / ((gradient / 2).abs() + EPS)
        torch.testing.assert_close(master.detach(), expected, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(one, master.to(dtype)) for one, master in zip(setup.weights, setup.masters, strict=True))


@pytest.mark.parametrize("way", [TorchAdamW, FusedAdamW])
def test_gradients_of_narrow_weights_are_added_in_float32(way: type[TorchAdamW] | type[FusedAdamW]) -> None:
    setup = Setup(torch.bfloat16)
    added = way(setup.weights, setup.masters, setup.optimiser)
    added.clear()
    expected: list[Tensor] = [torch.zeros(shape) for shape in SHAPES]
    for number in range(3):
        added.add(setup.loss(number))
        found = torch.autograd.grad(setup.loss(number), setup.weights)
        expected = [total + one.float() for total, one in zip(expected, found, strict=True)]
    assert_same(added.gradients(), expected)
    added.clear()
    assert added.gradients() == [None] * len(SHAPES)


@pytest.mark.parametrize("way", [TorchAdamW, FusedAdamW])
def test_gradients_that_share_memory_are_not_added_twice(way: type[TorchAdamW] | type[FusedAdamW]) -> None:
    both = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    added = way(both, both, torch.optim.AdamW(both))
    added.clear()
    for _ in range(2):
        added.add((both[0] + both[1]).sum())
    assert_same(added.gradients(), [torch.full((3,), 2.0)] * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_no_loss_reaches_stays(dtype: torch.dtype) -> None:
    setup = Setup(dtype)
    before = [one.detach().clone() for one in setup.masters]
    way = TorchAdamW(setup.weights, setup.masters, setup.optimiser)
    way.clear()
    way.add(setup.weights[0].float().square().sum())
    assert [one is None for one in way.gradients()] == [False, True, True, True]
    way.step(rate=RATE, scale=1.0)
    is_changed = [not torch.equal(one, old) for one, old in zip(setup.masters, before, strict=True)]
    assert is_changed == [True, False, False, False]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_pass_is_what_torch_does_and_goes_on_from_its_state(dtype: torch.dtype) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts bfloat16 off instead of rounding it")
    one, other = Setup(dtype, device), Setup(dtype, device)
    ways: list[AdamWBackend] = [
        way(x.weights, x.masters, x.optimiser) for way, x in ((TorchAdamW, one), (FusedAdamW, other))
    ]
    for number in range(6):
        if number == 4:  # from here on each goes on with what the other has kept
            kept = [x.optimiser.state_dict() for x in (other, one)]
            for x, state in zip((one, other), kept, strict=True):
                x.optimiser.load_state_dict(state)
        for way, x in zip(ways, (one, other), strict=True):
            way.clear()
            for part in range(1 + number % 2):
                way.add(x.loss(10 * number + part) if number != 3 else x.weights[0].float().square().sum())
            way.step(rate=RATE * (number + 1), scale=0.5)
        assert ways[0].norm().isfinite()
        assert_same(other.masters, one.masters, atol=2e-6 if dtype == torch.float32 else 1e-5)
        if dtype == torch.bfloat16:
            assert all(torch.equal(x, y.to(dtype)) for x, y in zip(other.weights, other.masters, strict=True))


def assert_same(
    found: list[Tensor | None] | list[nn.Parameter], expected: list[Tensor] | list[nn.Parameter], atol: float = 1e-6
) -> None:
    for x, y in zip(found, expected, strict=True):
        assert x is not None
        torch.testing.assert_close(x.detach().float(), y.detach().float(), rtol=1e-5, atol=atol)
