"""Roles `full_precision`: models of their own in float32, whatever the device."""

from __future__ import annotations

from dataclasses import replace

from kedge.models.roles.actor_critic import RoleSet
from kedge.models.roles.build import RoleSpec
from kedge.models.roles.separate import separate


def full_precision(spec: RoleSpec) -> RoleSet:
    roles = separate(replace(spec, dtype="float32"))
    return replace(roles, notes=[*roles.notes, "all roles are in float32"])
