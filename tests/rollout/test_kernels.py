"""The kernels of a step against plain torch. They need a GPU, or Triton's interpreter, which runs them on the CPU:

TRITON_INTERPRET=1 pytest -m gpu tests/rollout/test_kernels.py        # with triton >= 3.8 installed
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapted import add_adapters
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from kedge.algorithms.logprobs import token_logprobs
from kedge.core.records import repeated
from kedge.models.forward.lora import LoraLinear
from kedge.rollout.adapters import Adapters, LowRank
from kedge.rollout.cache import RowCache, for_decoding
from kedge.rollout.graphs import GraphSteps
from kedge.rollout.local import LocalGenerator
from kedge.rollout.settings import SamplingSettings
from kedge.rollout.steps import (
    ALIVE,
    AT,
    COLUMN,
    DRAWN,
    KEY,
    PLACE,
    TOKEN,
    Slots,
    draw,
    empty_slots,
    folded,
    last_hidden,
)
from kedge.rollout.tiles import Reading, Tile

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE: dict[str, Any] = {"atol": 1e-4, "rtol": 5e-4}


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _adapted(weight_NK: Tensor, ranks: dict[str, int], *, seed: int) -> LoraLinear:
    """Adapters of these ranks on a matrix, each with its own scale."""
    (outputs, inputs) = weight_NK.shape
    layer = LoraLinear(nn.Linear(inputs, outputs, bias=False, device=DEVICE))
    layer.base_layer.weight = nn.Parameter(weight_NK)
    for number, (name, rank) in enumerate(ranks.items()):
        layer.lora_A[name] = nn.Parameter(_random(rank, inputs, seed=seed + 10 * number) * inputs**-0.5)
        layer.lora_B[name] = nn.Parameter(_random(outputs, rank, seed=seed + 10 * number + 1))
        layer.scaling[name], layer.dropout[name] = 0.7 + number, 0.0
    layer.active = tuple(ranks)
    return layer


def _low_rank(*layers: nn.Module) -> LowRank | None:
    adapters = Adapters()
    low = adapters.together(layers)
    adapters.refresh()
    return low


RANKS: list[dict[str, int]] = [{}, {"a": 4}, {"a": 16}, {"a": 24}, {"a": 3, "b": 18}, {"a": 70}]
"""Of adapters that are active together: none, less than a block, a block, more, several, and several blocks."""


@pytest.mark.parametrize("splits", [1, 2, 3, 8])
def test_attention_reads_the_filled_columns_of_each_rows_own_place(splits: int) -> None:
    from kedge.rollout.kernels.attention import decode_attention

    q_RHGD, keys_PHSD, values_PHSD = (
        _random(3, 2, 3, 32),
        _random(5, 2, 300, 32, seed=1),
        _random(5, 2, 300, 32, seed=2),
    )
    places, columns = [4, 0, 2], [0, 299, 130]  # most splits of the first row have no column at all
    keys_PHSD[4, :, 1:], values_PHSD[2, :, 131:] = torch.nan, torch.nan  # what is not theirs may be anything
    reading = Reading(columns=32, warps=1, stages=2, splits=splits, is_early=False)
    found_RHGD = decode_attention(
        q_RHGD,
        keys_PHSD,
        values_PHSD,
        torch.tensor(places, device=DEVICE),
        torch.tensor(columns, device=DEVICE),
        scale=0.3,
        reading=reading,
    )
    for row, (place, column) in enumerate(zip(places, columns, strict=True)):
        keys_HSD, values_HSD = keys_PHSD[place, :, : column + 1], values_PHSD[place, :, : column + 1]
        weight_HGS = (q_RHGD[row] @ keys_HSD.mT * 0.3).softmax(-1)
        torch.testing.assert_close(found_RHGD[row], weight_HGS @ values_HSD, **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize(
    ("splits", "rows", "ranks"), [*((1, 5, ranks) for ranks in RANKS), *((2, 20, ranks) for ranks in RANKS), (3, 5, {})]
)
def test_a_product_is_added_and_made_ready_for_its_norm(splits: int, rows: int, ranks: dict[str, int]) -> None:
    from kedge.rollout.kernels.added import added
    from kedge.rollout.kernels.stream import Stream, normed

    plain_RW, input_RK, weight_WK = _random(rows, 64), _random(rows, 96, seed=1), _random(64, 96, seed=2)
    bias_W, norm_W = _random(64, seed=3), _random(64, seed=4)
    layer = _adapted(weight_WK, ranks, seed=5)
    expected_RW = plain_RW + layer(input_RK) + bias_W
    arrived = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    stream = Stream(plain_RW=plain_RW, weighted_RW=torch.full_like(plain_RW, torch.nan), squares_RN=plain_RW[:, :1])
    tile = Tile(rows=16, columns=16, depth=32, splits=splits)
    after = added(stream, input_RK, weight_WK, bias_W, norm_W, low=_low_rank(layer), tile=tile, arrived=arrived)
    torch.testing.assert_close(after.plain_RW, expected_RW, **TOLERANCE)
    expected_norm_RW = torch.nn.functional.rms_norm(expected_RW, (64,), norm_W, eps=1e-3)
    torch.testing.assert_close(normed(after, 1e-3), expected_norm_RW, **TOLERANCE)
    assert not arrived.any()


@torch.no_grad()
@pytest.mark.parametrize("ranks", [(gate, gate) for gate in RANKS] + [({"a": 4}, {}), ({"a": 4}, {"a": 24})])
@pytest.mark.parametrize("gate_is_first", [True, False])
def test_gate_and_up_are_told_apart_whichever_lies_first_in_memory(
    gate_is_first: bool, ranks: tuple[dict[str, int], dict[str, int]]
) -> None:
    from kedge.rollout.kernels.gated import gated
    from kedge.rollout.kernels.stream import Stream

    rows, width, inner = 5, 64, 96
    plain_RW, norm_W, memory_2FW = _random(rows, width), _random(width, seed=1), _random(2, inner, width, seed=2)
    first_FW, second_FW = memory_2FW
    gate_FW, up_FW = (first_FW, second_FW) if gate_is_first else (second_FW, first_FW)
    squares_RN = plain_RW.square().view(rows, 2, -1).sum(-1)
    stream = Stream(plain_RW=plain_RW, weighted_RW=plain_RW * norm_W, squares_RN=squares_RN)
    gate, up = _adapted(gate_FW, ranks[0], seed=3), _adapted(up_FW, ranks[1], seed=5)
    low = _low_rank(gate, up)
    found_RF = gated(stream, gate_FW, up_FW, low=low, eps=1e-3, tile=Tile(rows=16, columns=32, depth=32))
    normed_RW = torch.nn.functional.rms_norm(plain_RW, (width,), norm_W, eps=1e-3)
    expected_RF = torch.nn.functional.silu(gate(normed_RW)) * up(normed_RW)
    torch.testing.assert_close(found_RF, expected_RF, atol=5e-4, rtol=5e-4)


def _slots(rows: int) -> Slots:
    slots = empty_slots(rows, 4, DEVICE)
    slots.state_FR[KEY] = torch.arange(rows, device=DEVICE) * 7919 - 2**62
    slots.state_FR[DRAWN] = torch.arange(rows, device=DEVICE) % 5
    slots.state_FR[COLUMN] = 10 + torch.arange(rows, device=DEVICE)
    slots.state_FR[ALIVE] = (torch.arange(rows, device=DEVICE) != 3).long()
    slots.state_FR[AT] = 2
    return slots


@pytest.mark.parametrize(("temperature", "least", "programs"), [(1.0, 0, 1), (0.6, 3, 3)])
def test_drawn_tokens_and_the_state_after_them_are_those_of_the_torch_path(
    temperature: float, least: int, programs: int
) -> None:
    from kedge.rollout.kernels.sampling import draw_and_advance

    rows, vocabulary = 19, 203  # more rows than a tile, more tiles than programs
    hidden_RD, head_VD = _random(rows, 32), _random(vocabulary, 32, seed=1)
    stop_V = torch.arange(vocabulary, device=DEVICE) % 2 == 0
    slots, before = _slots(rows), _slots(rows)
    scaled_RV = hidden_RD @ head_VD.T / temperature
    barred_RV = stop_V & (before.drawn_R < least)[:, None]
    key_R = folded(before.key_R, before.drawn_R)
    token_R = draw(scaled_RV.masked_fill(barred_RV, -torch.inf), key_R, top_k=None, top_p=1.0)
    logp_R = scaled_RV.log_softmax(-1).gather(1, token_R[:, None])[:, 0]
    tile = Tile(rows=16, columns=64, depth=16, programs=programs)
    draw_and_advance(slots, hidden_RD, head_VD, stop_V, temperature=temperature, least=least, most=5, tile=tile)
    assert slots.token_KR[2].tolist() == token_R.tolist()
    torch.testing.assert_close(slots.logp_KR[2], logp_R, **TOLERANCE)
    for row in range(rows):
        token, grows = int(token_R[row]), row != 3
        ends = token % 2 == 0 or int(before.drawn_R[row]) + 1 == 5
        expected = before.state_FR[:, row].tolist()
        expected[AT] = 3
        if grows:
            expected[TOKEN], expected[ALIVE] = token, int(not ends)
            expected[COLUMN], expected[DRAWN] = expected[COLUMN] + 1, expected[DRAWN] + 1
        assert slots.state_FR[:, row].tolist() == expected


def _qwen(layers: int) -> Any:
    sizes: dict[str, Any] = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers}
    heads: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
    config = Qwen2Config(**sizes, **heads)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = Qwen2ForCausalLM(config).eval()
        with torch.no_grad():
            for weight in model.parameters():  # larger than usual, and no norm or bias that does nothing
                weight.mul_(4.0).add_(0.3 * torch.randn_like(weight) if weight.ndim == 1 else 0.0)
    return model.to(DEVICE)


@torch.no_grad()
@pytest.mark.parametrize("targets", [None, ("k_proj", "up_proj", "down_proj"), ("v_proj", "o_proj", "gate_proj")])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_fused_layer_is_the_module(ranks: dict[str, int], targets: tuple[str, ...] | None) -> None:
    model, columns = _qwen(1), [5, 0, 8]
    add_adapters(model, ranks, targets=targets, size=0.2)
    cache, slots = RowCache(4, 16), empty_slots(3, 1, DEVICE)
    slots.state_FR[TOKEN] = torch.tensor([17, 200, 31], device=DEVICE)
    slots.state_FR[COLUMN] = torch.tensor(columns, device=DEVICE)
    slots.state_FR[PLACE] = torch.tensor([2, 0, 3], device=DEVICE)
    past = torch.randint(0, 259, (3, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    from kedge.rollout.kernels.backbone import FusedBackbone

    with for_decoding(model):
        cache.at_prompts(slots.place_R, torch.arange(3, device=DEVICE))
        last_hidden(model, cache, past, torch.arange(9, device=DEVICE).expand(3, 9), None)
        backbone = FusedBackbone(model, cache, slots, chained=False)
        backbone.refresh()
        found_RW = backbone(3)
    for row, column in enumerate(columns):
        text = torch.cat((past[row, :column], slots.token_R[row : row + 1]))[None]
        expected_W = model.model(input_ids=text).last_hidden_state[0, -1]
        torch.testing.assert_close(found_RW[row], expected_W, **TOLERANCE)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type == "cuda", reason="in float32, which tokens can be compared in, only interpreted")
def test_the_fused_path_samples_what_the_eager_path_samples() -> None:
    model = _qwen(2)
    prompts = repeated([[70, 80, 90], [65], list(range(100, 111)), [7] * 6], ids=[3, 14, 15, 6], answers=1)
    settings = SamplingSettings(max_new_tokens=5, temperature=0.8, min_new_tokens=2)
    stops = (258, *range(0, 256, 8))
    eager, fused = (
        LocalGenerator(model, settings, stop_ids=stops, pad=256, max_rows=3, path=path, look_every=3)
        for path in ("eager", "fused")
    )
    expected, rollouts = eager.generate(prompts, 11), fused.generate(prompts, 11)
    assert isinstance(fused._graphs, GraphSteps)  # pyright: ignore[reportPrivateUsage]: it must not have been eager
    assert torch.equal(rollouts.tokens_BT, expected.tokens_BT)
    torch.testing.assert_close(rollouts.behaviour_logp_BT, expected.behaviour_logp_BT, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_adapters_are_sampled_on_the_fused_path_as_the_trainer_has_them_now() -> None:
    dtype, tolerance = (torch.bfloat16, 0.2) if DEVICE.type == "cuda" else (torch.float32, 1e-5)
    model = _qwen(2).to(dtype)
    add_adapters(model, {"actor": 4})
    settings = SamplingSettings(max_new_tokens=4)
    fused, eager = (
        LocalGenerator(model, settings, stop_ids=(258,), pad=256, max_rows=2, path=path, look_every=2)
        for path in ("fused", "eager")
    )
    prompts = repeated([[70, 80, 90], [65] * 5], ids=[3, 14], answers=1)
    graphs, before = None, torch.zeros((), device=DEVICE)
    for scale in (1.0, 1.5):
        for name, weight in model.named_parameters():
            weight.data.mul_(scale if ".lora_B." in name else 1.0)
        expected, rollouts = eager.generate(prompts, 11), fused.generate(prompts, 11)
        if DEVICE.type != "cuda":
            assert torch.equal(rollouts.tokens_BT, expected.tokens_BT)
        same_BT = rollouts.tokens_BT == expected.tokens_BT
        torch.testing.assert_close(
            rollouts.behaviour_logp_BT[same_BT], expected.behaviour_logp_BT[same_BT], atol=tolerance, rtol=0
        )
        assert not torch.equal(rollouts.behaviour_logp_BT, before)
        before = rollouts.behaviour_logp_BT
        used = fused._graphs  # pyright: ignore[reportPrivateUsage]: whether it is the same object is what is tested
        assert used is not None
        assert graphs in (None, used)
        graphs = used


@torch.no_grad()
@pytest.mark.skipif(DEVICE.type != "cuda", reason="the rounding of bfloat16, at a size that takes a GPU")
@pytest.mark.parametrize("ranks", [{}, {"actor": 16}, {"actor": 24}])
def test_generator_and_trainer_agree_in_bfloat16(ranks: dict[str, int]) -> None:
    config = Qwen2Config(vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=12,
                         num_attention_heads=8, num_key_value_heads=2)  # fmt: skip
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(config)
    model.eval().to(DEVICE, torch.bfloat16)
    add_adapters(model, ranks, size=0.01)
    generator = LocalGenerator(model, SamplingSettings(max_new_tokens=64), stop_ids=(1,), pad=0, max_rows=64)
    prompts = repeated([[*range(10 * row, 10 * row + 24)] for row in range(64)], ids=list(range(64)), answers=1)
    rollouts = generator.generate(prompts, 3)
    assert generator.path == "fused"
    mask_BT = rollouts.response_mask_BT
    hidden_BTD = model.model(input_ids=rollouts.tokens_BT, use_cache=False).last_hidden_state
    hidden_ND = hidden_BTD[mask_BT.roll(-1, dims=1)]
    logp_N = token_logprobs(hidden_ND, model.lm_head.weight, rollouts.tokens_BT[mask_BT])
    assert (rollouts.behaviour_logp_BT[mask_BT] - logp_N).abs().mean().item() <= 0.012


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter compiles nothing")
def test_kernels_that_are_only_compiled_do_not_run_and_are_found_later() -> None:
    from kedge.rollout.kernels.launch import compiling
    from kedge.rollout.kernels.stream import embed

    table_VW, norm_W = _random(40, 64).bfloat16(), _random(64, seed=1).bfloat16()
    token_R = torch.tensor([3, 7, 11, 39], device=DEVICE)
    expected = embed(token_R, table_VW, norm_W)
    wide_VW, wide_W = _random(40, 128).bfloat16(), _random(128, seed=1).bfloat16()
    with compiling():
        embed(torch.full_like(token_R, 2**40), wide_VW, wide_W)  # such a token would be an illegal address
    torch.cuda.synchronize()
    assert torch.equal(embed(token_R, table_VW, norm_W).weighted_RW, expected.weighted_RW)
    assert embed(token_R, wide_VW, wide_W).weighted_RW.isfinite().all()
