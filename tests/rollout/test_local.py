"""The local engine against a decoder without cache, batch or padding, and against the trainer's log-probs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from adapted import activate, add_adapters
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kedge.core.errors import ConfigError, DataError, ModelError, NumericsError
from kedge.core.records import Prompts, Rollouts, repeated
from kedge.models.forward.heads import language_model
from kedge.models.loading.tiny import tiny_model
from kedge.rollout.local import LocalGenerator
from kedge.rollout.settings import SamplingSettings

STOP = (258, *range(0, 256, 16))
"""One token in sixteen ends an answer, so that rows of a batch end at many places."""
PAD, SEED, NEW = 256, 11, 14
PROMPTS = repeated([[70, 80, 90], [65], list(range(100, 111)), [33, 44], [7] * 6], ids=[3, 14, 15, 92, 6], answers=2)


def _generator(model: PreTrainedModel, *, max_rows: int = 64, **settings: Any) -> LocalGenerator:
    chosen = SamplingSettings.model_validate({"max_new_tokens": NEW, **settings})
    return LocalGenerator(model, chosen, stop_ids=STOP, pad=PAD, max_rows=max_rows, decode=_text)


def _text(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode("latin-1")


def _answers(rollouts: Rollouts) -> list[list[int]]:
    pairs = zip(rollouts.tokens_BT, rollouts.response_mask_BT, strict=True)
    return [tokens_T[mask_T].tolist() for tokens_T, mask_T in pairs]


def _rows(prompts: Prompts, rows: list[int]) -> Prompts:
    picked = {name: tuple(getattr(prompts, name)[row] for row in rows) for name in ("tokens", "group", "answer")}
    return replace(prompts, **picked)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6, "top_k": 7},
        {"temperature": 1.5, "top_p": 0.8, "min_new_tokens": 4},
        {"top_k": 1},
        {"top_k": 40, "top_p": 0.5, "min_new_tokens": 14},
    ],
)
def test_tokens_are_those_of_the_slow_decoder(
    model: LlamaForCausalLM, slow_answer: Callable[..., list[int]], settings: dict[str, Any]
) -> None:
    rollouts = _generator(model, max_rows=4, **settings).generate(PROMPTS, SEED)
    others = {"min_new" if name == "min_new_tokens" else name: value for name, value in settings.items()}
    for row, answer in enumerate(_answers(rollouts)):
        key = (SEED, PROMPTS.group[row], PROMPTS.answer[row])
        assert answer == slow_answer(model, PROMPTS.tokens[row], key=key, stop_ids=STOP, max_new=NEW, **others)


def test_every_index_of_the_record_says_what_the_answers_say(
    model: LlamaForCausalLM, slow_answer: Callable[..., list[int]]
) -> None:
    rollouts = _generator(model).generate(PROMPTS, SEED)
    keys = zip(PROMPTS.group, PROMPTS.answer, strict=True)
    answers = [
        slow_answer(model, tokens, key=(SEED, *key), stop_ids=STOP, max_new=NEW)
        for tokens, key in zip(PROMPTS.tokens, keys, strict=True)
    ]
    width = max(len(tokens) + len(answer) for tokens, answer in zip(PROMPTS.tokens, answers, strict=True))
    assert rollouts.tokens_BT.shape == (10, width)
    for row, (tokens, answer) in enumerate(zip(PROMPTS.tokens, answers, strict=True)):
        rest = width - len(tokens) - len(answer)
        assert rollouts.tokens_BT[row].tolist() == [*tokens, *answer, *[PAD] * rest]
        assert rollouts.attention_mask_BT[row].tolist() == [True] * (width - rest) + [False] * rest
        assert rollouts.response_mask_BT[row].tolist() == [False] * len(tokens) + [True] * len(answer) + [False] * rest
        assert rollouts.finished_B[row].item() == (answer[-1] in STOP)
    assert rollouts.group_B.tolist() == list(PROMPTS.group)
    assert {answer[-1] in STOP for answer in answers} == {True, False}, "both ends must occur for this to mean much"


def _trainer_logp(model: PreTrainedModel, rollouts: Rollouts, temperature: float) -> Tensor:
    trainer = language_model(model)
    masks = rollouts.attention_mask_BT.cpu(), rollouts.response_mask_BT.cpu()
    with torch.no_grad(), trainer.active():
        return trainer.logprobs(rollouts.tokens_BT, *masks, temperature=temperature)


@pytest.mark.parametrize("limits", [{}, {"top_k": 5, "top_p": 0.7, "min_new_tokens": 6}])
def test_log_probs_are_the_trainers_at_every_index(model: LlamaForCausalLM, limits: dict[str, Any]) -> None:
    rollouts = _generator(model, max_rows=3, temperature=0.8, **limits).generate(PROMPTS, SEED)
    expected_BT = _trainer_logp(model, rollouts, 0.8)
    torch.testing.assert_close(rollouts.behaviour_logp_BT, expected_BT, atol=1e-4, rtol=0)
    assert not rollouts.behaviour_logp_BT[~rollouts.response_mask_BT].any()
    assert not torch.allclose(rollouts.behaviour_logp_BT, _trainer_logp(model, rollouts, 1.0), atol=1e-2)


_SMALL: dict[str, Any] = {"vocab_size": 259, "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "make",
    [
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=259, n_embd=24, n_layer=2, n_head=3, n_positions=64)),
        lambda: Qwen2ForCausalLM(Qwen2Config(**_SMALL, num_attention_heads=6, num_key_value_heads=2)),
        lambda: MistralForCausalLM(
            MistralConfig(**_SMALL, num_attention_heads=3, num_key_value_heads=1, sliding_window=None)
        ),
    ],
    ids=["gpt2", "qwen2", "mistral"],
)
def test_other_families_agree_with_the_trainer(make: Callable[[], PreTrainedModel]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        other = make().eval()
    rollouts = _generator(other, max_rows=4).generate(PROMPTS, SEED)
    torch.testing.assert_close(rollouts.behaviour_logp_BT, _trainer_logp(other, rollouts, 1.0), atol=1e-4, rtol=0)


def test_the_active_adapter_samples() -> None:
    adapted = tiny_model(seed=3, hidden=32)
    plain = _generator(adapted).generate(PROMPTS, SEED)
    add_adapters(adapted, {"actor": 2, "critic": 3}, size=0.3)
    for active in (("actor",), ("actor", "critic")):
        activate(adapted, active)
        rollouts = _generator(adapted).generate(PROMPTS, SEED)
        expected_BT = _trainer_logp(adapted, rollouts, 1.0)
        torch.testing.assert_close(rollouts.behaviour_logp_BT, expected_BT, atol=1e-4, rtol=0)
        assert _answers(rollouts) != _answers(plain)
        plain = rollouts


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 64])
def test_a_row_is_the_same_whatever_the_batch(model: LlamaForCausalLM, max_rows: int) -> None:
    settings: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95}
    whole = _answers(_generator(model, **settings).generate(PROMPTS, SEED))
    order = [7, 2, 9, 0, 5, 4, 1, 8, 3, 6]
    shuffled = _answers(_generator(model, max_rows=max_rows, **settings).generate(_rows(PROMPTS, order), SEED))
    assert shuffled == [whole[row] for row in order]
    for row in (3, 8):
        alone = _answers(_generator(model, max_rows=max_rows, **settings).generate(_rows(PROMPTS, [row]), SEED))
        assert alone == [whole[row]]


def test_answers_differ_with_index_group_and_seed_and_come_again(model: LlamaForCausalLM) -> None:
    generator = _generator(model)
    prompts = Prompts(tokens=((70, 80, 90),) * 4, group=(3, 3, 3, 4), answer=(0, 1, 2, 0))
    first = _answers(generator.generate(prompts, SEED))
    assert len({tuple(answer) for answer in first}) == 4
    assert first != _answers(generator.generate(prompts, SEED + 1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)  # the global state has no say, and keeps its own
        before = torch.get_rng_state()
        assert _answers(generator.generate(prompts, SEED)) == first
        assert torch.equal(torch.get_rng_state(), before)


class _Counter:
    """The shape of the tokens of every forward."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.handle = model.model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self.shapes.append(tuple(kwargs["input_ids"].shape))


