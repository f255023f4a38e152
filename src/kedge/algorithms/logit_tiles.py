"""One tile of logits: the sums that a log-softmax needs, and the gradients of its entries.

Element-wise work and nothing else, so that each can be compiled into one kernel; products and what happens between
tiles are in `logprobs`. Shape letters: R tokens and C vocabulary entries of one tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Final

import torch
from torch import Tensor

COMPILED_FROM: Final = 2**20
"""Smaller tiles are not worth a compiled kernel: they wait for its launch as they do for those of the parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSums:
    """Of each token: top = max z, sum = Σ exp(y) and dot = Σ y exp(y), where y = (z - top) / temperature."""

    top_R: Tensor
    sum_R: Tensor
    dot_R: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """How the work on a tile is done."""

    sums: Callable[[Tensor, float, bool, bool], tuple[Tensor, Tensor, Tensor | None]]
    gradients: Callable[[Tensor, Tensor, Tensor, Tensor | None, float, torch.dtype], Tensor]


def tile_sums(kernels: Kernels, logits_RC: Tensor, temperature: float, *, with_dot: bool, is_kept: bool) -> TileSums:
    """In float32 or wider. The tile is overwritten, unless it `is_kept`.

    >>> found = tile_sums(PLAIN, torch.tensor([[4.0, 4.0]]), 1.0, with_dot=True, is_kept=False)
    >>> found.top_R.item(), found.sum_R.item(), found.dot_R.item()
    (4.0, 2.0, 0.0)
    """
    top_R, sum_R, dot_R = kernels.sums(logits_RC, temperature, with_dot, is_kept)
    return TileSums(top_R=top_R, sum_R=sum_R, dot_R=dot_R)


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """What the gradient of a logit needs besides the logit, of each token of a tile.

    `norm` is the logit of an entry that were certain, H the entropy; g and h are the upstream gradients of the target's
    log-prob and of H.
    """

    norm_R: Tensor
    logp_R: Tensor
    entropy_R: Tensor
    g_R: Tensor
    h_R: Tensor | None


def tile_gradients(
    kernels: Kernels, logits_RC: Tensor, upstream: Upstream, temperature: float, dtype: torch.dtype
) -> Tensor:
    """(-g p_v - h p_v (log p_v + H)) / temperature: the gradient of every logit but the target's, which is
    `target_gradients`. The tile is overwritten."""
    constant_R, h_R = -upstream.g_R / temperature, upstream.h_R
    if h_R is not None:
        h_R = h_R / temperature
        constant_R = constant_R - h_R * upstream.entropy_R
    return kernels.gradients(logits_RC, upstream.norm_R, constant_R, h_R, temperature, dtype)


def target_gradients(upstream: Upstream, temperature: float) -> Tensor:
    """The gradient of the target's logit. Not g added to the rest: in bfloat16 g - g p_t would lose a small 1 - p_t."""
    factor_R = -upstream.g_R
    if upstream.h_R is not None:
        factor_R = factor_R - upstream.h_R * (upstream.entropy_R + upstream.logp_R)
    return (upstream.g_R + upstream.logp_R.exp() * factor_R) / temperature


def _sums(logits_RC: Tensor, temperature: float, with_dot: bool, is_kept: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    top_R = logits_RC.amax(1).to(torch.promote_types(logits_RC.dtype, torch.float32))
    y_RC = _centred(logits_RC, top_R[:, None], temperature, is_kept=is_kept)
    if not with_dot:
        return top_R, y_RC.exp_().sum(1), None
    exp_RC = y_RC.exp()
    return top_R, exp_RC.sum(1), exp_RC.mul_(y_RC).sum(1)


def _gradients(
    logits_RC: Tensor, norm_R: Tensor, constant_R: Tensor, h_R: Tensor | None, temperature: float, dtype: torch.dtype
) -> Tensor:
    # Where the type changes, a compiled kernel should not write the tile as well.
    is_kept = dtype != logits_RC.dtype and torch.compiler.is_compiling()
    logp_RC = _centred(logits_RC, norm_R[:, None], temperature, is_kept=is_kept)
    if h_R is None:
        return logp_RC.exp_().mul_(constant_R[:, None]).to(dtype)
    prob_RC = logp_RC.exp()
    factor_RC = torch.addcmul(constant_R[:, None], logp_RC, -h_R[:, None], out=logp_RC)
    return factor_RC.mul_(prob_RC).to(dtype)


def _centred(logits_RC: Tensor, at_R1: Tensor, temperature: float, *, is_kept: bool) -> Tensor:
    """(z - at) / temperature in the type of `at`: in the tile itself where the types agree and it is not kept."""
    in_place = logits_RC.dtype == at_R1.dtype and not is_kept
    out_RC = logits_RC.sub_(at_R1) if in_place else logits_RC - at_R1
    return out_RC if temperature == 1 else out_RC.div_(temperature)


PLAIN = Kernels(sums=_sums, gradients=_gradients)


def kernels_for(logits_RC: Tensor, *, compiled: bool) -> Kernels:
    if not compiled or logits_RC.numel() < COMPILED_FROM:
        return PLAIN
    return fused() if logits_RC.is_cuda and find_spec("triton") else _compiled()


@cache
def _compiled() -> Kernels:
    """Each as one kernel (torch.compile), made when it is first called. The size of the tile is free in them, so that
    there is one for log-probs and one with the entropy."""
    return Kernels(sums=torch.compile(_sums, dynamic=True), gradients=torch.compile(_gradients, dynamic=True))


@cache
def fused() -> Kernels:
    """Each as one kernel of our own (Triton), which is there at once."""
    from kedge.algorithms.kernels import logit_tiles

    return Kernels(sums=logit_tiles.sums, gradients=logit_tiles.gradients)
