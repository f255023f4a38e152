"""Tiled log-probs and entropy against plain log-softmax, by hand, by finite differences, and by what they allocate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kedge.algorithms import logit_tiles
from kedge.algorithms import logprobs as module
from kedge.algorithms.logprobs import entropy, logprobs_and_entropy, token_logprobs
from kedge.core.errors import ShapeError
from kedge.core.loss import widen

TILES = {"one tile": (2**24, 0), "several tiles": (24, 0), "odd tiles": (7, 0), "one kept": (2**24, 2**28)}
TILES |= {"several kept": (24, 2**28), "odd kept": (7, 2**28)}


@pytest.fixture(params=TILES.values(), ids=TILES)
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Elements of a tile; backward computes them again, or finds them kept."""
    elements, kept = request.param
    monkeypatch.setattr(module, "TILE_ELEMENTS", elements)
    monkeypatch.setattr(module, "KEPT_BYTES", kept)
    return elements


def inputs(n: int, d: int, v: int, dtype: torch.dtype = torch.float64, seed: int = 11) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(n, d, generator=generator, dtype=dtype)
    head_VD = torch.randn(v, d, generator=generator, dtype=dtype)
    bias_V = torch.randn(v, generator=generator, dtype=dtype)
    target_N = torch.randint(0, v, (n,), generator=generator)
    return hidden_ND, head_VD, bias_V, target_N