def test_ended_rows_cost_nothing_and_batches_are_rounded_up_to_buckets(model: LlamaForCausalLM) -> None:
    lengths = [len(answer) for answer in _answers(_generator(model).generate(PROMPTS, SEED))]
    assert min(lengths) < max(lengths) == NEW
    buckets = (1, 4, 6, 10, 12)
    generator = LocalGenerator(
        model, SamplingSettings(max_new_tokens=NEW), stop_ids=STOP, pad=PAD, max_rows=12, buckets=buckets
    )
    counter = _Counter(model)
    rollouts = generator.generate(PROMPTS, SEED)
    counter.handle.remove()
    # The first token comes from reading the prompts, of which there are five, up to eleven tokens long.
    active = [sum(length > drawn for length in lengths) for drawn in range(1, NEW)]
    rounded = [min(size for size in buckets if size >= rows) for rows in active]
    assert counter.shapes == [(5, 11), *((rows, 1) for rows in rounded)]
    assert rounded != active
    assert [len(answer) for answer in _answers(rollouts)] == lengths


def test_places_that_stand_empty_for_long_do_no_harm(model: LlamaForCausalLM) -> None:
    prompts = repeated([[65]], ids=[1], answers=80)
    settings = SamplingSettings(max_new_tokens=5)
    plain = LocalGenerator(model, settings, stop_ids=STOP, pad=PAD, max_rows=80)
    bucketed = LocalGenerator(model, settings, stop_ids=STOP, pad=PAD, max_rows=16, buckets=(16,))
    assert _answers(bucketed.generate(prompts, SEED)) == _answers(plain.generate(prompts, SEED))


