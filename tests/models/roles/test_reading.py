"""Packed and with a partial last layer against padded, and against plain transformers on each row alone."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.testing import assert_close
from transformers import (
    AttentionInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from kedge.core.records import Rollouts
from kedge.models.forward import reader as reading
from kedge.models.forward.backbones import FullBackbone
from kedge.models.forward.packing import NAME, Layout, attention_of_transformers, lay_out
from kedge.models.forward.reader import compile_layers, reader_of
from kedge.models.loading.tiny import tiny_model
from kedge.models.roles.actor_critic import RoleSet
from kedge.models.roles.build import RoleSpec
from kedge.testing.contracts.roles import update_both

BuildRoles = Callable[[RoleSpec], RoleSet]
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
LENGTHS, PROMPTS = [9, 5, 12, 9, 12, 4], [8, 2, 1, 3, 5, 2]


@pytest.fixture
def ragged() -> Rollouts:
    """Prompts and answers of unlike lengths: the first answer is one token long, the third one has a hole."""
    rng = torch.Generator().manual_seed(4)
    index_T = torch.arange(12)
    attention_BT = index_T < torch.tensor(LENGTHS)[:, None]
    response_BT = attention_BT & (index_T >= torch.tensor(PROMPTS)[:, None])
    response_BT[2, 4:7] = False
    return Rollouts(
        tokens_BT=torch.randint(32, 120, (6, 12), generator=rng).masked_fill(~attention_BT, 256),
        attention_mask_BT=attention_BT,
        response_mask_BT=response_BT,
        behaviour_logp_BT=torch.zeros(6, 12),
        group_B=torch.arange(6),
        finished_B=torch.ones(6, dtype=torch.bool),
        version=0,
    )


def gradients(roles: RoleSet, rollouts: Rollouts) -> dict[str, Tensor]:
    """Of one step of the policy and of two of the critic: its head starts at zero and lets nothing through at first."""
    update_both(roles, rollouts)
    named = [*roles.policy.train_step.named, *roles.critic.train_step.named]
    grads = {f"{index}.{name}": parameter.grad for index, (name, parameter) in enumerate(named)}
    return {name: grad for name, grad in grads.items() if grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
def test_packed_and_padded_roles_compute_and_learn_the_same(
    build_roles: BuildRoles, spec: RoleSpec, ragged: Rollouts, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = spec.actor.model_copy(update={"clip": 1e9})
    spec = replace(spec, recompute=recompute, actor=wide, critic=wide)
    packed = build_roles(spec)
    monkeypatch.setattr(reading, "_agree", lambda *_: False)
    padded = build_roles(spec)
    for roles, is_fast in ((packed, True), (padded, False)):
        reader: Any = roles.policy._model.backbone._reader  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        assert (reader.is_packed, reader.has_partial_last_layer) == (is_fast, is_fast)
    assert_close(packed.policy.logprobs(ragged), padded.policy.logprobs(ragged), rtol=1e-5, atol=1e-5)
    packed_grads, padded_grads = gradients(packed, ragged), gradients(padded, ragged)
    assert packed_grads
    assert packed_grads.keys() == padded_grads.keys()
    for name, grad in padded_grads.items():
        assert_close(packed_grads[name], grad, rtol=1e-4, atol=1e-6)
    assert_close(packed.critic.values(ragged), padded.critic.values(ragged), rtol=1e-4, atol=1e-5)
    assert packed.critic.values(ragged).ne(0).equal(ragged.response_mask_BT)


@torch.no_grad()
def alone(model: PreTrainedModel, tokens_BT: Tensor, read_BT: Tensor) -> Tensor:
    """Plain transformers on each row by itself, cut where it ends."""
    rows: list[Tensor] = []
    for tokens_T, read_T, length in zip(tokens_BT, read_BT, LENGTHS, strict=True):
        hidden_TD = model.get_decoder()(input_ids=tokens_T[None, :length], use_cache=False).last_hidden_state[0]
        rows.append(hidden_TD[read_T[:length]])
    return torch.cat(rows)


def seeded(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make().eval()


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)), (True, True)),
        (lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16)), (True, True)),
        (lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None)), (True, True)),
        (lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=3)), (False, False)),
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8)), (False, False)),
        (lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=300)), (True, False)),
    ],
    ids=["qwen2", "qwen3", "mistral", "mistral with a window", "gemma2", "gpt2"],
)
def test_every_way_reads_what_transformers_computes(
    make: Callable[[], PreTrainedModel], way: tuple[bool, bool], ragged: Rollouts
) -> None:
    model = seeded(make)
    reader = reader_of(model.get_decoder())
    assert (reader.is_packed, reader.has_partial_last_layer) == way
    read_BT = ragged.response_mask_BT
    layout = lay_out(read_BT)
    with torch.no_grad(), reader.active():
        hidden_RD = reader(ragged.tokens_BT.flatten()[layout.place_N], layout)
    assert_close(hidden_RD, alone(model, ragged.tokens_BT, read_BT), rtol=1e-5, atol=1e-5)
    assert model.config._attn_implementation == "sdpa"


class Negated(LlamaDecoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return -super().forward(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_last_layer_that_computes_something_else_is_not_computed_in_part(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = tiny_model(hidden=32).to(dtype)
    assert reader_of(model.get_decoder()).has_partial_last_layer
    assert not caplog.records
    model.model.layers[-1].__class__ = Negated
    reader = reader_of(model.get_decoder())
    assert (reader.is_packed, reader.has_partial_last_layer) == (True, False)
    assert "packed through the layers of transformers" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_gpu_reads_in_bfloat16_what_float32_would_within_what_bfloat16_explains(
    ragged: Rollouts, is_compiled: bool
) -> None:
    model = seeded(lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL | {"hidden_size": 256, "num_hidden_layers": 3})))
    narrow = deepcopy(model).bfloat16().cuda()
    if is_compiled:
        compile_layers(narrow)
    backbone = FullBackbone(narrow)
    reader: Any = backbone._reader
    assert (reader.is_packed, reader.has_partial_last_layer) == (True, True)
    given = ragged.tokens_BT.cuda(), ragged.attention_mask_BT, ragged.response_mask_BT
    with torch.no_grad(), backbone.active():
        hidden_RD = backbone.hidden(*given).float().cpu()
    expected_RD = alone(model, ragged.tokens_BT, ragged.response_mask_BT)
    assert (hidden_RD - expected_RD).abs().mean() < 0.02 * expected_RD.abs().mean()


def test_rows_of_equal_length_are_computed_as_before_to_the_last_bit() -> None:
    model = tiny_model(hidden=32)
    tokens_BT = torch.randint(0, 250, (5, 11), generator=torch.Generator().manual_seed(8))
    layout = lay_out(torch.ones_like(tokens_BT, dtype=torch.bool))
    reader = reader_of(model.get_decoder(), partial_last_layer=False)
    with torch.no_grad(), reader.active():
        hidden_RD = reader(tokens_BT.flatten()[layout.place_N], layout)
    with torch.no_grad():
        expected_BTD = model.get_decoder()(input_ids=tokens_BT, use_cache=False).last_hidden_state
    assert torch.equal(hidden_RD, expected_BTD.flatten(0, 1))


def test_a_model_that_attends_in_another_way_is_left_to_it() -> None:
    model = tiny_model(hidden=32)
    model.set_attn_implementation("eager")
    assert not reader_of(model.get_decoder()).is_packed


def test_a_model_that_keeps_the_layout_from_its_attention_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences would see each other: such a model is found out, in two-byte types, too."""

    def deaf(*args: Any, layout: Layout | None = None, **others: Any) -> tuple[Tensor, None]:
        del layout
        return attention_of_transformers(*args, **others)

    models = tiny_model(hidden=32), tiny_model(hidden=32).half()
    assert [reader_of(model.get_decoder()).is_packed for model in models] == [True, True]
    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, deaf)
    assert [reader_of(model.get_decoder()).is_packed for model in models] == [False, False]


