"""Roles whose optimiser state and reference are in host memory, and frozen roles in 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kedge.core.errors import CheckpointError, ConfigError, ModelError
from kedge.core.records import Rollouts
from kedge.models.loading import load
from kedge.models.reward.ensemble import load_reward
from kedge.models.reward.reward_model import RewardModel
from kedge.models.roles.actor_critic import RoleSet
from kedge.models.roles.build import RoleSpec
from kedge.models.roles.lora import lora
from kedge.models.roles.memory import table
from kedge.models.roles.separate import separate, separate_reference
from kedge.models.roles.trunk import trunk
from kedge.models.training import offload
from kedge.testing.contracts.roles import RolesContract, answers_of, update_both, update_critic, update_policy

BOTH = frozenset({"optimiser", "reference"})


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BUCKET", 1024)


@pytest.mark.slow
class TestMovedRoles(RolesContract):
    """What every way to build roles promises."""

    def build(self, spec: RoleSpec) -> RoleSet:
        return separate(replace(spec, offload=BOTH))


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, Tensor):
        return torch.equal(ours, theirs)
    if isinstance(theirs, Mapping):
        pairs = cast("Mapping[Any, Any]", theirs)
        return list(ours) == list(pairs) and all(same(ours[key], value) for key, value in pairs.items())
    return ours == theirs


@pytest.mark.parametrize(
    ("build", "dtype"),
    [
        (separate, "bfloat16"),
        (lora, "bfloat16"),
        pytest.param(separate, "float32", marks=pytest.mark.slow),
        pytest.param(lora, "float32", marks=pytest.mark.slow),
        pytest.param(trunk, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_every_number_is_the_same_and_a_state_fits_both(
    build: Any, dtype: Any, spec: RoleSpec, rollouts: Rollouts
) -> None:
    spec = replace(spec, dtype=dtype, ema=0.9)
    words = BOTH if build is separate else frozenset({"optimiser"})
    plain, moved = build(spec), build(replace(spec, offload=words))
    for _ in range(2):
        assert update_policy(moved, rollouts) == update_policy(plain, rollouts)
        assert update_critic(moved, rollouts) == update_critic(plain, rollouts)
    assert same(answers_of(moved, rollouts), answers_of(plain, rollouts))
    assert same(moved.policy.final_weights(), plain.policy.final_weights())
    assert same(moved.state(), plain.state())
    resumed = build(spec)
    resumed.load(deepcopy(moved.state()))
    update_both(resumed, rollouts)
    update_both(plain, rollouts)
    assert same(resumed.state(), plain.state())


def test_the_table_counts_what_is_on_the_host(spec: RoleSpec) -> None:
    spec = replace(spec, dtype="bfloat16")
    before, after = (
        {row.role: row for row in separate(replace(spec, offload=words)).memory} for words in (frozenset[Any](), BOTH)
    )
    for role in ("actor", "critic"):
        learns = before[role].learns
        assert before[role].host_bytes == 0
        # Two moments, and copies of all but the value head, which is float32.
        copied = learns if role == "actor" else learns - 33
        assert after[role].host_bytes == 8 * learns + 4 * copied
        assert after[role].learning_bytes == before[role].learning_bytes - after[role].host_bytes == 4 * learns
        assert after[role].own_bytes == before[role].own_bytes
    assert (after["reference"].own_bytes, after["reference"].host_bytes) == (0, before["reference"].own_bytes)
    assert table(list(after.values()))[0].endswith("host MB")
    assert not table(list(before.values()))[0].endswith("host MB")


@pytest.mark.parametrize(("build", "name"), [(lora, "lora"), (trunk, "trunk")])
def test_a_reference_without_weights_of_its_own_is_not_moved(build: Any, name: str, spec: RoleSpec) -> None:
    with pytest.raises(ConfigError, match=f"under roles: {name} it has no weights of its own to move: leave it out"):
        build(replace(spec, offload=frozenset({"reference"})))


@pytest.mark.parametrize("bits", [8, 4])
def test_few_bits_are_refused_without_a_gpu(bits: Any, spec: RoleSpec, frozen_reward: Path) -> None:
    with pytest.raises(ModelError, match=f"weights of {bits} bits need a CUDA device, found 'cpu'; use 16 bits here"):
        separate_reference(replace(spec, frozen_bits=bits))
    with pytest.raises(ModelError, match=f"weights of {bits} bits need a CUDA device"):
        load_reward(frozen_reward, bits=bits)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes has kernels for the CPU, slow ones, which are enough to see what is rounded."""
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(load, "refuse_bits", lambda bits, device: None)  # pyright: ignore[reportUnknownLambdaType]


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(("bits", "least", "most"), [(8, 1e-6, 0.02), (4, 1e-3, 0.2)])
def test_a_rounded_reference_is_near_the_policy_and_the_rest_is_as_it_was(
    bits: Any, least: float, most: float, spec: RoleSpec, rollouts: Rollouts
) -> None:
    exact, rounded = (separate(replace(spec, frozen_bits=count)) for count in (16, bits))
    gap = (rounded.reference.logprobs(rollouts) - exact.reference.logprobs(rollouts)).abs()
    assert least < gap[rollouts.response_mask_BT].mean().item() < most
    assert torch.equal(rounded.policy.logprobs(rollouts), exact.policy.logprobs(rollouts))
    assert torch.equal(rounded.critic.values(rollouts), exact.critic.values(rollouts))
    rows = {row.role: row.own_bytes for row in rounded.memory}
    assert rows["reference"] < rows["actor"]
    with pytest.raises(CheckpointError, match="the reference of this run had the content hash"):
        exact.load(rounded.state())


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("bits", [8, 4])
def test_a_rounded_reference_can_be_moved_too(bits: Any, spec: RoleSpec, rollouts: Rollouts) -> None:
    here, moved = (
        separate_reference(replace(spec, frozen_bits=bits, offload=words))
        for words in (frozenset[Any](), frozenset({"reference"}))
    )
    for _ in range(2):
        assert torch.equal(moved[0].logprobs(rollouts), here[0].logprobs(rollouts))
    assert moved[2] == here[2]  # the hash of its weights


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.usefixtures("on_the_cpu")
def test_a_rounded_reward_model_keeps_its_head(frozen_reward: Path, rollouts: Rollouts) -> None:
    exact, rounded = (cast(RewardModel, load_reward(frozen_reward, bits=bits)) for bits in (16, 8))
    assert torch.equal(cast(Any, rounded.model).score.weight, cast(Any, exact.model).score.weight)
    ours, theirs = (model.score_tokens(rollouts.tokens_BT, rollouts.attention_mask_BT) for model in (rounded, exact))
    assert 0 < (ours - theirs).abs().max().item() < 0.05