def plain(
    hidden_ND: Tensor, head_VD: Tensor, bias_V: Tensor | None, target_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits_NV = hidden_ND @ head_VD.T
    if bias_V is not None:
        logits_NV = logits_NV + bias_V
    logp_NV = (logits_NV / temperature).log_softmax(-1)
    return logp_NV.gather(-1, target_N[..., None])[..., 0], -(logp_NV.exp() * logp_NV).sum(-1)


# --- values ------------------------------------------------------------------


def test_by_hand(tile: int) -> None:
    # hidden (1, 0) and (0, 1) read off the columns: probabilities (1, 2, 4)/7 and (3, 3, 2)/8
    head_VD = torch.tensor([[1.0, 3.0], [2.0, 3.0], [4.0, 2.0]], dtype=torch.float64).log()
    hidden_ND, target_N = torch.eye(2, dtype=torch.float64), torch.tensor([1, 2])
    expected = [math.log(2 / 7), math.log(2 / 8)]
    entropies = [-sum(p / n * math.log(p / n) for p in ps) for n, ps in ((7, (1, 2, 4)), (8, (3, 3, 2)))]
    assert token_logprobs(hidden_ND, head_VD, target_N).tolist() == pytest.approx(expected, rel=1e-12)
    assert entropy(hidden_ND, head_VD).tolist() == pytest.approx(entropies, rel=1e-12)
    logp_N, entropy_N = logprobs_and_entropy(hidden_ND, head_VD, target_N)
    assert logp_N.tolist() == pytest.approx(expected, rel=1e-12)
    assert entropy_N.tolist() == pytest.approx(entropies, rel=1e-12)


def test_temperature_and_bias_by_hand() -> None:
    # logits (log 1 + log 4, log 2, log 9) halved: probabilities (2, √2, 3) / (5 + √2)
    head_VD = torch.tensor([[1.0], [2.0], [9.0]], dtype=torch.float64).log()
    bias_V = torch.tensor([4.0, 1.0, 1.0], dtype=torch.float64).log()
    one_ND, target_N = torch.ones(1, 1, dtype=torch.float64), torch.tensor([0])
    total = 5 + math.sqrt(2)
    expected = math.log(2 / total)
    entropy_by_hand = -sum(p / total * math.log(p / total) for p in (2, math.sqrt(2), 3))
    options: dict[str, Any] = {"bias_V": bias_V, "temperature": 2.0}
    assert token_logprobs(one_ND, head_VD, target_N, **options).item() == pytest.approx(expected, rel=1e-12)
    assert entropy(one_ND, head_VD, **options).item() == pytest.approx(entropy_by_hand, rel=1e-12)
    both = logprobs_and_entropy(one_ND, head_VD, target_N, **options)
    assert [x.item() for x in both] == pytest.approx([expected, entropy_by_hand], rel=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_equals_log_softmax(tile: int, temperature: float, with_bias: bool, chunk_tokens: int) -> None:
    hidden_ND, head_VD, bias_V, target_N = inputs(9, 5, 23, torch.float32)
    bias = bias_V if with_bias else None
    options: dict[str, Any] = {"bias_V": bias, "temperature": temperature, "chunk_tokens": chunk_tokens}
    logp_N, entropy_N = plain(hidden_ND, head_VD, bias, target_N, temperature)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(token_logprobs(hidden_ND, head_VD, target_N, **options), logp_N, **close)
    torch.testing.assert_close(entropy(hidden_ND, head_VD, **options), entropy_N, **close)
    both = logprobs_and_entropy(hidden_ND, head_VD, target_N, **options)
    torch.testing.assert_close(both, (logp_N, entropy_N), **close)


def test_leading_shape_is_kept() -> None:
    hidden_ND, head_VD, _, target_N = inputs(6, 4, 13)
    logp_N, entropy_N = plain(hidden_ND, head_VD, None, target_N, 1.0)
    hidden_BTD, target_BT = hidden_ND.view(2, 3, 4), target_N.view(2, 3)
    torch.testing.assert_close(token_logprobs(hidden_BTD, head_VD, target_BT), logp_N.view(2, 3))
    torch.testing.assert_close(entropy(hidden_BTD, head_VD), entropy_N.view(2, 3))
    # not contiguous: T×B seen as B×T
    swapped = token_logprobs(hidden_BTD.transpose(0, 1), head_VD, target_BT.T)
    torch.testing.assert_close(swapped, logp_N.view(2, 3).T)
    assert token_logprobs(hidden_ND[0], head_VD, target_N[0]).item() == pytest.approx(logp_N[0].item(), rel=1e-12)


def test_no_positions_give_nothing() -> None:
    hidden_ND, head_VD, _, target_N = inputs(0, 4, 13)
    head_VD.requires_grad_()
    logp_N, entropy_N = logprobs_and_entropy(hidden_ND, head_VD, target_N)
    assert logp_N.shape == entropy_N.shape == (0,)
    (grad_VD,) = torch.autograd.grad((logp_N + entropy_N).sum(), head_VD)
    assert grad_VD.tolist() == torch.zeros(13, 4).tolist()


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), scale=st.floats(0.01, 30), n=st.integers(1, 6), v=st.integers(2, 40))
def test_any_tiling_is_a_distribution_and_rows_stand_alone(seed: int, scale: float, n: int, v: int) -> None:
    hidden_ND, head_VD, _, _ = inputs(n, 3, v, seed=seed)
    hidden_ND = hidden_ND * scale
    everything_VN = torch.stack(
        [token_logprobs(hidden_ND, head_VD, torch.full((n,), token), chunk_tokens=2) for token in range(v)]
    )
    torch.testing.assert_close(everything_VN.exp().sum(0), torch.ones(n, dtype=torch.float64))
    entropy_N = entropy(hidden_ND, head_VD, chunk_tokens=2)
    torch.testing.assert_close(entropy_N, -(everything_VN.exp() * everything_VN).sum(0), rtol=1e-7, atol=1e-9)
    assert (entropy_N <= math.log(v) + 1e-9).all()
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(entropy(hidden_ND[order], head_VD, chunk_tokens=2), entropy_N[order])