def test_a_stop_token_may_come_right_after_the_least_number_of_tokens(model: LlamaForCausalLM) -> None:
    settings = SamplingSettings(max_new_tokens=NEW, min_new_tokens=3)
    stop_ids = set(range(0, 256, 2))  # half of all tokens
    generator = LocalGenerator(model, settings, stop_ids=stop_ids, pad=PAD, max_rows=8)
    answers = _answers(generator.generate(repeated([[70, 80]], ids=[1], answers=20), SEED))
    assert not stop_ids & {token for answer in answers for token in answer[:3]}
    assert sum(answer[3] in stop_ids for answer in answers) == sum(len(answer) == 4 for answer in answers)
    assert 4 <= sum(len(answer) == 4 for answer in answers) <= 16


def test_free_slots_go_to_rows_that_wait(model: LlamaForCausalLM) -> None:
    prompts = _rows(PROMPTS, [0, 1, 4, 5, 6, 7, 8, 9])  # a prompt of one token would look like a step
    lengths = [len(answer) for answer in _answers(_generator(model).generate(prompts, SEED))]
    counter = _Counter(model)
    _generator(model, max_rows=3).generate(prompts, SEED)
    counter.handle.remove()
    steps = [rows for rows, columns in counter.shapes if columns == 1]
    assert sum(steps) == sum(length - 1 for length in lengths)
    # As long as a row waits no slot is idle, so only the last three rows can leave any.
    idle = next(index for index, rows in enumerate(steps) if rows < 3)
    assert len(steps) - idle < NEW


def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(model: LlamaForCausalLM) -> None:
    prompts = _rows(PROMPTS, [0, 4])
    without = LocalGenerator(model, SamplingSettings(max_new_tokens=NEW), stop_ids=(), pad=PAD, max_rows=2)
    free = _answers(without.generate(prompts, SEED))
    stop = _text(free[0][5:8])
    assert len(stop) == 3, "three tokens, none of them special"
    assert stop not in _text(free[0][:7])
    assert stop not in _text(free[1])
    settings = SamplingSettings(max_new_tokens=NEW, stop=("not there", stop))
    generator = LocalGenerator(model, settings, stop_ids=(), pad=PAD, max_rows=2, decode=_text)
    rollouts = generator.generate(prompts, SEED)
    assert _answers(rollouts) == [free[0][:8], free[1]]
    assert rollouts.finished_B.tolist() == [True, False]


