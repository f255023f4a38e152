"""What processes do together with sharded weights: functions of a world, which is told to shard.

Each is run by one process alone with plain weights, and by several; what they give is compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.processes.training import BUILDERS, train_roles, weights_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kedge.core.errors import KedgeError, ModelError, NumericsError
from kedge.core.loss import ItemLoss
from kedge.core.world import ALONE, World
from kedge.models.forward.heads import language_model
from kedge.models.forward.parts import gathered, is_part, local
from kedge.models.forward.sharding import is_sharded, shard_model, whole_copy
from kedge.models.loading.hashing import module_hash
from kedge.models.loading.load import load_causal
from kedge.models.training.passes import InferenceSize, Passes
from kedge.runtime.processes import ProcessWorld, make_mesh
from kedge.testing.contracts.roles import (
    answers_of,
    example_experience,
    example_rollouts,
    example_spec,
    update_critic,
    update_policy,
)

CASES = ["uneven rows", "one row", "imitation", "ema", "recompute"]
"""Of `training.ROLES`, those that sharded weights must hold to."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
    "opt": {"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32},
}
"""Decoders that are read packed in our layers, packed in theirs, and padded; OPT's layers give views."""


def shard(world: World, copies: int = 1) -> None:
    """Cut weights, each part being held by so many processes; what FSDP2 warns of is an error."""
    warnings.simplefilter("error", UserWarning)
    if isinstance(world, ProcessWorld):
        world.mesh = make_mesh(copies, world.size // copies, on_gpu=False)


def roles_with_parts(world: World, way: str, base: Path, case: str, copies: int = 1) -> dict[str, Any]:
    shard(world, copies)
    return train_roles(world, way, base, case)


def roles_after_a_step_given_up(world: World, base: Path) -> dict[str, Any]:
    """A step that ends in an error after its first pass, and one that does not."""
    if world is not ALONE:
        shard(world)
    roles = BUILDERS["separate"](replace(example_spec(base), world=world, rows=2))
    backend: Any = roles.policy.train_step._backend
    add, num_passes = backend.add, 0

    def add_once(loss: Tensor, *, is_last: bool = True) -> None:
        nonlocal num_passes
        num_passes += 1
        if num_passes > 1:
            raise NumericsError("planted")
        add(loss, is_last=is_last)

    backend.add = add_once
    with suppress(NumericsError):
        update_policy(roles, example_rollouts())
    backend.add = add
    metrics = dict(update_policy(roles, example_rollouts()))
    return {"passes": num_passes, "metrics": metrics, "weights": weights_of(roles)}


def compiled_roles(world: ProcessWorld, way: str, base: Path, is_plain: bool) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler has its own
        if not is_plain:
            world.shard_weights()
        roles = BUILDERS[way](replace(example_spec(base), world=world, compile=True, rows=2))
        metrics = [dict(update(roles, example_rollouts())) for update in (update_policy, update_critic)]
        return {"metrics": metrics, "after": answers_of(roles, example_rollouts())}


def held_in_parts(world: World, base: Path) -> dict[str, Any]:
    """What this process holds of the roles: weights, moments, and the rows of the memory table."""
    shard(world)
    roles = BUILDERS["separate"](replace(example_spec(base), world=world))
    update_policy(roles, example_rollouts())
    state = roles.policy.state()["train_step"]
    moments = [moment for of in state["optimiser"]["state"].values() for moment in of.values() if moment.ndim]
    return {
        "weights": [local(weight).numel() for weight in state["weights"].values()],
        "whole": [weight.numel() for weight in state["weights"].values()],
        "moments": [local(moment).numel() for moment in moments],
        "are parts": all(map(is_part, [*state["weights"].values(), *moments])),
        "frozen": sum(local(weight).numel() for weight in roles.reference._model.backbone.model.parameters()),  # pyright: ignore
        "memory": {row.role: (row.own_bytes, row.learning_bytes, row.learns) for row in roles.memory},
    }


def states(world: World, way: str, base: Path) -> dict[str, Any]:
    """The whole state after a step, the identity of the reference, and what is saved and sampled from."""
    shard(world)
    roles = BUILDERS[way](replace(example_spec(base), world=world, ema=0.5))
    update_policy(roles, example_rollouts())
    update_critic(roles, example_rollouts())
    copy = whole_copy(roles.model)
    assert not is_sharded(copy)
    return {
        "state": gathered_state(roles.state()),
        "hash": module_hash(roles.model, with_adapters=True),
        "copy": {name: weight.clone() for name, weight in copy.named_parameters()},
    }


def gathered_state(state: Any) -> Any:
    """A state with whole tensors in the place of those of which this process has a part."""
    if isinstance(state, Mapping):
        return {key: gathered_state(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(gathered_state, state))
    return gathered(state.detach()) if isinstance(state, Tensor) else state


def go_on(world: World, way: str, base: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Take up a whole state after passes of other weights, and learn on: nothing of those may be left."""
    shard(world)
    roles, rollouts = BUILDERS[way](replace(example_spec(base), world=world, ema=0.5)), example_rollouts()
    answers_of(roles, rollouts)
    whole_copy(roles.model)
    roles.load(deepcopy(dict(state)))  # several processes are given the same memory
    loaded = answers_of(roles, rollouts)
    metrics = [dict(update(roles, rollouts)) for update in (update_policy, update_critic)]
    copied = {name: weight.clone() for name, weight in whole_copy(roles.model).named_parameters()}
    return {"loaded": loaded, "metrics": metrics, "weights": weights_of(roles), "copy": copied}


def refuse(world: World, way: str, base: Path, rank: int) -> dict[str, Any]:
    """A step whose loss is not a number on one process alone, and a good one after it."""
    shard(world)
    roles, experience = BUILDERS[way](replace(example_spec(base), world=world, rows=1)), None
    experience = example_experience(example_rollouts())
    before = weights_of(roles)
    is_bad = world.rank == rank

    def loss(logp_BT: Tensor, entropy_BT: Tensor, part: Any) -> ItemLoss:
        del entropy_BT, part
        return ItemLoss(loss_BT=-logp_BT * (torch.nan if is_bad else 1.0), stats_BT={})

    error = ""
    try:
        roles.policy.update(experience, loss, per="token")
    except KedgeError as raised:
        error = f"{type(raised).__name__}: {raised}"
    unchanged = all(torch.equal(weight, before[name]) for name, weight in weights_of(roles).items())
    is_bad = False
    return {"error": error, "unchanged": unchanged, "metrics": roles.policy.update(experience, loss, per="token")}


def run_out_of_memory(world: World) -> list[str]:
    """A pass through sharded weights that does not fit cannot be done again: what a process says of it, with gradients
    and without."""
    shard(world)

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("planted")

    passes, inference = Passes(4, world=world), InferenceSize(torch.device("cpu"), 4, world=world)
    errors: list[str] = []
    for attempt in (
        lambda: passes.run(torch.device("cpu"), full, lambda _: [1, 2]),
        lambda: inference.each(lambda _: [1, 2], full),
    ):
        try:
            attempt()
        except ModelError as error:
            errors.append(str(error))
    return errors


def read(world: World, family: Mapping[str, Any]) -> dict[str, Any]:
    """Log-probs and gradients of a family of decoders."""
    shard(world)
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    options: dict[str, Any] = {**(sizes if family["model_type"] != "gpt2" else {"vocab_size": 64}), **family}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options))
    model.eval()
    if world.mesh is not None:
        shard_model(model, world.mesh)
    policy = language_model(model)
    tokens_BT = torch.randint(1, 64, (3, 9), generator=torch.Generator().manual_seed(1))
    mask_BT = torch.arange(9) < torch.tensor([[9], [5], [7]])
    with policy.active():
        with torch.no_grad():
            without_BT = policy.logprobs(tokens_BT, mask_BT, mask_BT)
        logp_BT = policy.logprobs(tokens_BT, mask_BT, mask_BT)
        (-logp_BT.sum() / world.size).backward()  # every process computes all rows here
    gradients = {name: gathered(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None}
    return {"without": without_BT, "with": logp_BT.detach(), "gradients": gradients}


def sample_from_copy(world: World, base: Path, steps: Sequence[float]) -> list[tuple[int, float]]:
    """Where the copy is in memory, and its first weight, after each change of the weights."""
    shard(world)
    model = load_causal(str(base), dtype="float32")
    if world.mesh is not None:
        shard_model(model, world.mesh)
    facts: list[tuple[int, float]] = []
    for change in steps:
        for weight in model.parameters():
            local(weight.detach()).add_(change)
        first = next(whole_copy(model).parameters())
        facts.append((first.data_ptr(), first.flatten()[0].item()))
    return facts