def test_huge_logits_stay_exact(tile: int) -> None:
    # logits 1e4, 1e4 - 1 and -1e4 at one position, all equal at another; ordered up and down over the tiles
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        head_VD = torch.tensor([[1e4], [1e4 - 1], [-1e4], [-1e4]])[order]
        target_N = torch.tensor([order.index(1), order.index(2)])
        hidden_ND = torch.tensor([[1.0], [0.0]], requires_grad=True)
        logp_N, entropy_N = logprobs_and_entropy(hidden_ND, head_VD, target_N)
        p = 1 / (1 + math.exp(-1))
        spread = -p * math.log(p) - (1 - p) * math.log(1 - p)
        assert logp_N.tolist() == pytest.approx([math.log(1 - p), -math.log(4)], rel=1e-5)
        assert entropy_N.tolist() == pytest.approx([spread, math.log(4)], rel=1e-5)
        (grad_ND,) = torch.autograd.grad((logp_N + entropy_N).sum(), hidden_ND)
        assert grad_ND.isfinite().all()


@pytest.mark.parametrize("wrong", [-100, -1, 13])
def test_a_target_outside_the_vocabulary_is_nan_and_no_other(tile: int, wrong: int) -> None:
    hidden_ND, head_VD, _, target_N = inputs(3, 4, 13)
    expected_N, _ = plain(hidden_ND, head_VD, None, target_N, 1.0)
    target_N[1] = wrong
    logp_N = token_logprobs(hidden_ND, head_VD, target_N)
    assert logp_N.isnan().tolist() == [False, True, False]
    torch.testing.assert_close(logp_N[[0, 2]], expected_N[[0, 2]])


def test_targets_of_another_shape_are_refused() -> None:
    hidden_ND, head_VD, _, target_N = inputs(3, 4, 13)
    with pytest.raises(ShapeError) as caught:
        token_logprobs(hidden_ND, head_VD, target_N[:1])
    assert str(caught.value) == (
        "targets have shape (1,), hidden states (3, 4): one target a position was expected, (3,)"
    )


# --- gradients ---------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [2, 100])
def test_gradients_are_those_of_finite_differences(tile: int, temperature: float, chunk_tokens: int) -> None:
    hidden_ND, head_VD, bias_V, target_N = inputs(5, 3, 8)
    leaves = [x.requires_grad_() for x in (hidden_ND, head_VD, bias_V)]
    options: dict[str, Any] = {"temperature": temperature, "chunk_tokens": chunk_tokens}
    functions: list[Callable[[Tensor, Tensor, Tensor], Any]] = [
        lambda hidden, head, bias: token_logprobs(hidden, head, target_N, bias_V=bias, **options),
        lambda hidden, head, bias: entropy(hidden, head, bias_V=bias, **options),
        lambda hidden, head, bias: logprobs_and_entropy(hidden, head, target_N, bias_V=bias, **options),
    ]
    for function in functions:
        assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("weights", [(1.3, 0.0), (0.0, 0.4), (1.3, -0.4)])
def test_gradients_in_float32_are_those_of_plain_autograd(tile: int, weights: tuple[float, float]) -> None:
    hidden_ND, head_VD, bias_V, target_N = inputs(9, 5, 23, torch.float32)
    leaves = [x.requires_grad_() for x in (hidden_ND, head_VD, bias_V)]
    slope_N = torch.linspace(-1, 2, 9)
    grads = []
    for logp_N, entropy_N in (
        plain(hidden_ND, head_VD, bias_V, target_N, 0.8),
        logprobs_and_entropy(hidden_ND, head_VD, target_N, bias_V=bias_V, temperature=0.8, chunk_tokens=4),
    ):
        loss = sum(w * (slope_N * x).sum() for w, x in zip(weights, (logp_N, entropy_N), strict=True) if w)
        grads.append(torch.autograd.grad(loss, leaves))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_needs_a_gradient_gets_one(tile: int, wanted: tuple[bool, ...], monkeypatch: Any) -> None:
    """A frozen head must cost no V×D gradient: whatever is not asked for is not computed."""
    hidden_ND, head_VD, bias_V, target_N = inputs(5, 3, 8)
    leaves = [x.requires_grad_() for x in (hidden_ND, head_VD, bias_V)]
    logp_N, _ = plain(hidden_ND, head_VD, bias_V, target_N, 1.0)
    expected = torch.autograd.grad(logp_N.square().sum(), leaves)
    results: list[Any] = []
    compute = module._backward

    def spy(*args: Any) -> Any:
        results.append(compute(*args))
        return results[-1]

    monkeypatch.setattr(module, "_backward", spy)
    chosen = [x if keep else x.detach() for x, keep in zip(leaves, wanted, strict=True)]
    logp_N = token_logprobs(chosen[0], chosen[1], target_N, bias_V=chosen[2], chunk_tokens=2)
    place = wanted.index(True)
    (grad,) = torch.autograd.grad(logp_N.square().sum(), chosen[place])
    torch.testing.assert_close(grad, expected[place])
    assert [x is not None for x in results[0]] == list(wanted)


