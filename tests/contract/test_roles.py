"""The contract of roles (`kedge.testing.contracts.roles`) on ours, and proof that it catches those that break it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from kedge.core.errors import ModelError
from kedge.core.plugins import names
from kedge.models.roles import build
from kedge.models.roles.actor_critic import RoleSet
from kedge.models.roles.build import RoleSpec
from kedge.models.roles.lora import lora
from kedge.models.roles.separate import separate
from kedge.models.roles.trunk import trunk
from kedge.testing.contracts.roles import RolesContract


class TestSeparate(RolesContract):
    def build(self, spec: RoleSpec) -> RoleSet:
        return separate(spec)


class TestLora(RolesContract):
    def build(self, spec: RoleSpec) -> RoleSet:
        return lora(spec)


class TestTrunk(RolesContract):
    def build(self, spec: RoleSpec) -> RoleSet:
        return trunk(spec)


def test_every_way_of_ours_is_held_to_the_contract() -> None:
    assert sorted(names("roles")) == ["lora", "separate", "trunk"]


class Broken(RolesContract):
    """Roles with a fault."""

    def __init__(self, builder: Callable[[RoleSpec], RoleSet]) -> None:
        self.builder = builder

    def build(self, spec: RoleSpec) -> RoleSet:
        return self.builder(spec)


def reference_moves(spec: RoleSpec) -> RoleSet:
    """The reference is the policy itself."""
    roles = separate(spec)
    object.__setattr__(roles, "reference", roles.policy)
    return roles


def reference_is_rounded(spec: RoleSpec) -> RoleSet:
    """The reference is in bfloat16, the policy in float32."""
    return replace(separate(spec), reference=separate(replace(spec, dtype="bfloat16")).reference)


def saves_the_start(spec: RoleSpec) -> RoleSet:
    roles = separate(spec)
    start = {name: weight.clone() for name, weight in roles.policy.weights().items()}
    cast(Any, roles.policy).final_weights = lambda: start
    return roles


def hash_of_the_policy(spec: RoleSpec) -> RoleSet:
    """A hash that says nothing of the reference."""
    return replace(separate(spec), reference_hash="always the same")


@pytest.mark.parametrize(
    ("builder", "check"),
    [
        (reference_is_rounded, RolesContract.test_before_the_first_step_policy_and_reference_are_the_base),
        (reference_moves, RolesContract.test_the_policy_learns_alone),
        (saves_the_start, RolesContract.test_what_is_saved_is_the_policy),
        (hash_of_the_policy, RolesContract.test_the_reference_is_known_by_its_weights),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_contract_finds_faults(
    builder: Callable[[RoleSpec], RoleSet], check: Callable[[RolesContract, Path], None], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError):
        check(Broken(builder), tmp_path)


@pytest.mark.parametrize("builder", [separate, lora, trunk])
def test_the_contract_finds_dropout_that_was_left_on(
    builder: Callable[[RoleSpec], RoleSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "without_dropout", lambda _: None)
    torch.manual_seed(0)
    # Trunk and upper layers together do not give what the whole decoder gives where either of them drops something.
    with pytest.raises((AssertionError, ModelError), match=r"dropout is on|does more between its layers"):
        Broken(builder).test_dropout_is_off(tmp_path)
