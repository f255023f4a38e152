"""Layers as CUDA graphs compute what the layers compute, whatever the sizes, and while weights change in place."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kedge.models.forward import capture
from kedge.models.forward.backbones import FullBackbone, LoraBackbone
from kedge.models.forward.lora import with_lora
from kedge.models.forward.packing import bucket_of, nearest
from kedge.models.forward.reader import compile_layers
from kedge.models.settings import LoraSettings

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
"""Of torch, about its own calls."""
BATCHES = [(40, 300, 7, 120), (200, 200), (600, 500, 400, 300, 200), (41, 299, 9, 110)]


@given(st.integers(1, 200_000), st.integers(1, 300), st.integers(1, 5_000))
def test_a_bucket_has_room_for_the_rows_and_for_its_own_padding(tokens: int, sequences: int, longest: int) -> None:
    bucket = bucket_of(tokens, sequences, longest)
    padding = bucket.tokens - tokens
    assert 0 <= padding < max(512, tokens / 7)
    assert longest <= bucket.longest
    assert bucket.sequences >= sequences + -(-padding // bucket.longest)


@given(st.integers(1, 100_000))
def test_there_are_few_buckets(tokens: int) -> None:
    assert bucket_of(tokens, 8, 300).tokens % 512 == 0
    assert bucket_of(bucket_of(tokens, 8, 300).tokens, 8, 300).tokens == bucket_of(tokens, 8, 300).tokens


@given(st.lists(st.integers(1, 20_000), min_size=1), st.integers(1, 20_000))
def test_a_bucket_that_is_there_is_taken_if_it_is_little_larger(known: list[int], needed: int) -> None:
    bucket = bucket_of(needed, 8, 300)
    near = nearest([bucket_of(tokens, 8, 300) for tokens in known], bucket)
    fitting = [
        x.tokens for x in (bucket_of(tokens, 8, 300) for tokens in known) if 1 <= x.tokens / bucket.tokens <= 1.25
    ]
    assert (None if near is None else near.tokens) == min(fitting, default=None)


@pytest.fixture
def backbone() -> FullBackbone:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).bfloat16().cuda()
    compile_layers(model)
    return FullBackbone(model)


def layers_of(backbone: FullBackbone | LoraBackbone) -> Any:
    decoder: Any = backbone._reader.decoder
    return decoder.layers[0]


def graphs_of(backbone: FullBackbone | LoraBackbone) -> list[Any]:
    return [graphs for same in layers_of(backbone)._graphs.values() for graphs in same.values()]


def rows(lengths: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    mask_BT = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    tokens_BT = torch.randint(0, 300, mask_BT.shape, generator=torch.Generator().manual_seed(seed))
    return tokens_BT.cuda(), mask_BT


def gradients(backbone: FullBackbone | LoraBackbone, lengths: tuple[int, ...], seed: int) -> list[Tensor]:
    """Hidden states and the gradients of every weight for a loss of them."""
    tokens_BT, mask_BT = rows(lengths, seed)
    decoder: Any = backbone.model.get_decoder()
    weights = [weight for weight in decoder.parameters() if weight.requires_grad]
    with backbone.active():
        hidden_RD = backbone.hidden(tokens_BT, mask_BT, mask_BT)
        return [hidden_RD.detach(), *torch.autograd.grad(hidden_RD.float().square().sum(), weights)]


def uncaptured(backbone: FullBackbone | LoraBackbone, lengths: tuple[int, ...], seed: int) -> list[Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "_WORTH_CAPTURING", 0)
        return gradients(backbone, lengths, seed)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a - b).float().norm() <= 0.06 * b.float().norm()  # both are rounded to bfloat16


@pytest.mark.gpu
def test_graphs_give_the_same_hidden_states_and_gradients_while_the_weights_change(backbone: FullBackbone) -> None:
    for seed, lengths in enumerate(BATCHES):
        assert_same(gradients(backbone, lengths, seed), uncaptured(backbone, lengths, seed))
        with torch.no_grad():
            for weight in backbone.model.parameters():
                weight.add_(0.01 * torch.randn_like(weight))
    assert len(graphs_of(backbone)) == 2  # the first, the second and the last batch share a bucket
    assert None not in graphs_of(backbone)


@pytest.mark.gpu
def test_graphs_of_adapters_give_the_same_gradients(backbone: FullBackbone) -> None:
    model = with_lora(backbone.model, LoraSettings(rank=16), name="policy", seed=0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                weight.normal_(std=0.02)
    adapted = LoraBackbone(model, "policy")
    for seed, lengths in enumerate(BATCHES):
        assert_same(gradients(adapted, lengths, seed), uncaptured(adapted, lengths, seed))
    assert None not in graphs_of(adapted)


@pytest.mark.gpu
def test_graphs_are_captured_anew_after_all_others_are_gone(backbone: FullBackbone) -> None:
    first = gradients(backbone, BATCHES[0], 0)
    layers_of(backbone)._graphs.clear()
    gc.collect()
    assert not capture._pool(backbone.model.device).graphs
    assert_same(gradients(backbone, BATCHES[0], 0), first)
    assert None not in graphs_of(backbone)


@pytest.mark.gpu
def test_graphs_that_are_released_give_their_memory_back(backbone: FullBackbone) -> None:
    first = gradients(backbone, BATCHES[2], 2)
    torch.cuda.empty_cache()
    with_graphs = torch.cuda.memory_reserved()
    capture.release_graphs(backbone.model.device)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < with_graphs
    assert_same(gradients(backbone, BATCHES[2], 2), first)


@pytest.mark.gpu
def test_rows_of_one_pass_do_not_reach_the_next(backbone: FullBackbone) -> None:
    first = gradients(backbone, BATCHES[0], 0)
    gradients(backbone, BATCHES[3], 3)
    assert_same(gradients(backbone, BATCHES[0], 0), first)


@pytest.mark.gpu
def test_a_second_forward_pass_before_the_backward_runs_beside_the_graphs(backbone: FullBackbone) -> None:
    expected = gradients(backbone, BATCHES[0], 0)
    weights = list(backbone.model.model.parameters())
    tokens_BT, mask_BT = rows(BATCHES[0], 0)
    with backbone.active():
        hidden_RD = backbone.hidden(tokens_BT, mask_BT, mask_BT)
        other_BT, other_mask_BT = rows(BATCHES[3], 3)
        with torch.no_grad():
            backbone.hidden(other_BT, other_mask_BT, other_mask_BT)
        later = torch.autograd.grad(hidden_RD.float().square().sum(), weights)
    assert_same([hidden_RD.detach(), *later], expected)


@pytest.mark.gpu
def test_without_gradients_the_forward_graph_alone_is_captured(backbone: FullBackbone) -> None:
    tokens_BT, mask_BT = rows(BATCHES[1], 1)
    with torch.no_grad(), backbone.active():
        hidden_RD = backbone.hidden(tokens_BT, mask_BT, mask_BT)
    (graphs,) = graphs_of(backbone)
    assert graphs.backward is None
    assert_same([hidden_RD], uncaptured(backbone, BATCHES[1], 1)[:1])


@pytest.mark.gpu
def test_recomputed_layers_run_uncaptured(backbone: FullBackbone) -> None:
    expected = gradients(backbone, BATCHES[0], 0)
    backbone.model.gradient_checkpointing_enable({"use_reentrant": False})
    backbone.model.train()
    assert_same(gradients(backbone, BATCHES[0], 0), expected)
    assert None in graphs_of(backbone)