def test_no_gradient_without_an_upstream_one() -> None:
    hidden_ND, head_VD, _, target_N = inputs(3, 4, 13)
    hidden_ND.requires_grad_()
    logp_N, entropy_N = logprobs_and_entropy(hidden_ND, head_VD, target_N)
    (grad_ND,) = torch.autograd.grad(logp_N.sum() * 0 + entropy_N[1] * 0, hidden_ND)
    assert grad_ND.abs().max().item() == 0
    with torch.no_grad():
        assert not token_logprobs(hidden_ND, head_VD, target_N).requires_grad


# --- types -------------------------------------------------------------------


def test_bfloat16_multiplies_in_bfloat16_and_rounds_no_logit(tile: int) -> None:
    hidden_ND, head_VD, bias_V, target_N = (
        x.bfloat16() if x.is_floating_point() else x for x in inputs(9, 5, 23, torch.float32)
    )
    leaves = [x.requires_grad_() for x in (hidden_ND, head_VD, bias_V)]
    logits_NV = torch.nn.functional.linear(hidden_ND.float(), head_VD.float(), bias_V.float())
    expected_N = logits_NV.log_softmax(-1).gather(1, target_N[:, None])[:, 0]
    logp_N = token_logprobs(hidden_ND, head_VD, target_N, bias_V=bias_V, chunk_tokens=4)
    assert logp_N.dtype == torch.float32
    torch.testing.assert_close(logp_N, expected_N, rtol=1e-5, atol=1e-5)
    grads, wide = torch.autograd.grad(logp_N.sum(), leaves), torch.autograd.grad(expected_N.sum(), leaves)
    for grad, other in zip(grads, wide, strict=True):
        assert grad.dtype == torch.bfloat16
        # bf16 keeps 8 bits: sums of a few dozen rounded terms differ in their last one or two
        assert (grad.float() - other.float()).abs().max() <= 2**-6 * other.float().abs().max()


def test_large_logits_of_bfloat16_keep_their_digits() -> None:
    """64.25 and 64.0 are the same number in bfloat16, which has 65 for the next one."""
    hidden_ND, head_VD = (torch.tensor(x, dtype=torch.bfloat16) for x in ([[1.0, 1.0]], [[64.0, 0.25], [64.0, 0.0]]))
    logp_N = token_logprobs(hidden_ND, head_VD, torch.tensor([0]))
    torch.testing.assert_close(logp_N, torch.tensor([[0.25, 0.0]]).log_softmax(-1)[:, 0])


def test_weight_gradient_is_summed_in_float32_over_token_chunks() -> None:
    """In bf16, 1 + 2^-8 · n never leaves 1; here 512 small terms must arrive beside a large one."""
    n = 513
    hidden_ND = torch.full((n, 1), 2**-8, dtype=torch.bfloat16)
    hidden_ND[0] = 1.0
    head_VD = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logp_N = token_logprobs(hidden_ND, head_VD, torch.zeros(n, dtype=torch.int64), chunk_tokens=1)
    (grad_VD,) = torch.autograd.grad(logp_N.sum(), head_VD)
    # p = ½ everywhere: gradient ½ Σ hidden = ½ (1 + 512/256) = 1.5
    assert grad_VD.flatten().tolist() == [1.5, -1.5]