def test_a_stop_string_waits_for_the_least_number_of_tokens(model: LlamaForCausalLM) -> None:
    prompts = _rows(PROMPTS, [0])
    free = _answers(_generator(model, min_new_tokens=NEW).generate(prompts, SEED))[0]
    rollouts = _generator(model, min_new_tokens=NEW - 2, stop=[_text(free)[5:8]]).generate(prompts, SEED)
    assert _answers(rollouts) == [free[: NEW - 2]]
    assert rollouts.finished_B.tolist() == [True]


def test_weights_are_the_trainers_own_and_only_the_version_is_loaded() -> None:
    trained = tiny_model(seed=3, hidden=32).train()
    generator = LocalGenerator(
        trained, SamplingSettings(max_new_tokens=NEW), stop_ids=STOP, pad=PAD, max_rows=4, version=5
    )
    first = generator.submit(PROMPTS, SEED)
    assert first.done()
    assert first.result().version == 5
    with torch.no_grad():
        trained.get_parameter("model.layers.0.mlp.down_proj.weight").mul_(30.0)
    generator.load_weights({}, version=6)
    second = generator.generate(PROMPTS, SEED)
    assert second.version == 6
    assert trained.training
    torch.testing.assert_close(second.behaviour_logp_BT, _trainer_logp(trained.eval(), second, 1.0), atol=1e-4, rtol=0)
    assert _answers(second) != _answers(first.result())


def test_a_rollout_can_be_trained_on(model: LlamaForCausalLM) -> None:
    rollouts = _generator(model).generate(PROMPTS, SEED)
    assert not rollouts.tokens_BT.is_inference()
    assert not rollouts.behaviour_logp_BT.requires_grad
    assert rollouts.behaviour_logp_BT.dtype == torch.float32


def test_prompts_without_room_for_an_answer_are_named(model: LlamaForCausalLM) -> None:
    prompts = repeated([[1] * 1010, [1] * 1011, [1] * 9, [2] * 1020], ids=[5, 6, 7, 8], answers=1)
    expected = (
        r"2 prompt\(s\) leave no room .* 14 tokens in the window of 1024: row 1 \(group 6\): 1011, row 3 \(group 8\)"
    )
    with pytest.raises(DataError, match=expected):
        _generator(model).generate(prompts, SEED)


def test_a_sliding_window_is_a_window() -> None:
    small = MistralForCausalLM(MistralConfig(**_SMALL, num_attention_heads=2, num_key_value_heads=1, sliding_window=20))
    with pytest.raises(DataError, match="window of 20: row 4"):
        _generator(small).generate(PROMPTS, SEED)


def test_weights_that_are_not_finite_do_not_answer() -> None:
    broken = tiny_model(seed=3, hidden=32)
    with torch.no_grad():
        broken.get_parameter("model.layers.1.mlp.down_proj.weight")[3, 5] = math.nan
    with pytest.raises(NumericsError, match=r"token 3 of row 0 \(group 3\) is nan"):
        _generator(broken).generate(PROMPTS, SEED)


@pytest.mark.parametrize("buckets", [(2, 1), (1, 4), (1, 1, 3)])
def test_buckets_rise_to_max_rows(model: LlamaForCausalLM, buckets: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="expected rising sizes that end with max_rows 3"):
        LocalGenerator(model, SamplingSettings(), stop_ids=STOP, pad=PAD, max_rows=3, buckets=buckets)


def test_stop_strings_need_text(model: LlamaForCausalLM) -> None:
    with pytest.raises(ConfigError, match=r"stop: \['End'\] are looked for in text"):
        LocalGenerator(model, SamplingSettings(stop=("End",)), stop_ids=STOP, pad=PAD, max_rows=3)


def test_tokens_outside_the_vocabulary_are_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(ModelError, match=r"token 259 .* not among the 259"):
        LocalGenerator(model, SamplingSettings(), stop_ids=(1, 259), pad=PAD, max_rows=3)
