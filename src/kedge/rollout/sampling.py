"""Drawing tokens: which are allowed, and which of them is taken, from numbers that each row makes for itself.

Number v of a row's key is output v of SplitMix64 (Steele et al. 2014) seeded with it, on any device, among any rows.
The token is the argmax of logit + Gumbel noise, so that rounding which differs between batches can change it only
where two tokens are all but equal. Shape letters: B rows, V vocabulary, K of them in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def row_keys(seed: int, group_B: Tensor, answer_B: Tensor) -> Tensor:
    """One int64 key a row, from the seed, the prompt's id and the answer's index, on the device of `group_B`."""
    start = torch.tensor((seed + 2**63) % 2**64 - 2**63, device=group_B.device)
    return folded(folded(_mixed(start), group_B), answer_B)


def folded(key_B: Tensor, number_B: Tensor) -> Tensor:
    """A key of its own for each number under a key."""
    return _mixed(key_B + (number_B + 1) * _GOLDEN)


def draw(scaled_BV: Tensor, key_B: Tensor, *, top_k: int | None, top_p: float) -> Tensor:
    """One token a row, from softmax(scaled) limited to the allowed tokens."""
    if top_k is not None or top_p < 1:
        scaled_BV = scaled_BV.masked_fill(~allowed(scaled_BV, top_k=top_k, top_p=top_p), -torch.inf)
    return (scaled_BV - log_waits(key_B, scaled_BV.shape[1])).argmax(-1)


def allowed(scaled_BV: Tensor, *, top_k: int | None, top_p: float) -> Tensor:
    """True on the `top_k` likeliest tokens, and of those on the smallest set with at least `top_p` of their mass.

    Among equally likely tokens the lower id goes first.

    >>> scaled_BV = torch.tensor([[1.0, 4.0, 2.0, 1.0]]).log()  # probabilities 1/8, 1/2, 1/4, 1/8
    >>> allowed(scaled_BV, top_k=3, top_p=1.0).tolist(), allowed(scaled_BV, top_k=None, top_p=0.5).tolist()
    ([[True, True, True, False]], [[False, True, False, False]])
    """
    keep_BV = torch.ones_like(scaled_BV, dtype=torch.bool)
    if top_k is not None and top_k < scaled_BV.shape[1]:
        keep_BV = _likeliest(scaled_BV, top_k)
    if top_p < 1:
        keep_BV &= _nucleus(scaled_BV.masked_fill(~keep_BV, -torch.inf), top_p)
    return keep_BV


def log_waits(key_B: Tensor, size: int) -> Tensor:
    """log E for independent exponential times E, `size` of them a row: minus a Gumbel variable, in float32 (B, V).

    E = -log(1 - u) keeps its precision where it is short, and the shortest waits are those that win.
    """
    counter_V = torch.arange(1, size + 1, device=key_B.device) * _GOLDEN
    bits_BV = _mixed(key_B[:, None] + counter_V)
    uniform_BV = _shifted(bits_BV, 11).to(torch.float32).add_(0.5).mul_(2.0**-53)
    # In float32 the largest numbers round to 1, and would wait for ever.
    return uniform_BV.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_().log_()


def _likeliest(scaled_BV: Tensor, count: int) -> Tensor:
    count_B1 = torch.full_like(scaled_BV[:, :1], count, dtype=torch.int64)
    return _first(scaled_BV, scaled_BV.topk(count).values[:, -1:], count_B1)


def _nucleus(scaled_BV: Tensor, mass: float) -> Tensor:
    # float64: a sum of 100 thousand float32 probabilities would be off by more than the rarest of them.
    top_B1 = scaled_BV.amax(-1, keepdim=True).double()
    weight_BV = (scaled_BV.double() - top_B1).exp_()
    total_B1 = weight_BV.sum(-1, keepdim=True)
    # Tokens rarer than (1 - mass) / V hold less than 1 - mass between them: none of them needs to be sorted.
    rare_B1 = total_B1 * ((1 - mass) / scaled_BV.shape[1])
    size = int((weight_BV >= rare_B1).sum(-1).max())
    ordered_BK = scaled_BV.topk(size).values
    reached_BK = (ordered_BK.double() - top_B1).exp_().cumsum(-1)
    # Rounding may leave even the last sum short: then all of these are taken.
    last_B1 = (reached_BK < mass * total_B1).sum(-1, keepdim=True).clamp_(max=size - 1)
    return _first(scaled_BV, ordered_BK.gather(1, last_B1), last_B1 + 1)


def _first(scaled_BV: Tensor, last_B1: Tensor, count_B1: Tensor) -> Tensor:
    """True on the `count` likeliest tokens, where the last of them has logit `last`; the lower ids of those with it."""
    above_BV, tied_BV = scaled_BV > last_B1, scaled_BV == last_B1
    room_B1 = count_B1 - above_BV.sum(-1, keepdim=True)
    return above_BV | (tied_BV & (tied_BV.cumsum(-1) <= room_B1))


def _mixed(x: Tensor) -> Tensor:
    """The output function of SplitMix64: 64 bits in, 64 well-mixed bits out. int64 products wrap around."""
    x = _shifted(x, 30).bitwise_xor_(x).mul_(_MIX_1)
    x = _shifted(x, 27).bitwise_xor_(x).mul_(_MIX_2)
    return _shifted(x, 31).bitwise_xor_(x)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left: torch only knows signed integers of 64 bits."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