def test_hidden_gradient_is_summed_in_float32_over_vocabulary_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE_ELEMENTS", 1)
    # 256 equal logits: d logp_0 / d hidden = w_0 - mean(w); w_0 = 2, the others 1: 2 - 257/256, exact in bf16
    head_VD = torch.ones(256, 1, dtype=torch.bfloat16)
    head_VD[0] = 2.0
    hidden_ND = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    (grad_ND,) = torch.autograd.grad(token_logprobs(hidden_ND, head_VD, torch.tensor([0])).sum(), hidden_ND)
    assert grad_ND.item() == 255 / 256


@pytest.mark.parametrize(("bias_dtype", "chunk_tokens"), [(torch.bfloat16, 1), (torch.float32, 2)])
def test_bias_gradient_is_summed_in_float32(bias_dtype: torch.dtype, chunk_tokens: int) -> None:
    n = 513
    weight_N = torch.full((n,), 2**-8)
    weight_N[0] = 1.0
    bias_V = torch.zeros(2, dtype=bias_dtype, requires_grad=True)
    logp_N = token_logprobs(
        torch.zeros(n, 1, dtype=torch.bfloat16),
        torch.zeros(2, 1, dtype=torch.bfloat16),
        torch.zeros(n, dtype=torch.int64),
        bias_V=bias_V,
        chunk_tokens=chunk_tokens,
    )
    (grad_V,) = torch.autograd.grad((weight_N * logp_N).sum(), bias_V)
    assert grad_V.tolist() == [1.5, -1.5]  # ½ Σ weights


def test_autocast_decides_the_type_of_the_products() -> None:
    hidden_ND, head_VD, bias_V, target_N = inputs(9, 5, 23, torch.float32)
    wide = [hidden_ND.requires_grad_(), head_VD.requires_grad_(), bias_V.requires_grad_()]
    narrow = [x.detach().bfloat16().requires_grad_() for x in wide]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logp_N = token_logprobs(wide[0], wide[1], target_N, bias_V=wide[2], temperature=0.8)
    narrow_N = token_logprobs(narrow[0], narrow[1], target_N, bias_V=narrow[2], temperature=0.8)
    assert logp_N.dtype == torch.float32
    assert torch.equal(logp_N, narrow_N)
    grads, narrow_grads = torch.autograd.grad(logp_N.sum(), wide), torch.autograd.grad(narrow_N.sum(), narrow)
    for grad, other in zip(grads, narrow_grads, strict=True):
        assert grad.dtype == torch.float32
        assert torch.equal(grad.bfloat16(), other)


def test_hidden_states_take_the_type_of_the_head() -> None:
    hidden_ND, head_VD, _, target_N = inputs(9, 5, 23, torch.float32)
    narrow_VD = head_VD.bfloat16()
    mixed_N = token_logprobs(hidden_ND, narrow_VD, target_N)
    assert torch.equal(mixed_N, token_logprobs(hidden_ND.bfloat16(), narrow_VD, target_N))


def test_widened() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert widen(torch.tensor(1.5, dtype=dtype)).dtype == torch.float32
    assert widen(torch.tensor(1.5, dtype=torch.float64)).dtype == torch.float64


