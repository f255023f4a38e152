"""Every way to run a step, and every number of steps between two looks, against the decoder that knows neither.

On the CPU nothing is captured: `graph` runs its static slots, places and cache step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapted import activate, add_adapters
from transformers import LlamaForCausalLM

from kedge.core.errors import ModelError
from kedge.core.records import Rollouts, repeated
from kedge.models.loading.tiny import tiny_model
from kedge.rollout.graphs import weights_identity
from kedge.rollout.local import LocalGenerator, Path
from kedge.rollout.settings import SamplingSettings

STOP = (258, *range(0, 256, 16))
PAD, SEED, NEW = 256, 11, 14
PROMPTS = repeated([[70, 80, 90], [65], list(range(100, 111)), [33, 44], [7] * 6], ids=[3, 14, 15, 92, 6], answers=2)
WAYS: list[tuple[Path, int]] = [("eager", 3), ("eager", 50), ("graph", 1), ("graph", 5)]


def _generator(model: LlamaForCausalLM, path: Path, look: int, **settings: Any) -> LocalGenerator:
    chosen = SamplingSettings.model_validate({"max_new_tokens": NEW, **settings})
    return LocalGenerator(
        model, chosen, stop_ids=STOP, pad=PAD, max_rows=4, decode=_text, path=path, look_every=look, buckets=(1, 3, 4)
    )


def _text(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode("latin-1")


def _answers(rollouts: Rollouts) -> list[list[int]]:
    pairs = zip(rollouts.tokens_BT, rollouts.response_mask_BT, strict=True)
    return [tokens_T[mask_T].tolist() for tokens_T, mask_T in pairs]


@pytest.mark.parametrize(("path", "look"), WAYS)
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_new_tokens": 4}])
def test_tokens_are_those_of_the_slow_decoder(
    model: LlamaForCausalLM,
    slow_answer: Callable[..., list[int]],
    path: Path,
    look: int,
    settings: dict[str, Any],
) -> None:
    rollouts = _generator(model, path, look, **settings).generate(PROMPTS, SEED)
    others = {"min_new" if name == "min_new_tokens" else name: value for name, value in settings.items()}
    for row, answer in enumerate(_answers(rollouts)):
        key = (SEED, PROMPTS.group[row], PROMPTS.answer[row])
        assert answer == slow_answer(model, PROMPTS.tokens[row], key=key, stop_ids=STOP, max_new=NEW, **others)


@pytest.mark.parametrize(("path", "look"), WAYS)
def test_all_of_the_record_is_that_of_one_step_at_a_time(model: LlamaForCausalLM, path: Path, look: int) -> None:
    plain = _generator(model, "eager", 1).generate(PROMPTS, SEED)
    rollouts = _generator(model, path, look).generate(PROMPTS, SEED)
    for name in ("tokens_BT", "attention_mask_BT", "response_mask_BT", "group_B", "finished_B"):
        assert torch.equal(getattr(rollouts, name), getattr(plain, name)), name
    torch.testing.assert_close(rollouts.behaviour_logp_BT, plain.behaviour_logp_BT, atol=1e-5, rtol=0)
    assert not rollouts.behaviour_logp_BT[~rollouts.response_mask_BT].any()


@pytest.mark.parametrize(("path", "look"), WAYS)
def test_what_was_drawn_after_a_stop_string_is_thrown_away(model: LlamaForCausalLM, path: Path, look: int) -> None:
    free = _answers(_generator(model, "eager", 1, min_new_tokens=NEW).generate(PROMPTS, SEED))
    stop = _text(free[0])[5:7]
    plain = _generator(model, "eager", 1, min_new_tokens=4, stop=[stop]).generate(PROMPTS, SEED)
    rollouts = _generator(model, path, look, min_new_tokens=4, stop=[stop]).generate(PROMPTS, SEED)
    assert stop in _text(_answers(plain)[0])
    assert _answers(rollouts) == _answers(plain)
    assert torch.equal(rollouts.tokens_BT, plain.tokens_BT)
    assert torch.equal(rollouts.finished_B, plain.finished_B)


def _graphs(generator: LocalGenerator) -> Any:
    return generator._graphs  # pyright: ignore[reportPrivateUsage]: whether it is the same object is what is tested


def test_what_is_kept_between_calls_is_used_again_while_it_fits() -> None:
    trained = tiny_model(seed=3, hidden=32)
    generator = _generator(trained, "graph", 4)
    first = generator.generate(PROMPTS, SEED)
    graphs = _graphs(generator)
    again = generator.generate(PROMPTS, SEED)
    assert torch.equal(again.tokens_BT, first.tokens_BT)
    assert _graphs(generator) is graphs

    with torch.no_grad():  # in place, as an optimiser does
        trained.get_parameter("model.layers.0.mlp.down_proj.weight").mul_(30.0)
    changed = generator.generate(PROMPTS, SEED)
    assert _graphs(generator) is graphs
    assert _answers(changed) == _answers(_generator(trained, "eager", 1).generate(PROMPTS, SEED)) != _answers(first)

    long = repeated([[9] * 150, [8]], ids=[1, 2], answers=1)
    expected = _generator(trained, "eager", 1).generate(long, SEED)
    assert torch.equal(generator.generate(long, SEED).tokens_BT, expected.tokens_BT)
    assert (_graphs(generator).cache.places, _graphs(generator).cache.columns) == (4, 256)
    graphs = _graphs(generator)
    weight = trained.get_parameter("model.norm.weight")
    weight.data = weight.data.clone()
    assert torch.equal(generator.generate(long, SEED).tokens_BT, expected.tokens_BT)
    assert _graphs(generator) is not graphs, "a graph would read the weights from where they were"
    generator.release()
    assert torch.equal(generator.generate(long, SEED).tokens_BT, expected.tokens_BT)
    assert (_graphs(generator).cache.places, _graphs(generator).cache.columns) == (3, 256)


def test_graphs_are_not_used_for_other_weights_or_other_adapters() -> None:
    plain = tiny_model(seed=3, hidden=32)
    before = weights_identity(plain)
    with torch.no_grad():
        plain.get_parameter("model.norm.weight").add_(1.0)
    assert weights_identity(plain) == before
    weight = plain.get_parameter("model.norm.weight")
    weight.data = weight.data.clone()
    assert weights_identity(plain) != before

    adapted = tiny_model(seed=3, hidden=32)
    add_adapters(adapted, {"actor": 2, "critic": 3})
    both = weights_identity(adapted)
    activate(adapted, ("actor",))
    assert weights_identity(adapted) not in (both, before)
    activate(adapted, ("actor", "critic"))
    assert weights_identity(adapted) == both
    adapted.get_submodule("model.layers.0.mlp.down_proj").scaling["actor"] = 9.0  # pyright: ignore[reportIndexIssue, reportArgumentType]
    assert weights_identity(adapted) != both


def test_the_path_can_be_read_and_one_that_cannot_be_taken_is_refused(model: LlamaForCausalLM) -> None:
    default = LocalGenerator(model, SamplingSettings(), stop_ids=STOP, pad=PAD, max_rows=4)
    assert (default.path, _generator(model, "graph", 1).path) == ("eager", "graph")
    with pytest.raises(
        ModelError, match=r"LlamaForCausalLM cannot be decoded on the path 'fused': its widths \(32, 96, 8"
    ):
        _generator(model, "fused", 1)