UNLIKE = [(7, 4, 3), (9, 5), (6, 6, 5, 2), (8, 4, 3), (11, 10, 3, 3)]
ALIKE = [(6, 6, 6), (5, 5, 5, 5), (8, 8), (9, 9, 9), (4, 4)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")  # torch's own
@pytest.mark.parametrize("batches", [UNLIKE, ALIKE], ids=["unlike", "alike"])
def test_compiled_layers_say_the_same_and_new_lengths_need_no_new_program(
    batches: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the code generator behind it, whose programs are torch's affair."""
    of_torch = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: of_torch(self, backend="eager", **how))
    torch._dynamo.reset()
    counters.clear()
    plain, model = tiny_model(hidden=32), tiny_model(hidden=32)
    compile_layers(model)
    backbones = FullBackbone(plain), FullBackbone(model)
    programs: list[int] = []
    for number, lengths in enumerate(batches):
        rng = torch.Generator().manual_seed(number)
        index_T = torch.arange(max(lengths))
        mask_BT = index_T < torch.tensor(lengths)[:, None]
        tokens_BT = torch.randint(0, 250, mask_BT.shape, generator=rng)
        read_BT = mask_BT if batches is ALIKE else mask_BT & (index_T > number % 2)
        for backbone in backbones:
            backbone.model.zero_grad()
            with backbone.active():
                backbone.hidden(tokens_BT, mask_BT, read_BT).square().sum().backward()
        for expected, compiled in zip(plain.parameters(), model.parameters(), strict=True):
            assert_close(compiled.grad, expected.grad, rtol=1e-4, atol=1e-5)
        programs.append(counters["stats"]["unique_graphs"])
    is_broken = bool(counters["graph_break"])
    torch._dynamo.reset()
    assert programs[0] > 0
    assert programs[2] == programs[-1] <= 3 * programs[0]
    assert is_broken is (batches is UNLIKE)  # on the CPU, attention over unlike lengths is not compiled