# --- memory ------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Sizes of all tensors that operations gave back, and of those that are not views of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[int] = []
        self.fresh: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)}
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                self.all.append(x.untyped_storage().nbytes() // x.element_size())
                if x.untyped_storage().data_ptr() not in known:
                    self.fresh.append(x.numel())
        return out


def allocations(function: Callable[[], Tensor]) -> Allocations:
    with Allocations() as mode:
        function().backward()
    return mode


@pytest.mark.parametrize(("kept", "logp_tiles", "both_tiles"), [(0, 2, 4), (2**28, 2, 4)])
def test_a_tile_is_held_once_for_log_probs_and_twice_for_entropy(
    kept: int, logp_tiles: int, both_tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", kept)
    n, d, v = 6, 2, 35
    hidden_ND, head_VD, _, target_N = inputs(n, d, v)
    hidden_ND.requires_grad_()
    logp = allocations(lambda: token_logprobs(hidden_ND, head_VD, target_N).sum()).fresh
    both = allocations(lambda: sum(x.sum() for x in logprobs_and_entropy(hidden_ND, head_VD, target_N))).fresh
    # z in forward and again in backward, and exp(z) beside both for entropy; a kept z is copied in forward instead
    assert (logp.count(n * v), both.count(n * v)) == (logp_tiles, both_tiles)
    assert logp.count(v * d) == 0  # a frozen head gets no gradient, not even room for one


class Products(TorchDispatchMode):
    """How many matrix products there were."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("spare", "products"), [(0, 3), (-1, 4)])
def test_logits_within_the_budget_are_not_computed_again(
    spare: int, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, hidden and weight gradient; one byte too few in the budget, and the logits once more."""
    n, v = 6, 35
    monkeypatch.setattr(module, "KEPT_BYTES", n * v * 8 + spare)  # float64
    hidden_ND, head_VD, _, target_N = (x.requires_grad_(x.is_floating_point()) for x in inputs(n, 2, v))
    with Products() as mode:
        token_logprobs(hidden_ND, head_VD, target_N).sum().backward()
    assert mode.count == products


def test_nothing_is_kept_where_nothing_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_ND, head_VD, _, target_N = inputs(6, 2, 35)
    wanted: list[bool] = []
    fold = module._fold

    def spy(*args: Any, is_kept: bool) -> None:
        wanted.append(is_kept)
        fold(*args, is_kept=is_kept)

    monkeypatch.setattr(module, "_fold", spy)
    token_logprobs(hidden_ND, head_VD, target_N)
    with torch.no_grad():
        token_logprobs(hidden_ND.requires_grad_(), head_VD, target_N)
    token_logprobs(hidden_ND, head_VD, target_N)
    assert wanted == [False, False, True]


def test_a_second_backward_computes_again_what_the_first_took() -> None:
    hidden_ND, head_VD, bias_V, target_N = inputs(6, 3, 35)
    leaves = [x.requires_grad_() for x in (hidden_ND, head_VD, bias_V)]
    logp_N, entropy_N = logprobs_and_entropy(hidden_ND, head_VD, target_N, bias_V=bias_V)
    loss = (logp_N.square() + 0.3 * entropy_N).sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), first, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what its compiler imports
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_tiles_say_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_tiles, "COMPILED_FROM", 1)
    hidden_ND, head_VD, _, target_N = (
        x.to(dtype) if x.is_floating_point() else x for x in inputs(40, 8, 300, torch.float32)
    )
    leaves = [x.requires_grad_() for x in (hidden_ND, head_VD)]
    found: list[tuple[Tensor, ...]] = []
    for compiled in (False, True):
        options: dict[str, Any] = {"temperature": 0.7, "chunk_tokens": 17, "compiled": compiled}
        logp_N, entropy_N = logprobs_and_entropy(hidden_ND, head_VD, target_N, **options)
        alone_N = token_logprobs(hidden_ND, head_VD, target_N, **options)
        grads = torch.autograd.grad((1.5 * logp_N - 0.2 * entropy_N + alone_N).sum(), leaves)
        found.append((logp_N, entropy_N, alone_N, *grads))
    for one, other in zip(*found, strict=True):
        scale = one.detach().float().abs().max()
        # float32: a few units in the last place; bfloat16 gradients: one rounding of 8 bits
        assert (one - other).detach().float().abs().max() <= (1e-5 if one.dtype == torch.float32 else 2**-8) * scale


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("chunk_tokens", [3, 1000])
def test_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch, frozen: bool, chunk_tokens: int) -> None:
    monkeypatch.setattr(module, "TILE_ELEMENTS", 300)
    n, d, v = 60, 2, 500
    hidden_ND, head_VD, bias_V, target_N = inputs(n, d, v)
    hidden_ND.requires_grad_()
    head_VD.requires_grad_(not frozen)

    def tiled() -> Tensor:
        both = logprobs_and_entropy(hidden_ND, head_VD, target_N, bias_V=bias_V, chunk_tokens=chunk_tokens)
        return both[0].sum() + both[1].sum()

    def whole() -> Tensor:
        both = plain(hidden_ND, head_VD, bias_V, target_N, 1.0)
        return both[0].sum() + both[1].sum()

    # the head itself is V×D = 1000; a tile is at most 300
    assert max(allocations(tiled).all) == v * d
    assert max(allocations(whole).all) >= n * v  # the measure sees what it is meant to see


def test_default_tiles_are_at_most_64_mib() -> None:
    n, v = 600, 60_000  # 36 M logits
    hidden_ND, head_VD, _, target_N = inputs(n, 1, v, torch.float32)
    hidden_ND.requires_grad_()
    sizes = allocations(lambda: token_logprobs(hidden_ND, head_VD, target_N).sum()).all
    assert max(sizes) * 4 <= 64 * 2**20


@pytest.mark.parametrize(
    ("rows", "chunk_tokens", "cpu", "cuda"),
    [
        (0, 4096, 2**14, 2**14),
        (1, 4096, 2**14, 2**14),
        (4096, 8192, 4096, 2**14),
        (9000, 4096, 4096, 2**14),
        (9000, 8192, 2048, 8192),
        (2**27, 2**27, 1, 1),
    ],
)
def test_width_of_a_tile(rows: int, chunk_tokens: int, cpu: int, cuda: int) -> None:
    assert _width(rows, chunk_tokens, "cpu") == cpu
    assert _width(rows, chunk_tokens, "cuda") == cuda


@pytest.mark.parametrize(
    ("rows", "vocabulary", "width", "expected"),
    [
        (4096, 151_936, 896, 151_936),  # all of it
        (9000, 151_936, 896, 151_936),  # a chunk has 4,096 rows
        (4096, 600_000, 896, 2**32 // 4 // 4096),  # the logits of a tile take 4 GiB
        (4096, 151_936, 8192, 2**31 // 4 // 8192),  # the weight gradient of a tile takes 2 GiB
        (4096, 100, 896, 100),
    ],
)
def test_a_tile_of_compiled_kernels_takes_its_share_of_the_gpu(
    rows: int, vocabulary: int, width: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_memory", lambda _: 2**37)
    assert _width(rows, 4096, "cuda", compiled=True, shape=(vocabulary, width)) == expected
    assert _width(rows, 4096, "cpu", compiled=True, shape=(vocabulary, width)) == min(4096, vocabulary)


def _width(
    rows: int, chunk_tokens: int, device: str, *, compiled: bool = False, shape: tuple[int, int] = (2**14, 8)
) -> int:
    """Of a bfloat16 head of this shape; there is no GPU here, so one is described."""
    head = module._Head(weight_VD=cast(Any, _Described(shape, device)), bias_V=None, dtype=torch.bfloat16)
    options = module._Options(1.0, chunk_tokens, want_entropy=False, compiled=compiled)
    return module._tile_columns(rows, head, options)


class _Described:
    def __init__(self, shape: tuple[int, int], device: str) -> None:
        self.shape, self.device, self.is_cuda = shape, device, device == "cuda"

    def __len__(self) -> int:
        return self.shape[0]
