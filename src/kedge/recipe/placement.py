"""Where a run computes: how many processes, and what follows when one of them dies or hangs. Never changes a result."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from kedge.core.errors import ConfigError
from kedge.core.quoting import quoted
from kedge.core.settings import Section
from kedge.core.suggest import did_you_mean

ROLES: Final = ("policy", "reference", "critic", "reward", "gold", "generator")
"""What a group may hold: `gold` is the second judge of a stage, `generator` who samples."""
LEARNER: Final = "learner"
"""The group of all roles that no group names."""
MOST: Final = 1024
MOST_ON_CPU: Final = 64
"""Processes without a GPU share the cores of the machine; a larger number is a slip of the keyboard."""


def _auto_or_count(processes: Any) -> Any:
    is_count = isinstance(processes, int) and 1 <= processes <= MOST
    if processes != "auto" and not is_count:
        raise ValueError(f"must be auto or a whole number from 1 to {MOST:,}, found {quoted(processes)}")
    return processes


def _known_role(role: Any) -> Any:
    if role not in ROLES:
        raise ValueError(f"no role {quoted(role)}{did_you_mean(str(role), ROLES)}; the roles are {', '.join(ROLES)}")
    return role


Weights = Literal["replicate", "shard"]
"""What a process holds of a weight that several hold together: all of it, or a part."""


class RoleGroup(Section):
    """Processes that hold some roles together, and no others."""

    roles: tuple[Annotated[str, BeforeValidator(_known_role)], ...] = ()
    """What lives here: policy, reference, critic, reward, gold, generator."""
    gpus: int = Field(default=1, ge=1, le=MOST)
    """Processes of the group, each on a GPU of its own; with `device: cpu`, so many processes."""
    weights: Weights | None = None
    """As `placement.weights`, for the roles of this group; when absent, what that says."""


GroupName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$", max_length=40)]


def _none_where_empty(groups: dict[str, RoleGroup] | None) -> dict[str, RoleGroup] | None:
    """`--set placement.groups={}` goes on without the groups of a recipe."""
    return groups or None


class PlacementSettings(Section):
    """The processes that compute a run together. A resumed run may have other ones."""

    processes: Annotated[Literal["auto"] | int, BeforeValidator(_auto_or_count)] = 1
    """How many; `auto`: one for each GPU of this machine. Under torchrun and srun, those that they started."""
    weights: Weights = "replicate"
    """`replicate`: every process holds all weights, and gradients are added up. `shard`: each holds a part of every
    weight that learns, of its moments and of frozen models beside it (FSDP2). Also of groups that say nothing else."""
    shard_within: Literal["machine", "all"] = "machine"
    """Whose processes hold all parts of a weight together: those of one machine, each machine with a copy, or all."""
    timeout: float = Field(default=600, gt=0, le=7 * 24 * 3600)
    """Seconds that one process may keep the others waiting before the run ends with its name."""
    restarts: int = Field(default=3, ge=0, le=1000)
    """How many times a process that was killed leads back to the last checkpoint by itself."""

    groups: Annotated[dict[GroupName, RoleGroup] | None, AfterValidator(_none_where_empty)] = None
    """Groups of processes, each with GPUs of its own, that hold the roles of RL stages, through Ray
    (`kedge[ray]`). A role that none of them names lives in `learner`. `{}`: no groups."""

    @model_validator(mode="after")
    def _groups_hold_every_role_once(self) -> PlacementSettings:
        if self.groups is None:
            return self
        if self.processes != 1:
            raise ValueError(
                f"`processes` is {self.processes} and there are `groups`: the processes of a run are either alike or "
                "in groups; leave one out"
            )
        homes: dict[str, str] = {}
        for name, group in self.groups.items():
            for role in group.roles:
                if role in homes:
                    where = f"twice in {name}" if homes[role] == name else f"in {homes[role]} and in {name}"
                    raise ValueError(f"groups: the role {role} is {where}; leave one out")
                homes[role] = name
        homeless = [role for role in ROLES if role not in homes]
        if homeless and LEARNER not in self.groups:
            meant = did_you_mean(LEARNER, self.groups)
            raise ValueError(
                f"groups: {', '.join(homeless)} live in `{LEARNER}`, which is not among them{meant}; add "
                f"{LEARNER}: {{roles: [policy], gpus: 1}}"
            )
        for name, group in self.groups.items():
            if not (group.roles or (name == LEARNER and homeless)):
                raise ValueError(
                    f"groups: {name} holds no role, and its {group.gpus} GPU(s) would do nothing; give it some "
                    f"({', '.join(ROLES)}), or leave it out"
                )
        return self


def roles_of(placement: PlacementSettings) -> dict[str, frozenset[str]]:
    """The roles of each group; what none of them names is the learner's.

    >>> groups = {"learner": {"gpus": 4}, "critic": {"roles": ["critic"]}}
    >>> placement = PlacementSettings.model_validate({"groups": groups})
    >>> sorted(roles_of(placement)["learner"])
    ['generator', 'gold', 'policy', 'reference', 'reward']
    """
    groups = placement.groups or {}
    named = {role for group in groups.values() for role in group.roles}
    rest = frozenset(ROLES) - named
    return {name: frozenset(group.roles) | (rest if name == LEARNER else frozenset()) for name, group in groups.items()}


def weights_of(placement: PlacementSettings) -> dict[str, Weights]:
    """What the processes of each group hold of its weights.

    >>> groups = {"learner": {"gpus": 4}, "judge": {"roles": ["reward"], "weights": "replicate"}}
    >>> weights_of(PlacementSettings.model_validate({"weights": "shard", "groups": groups}))
    {'learner': 'shard', 'judge': 'replicate'}
    """
    return {name: group.weights or placement.weights for name, group in (placement.groups or {}).items()}


def num_processes(placement: PlacementSettings, *, num_gpus: int | None, num_sampling: int = 0) -> int:
    """How many processes this machine starts; `num_gpus` is None where the run computes on the CPU, and `num_sampling`
    of the GPUs sample and do not learn.

    >>> num_processes(PlacementSettings(processes="auto"), num_gpus=8)
    8
    >>> num_processes(PlacementSettings(processes="auto"), num_gpus=8, num_sampling=2)
    6
    >>> num_processes(PlacementSettings(processes="auto"), num_gpus=None)
    1
    """
    if placement.processes == "auto":
        return max((num_gpus or 1) - num_sampling, 1)
    if problem := too_many(placement.processes, num_gpus=num_gpus, num_sampling=num_sampling):
        raise ConfigError(f"placement.processes: {problem}")
    return placement.processes


def too_many(processes: int, *, num_gpus: int | None, num_sampling: int = 0) -> str | None:
    """Why this machine cannot run so many processes; None where it can."""
    if num_gpus is None:
        if processes <= MOST_ON_CPU:
            return None
        return f"{processes:,} processes on the CPU of one machine are too many; at most {MOST_ON_CPU}"
    num_learning = max(num_gpus - num_sampling, 1)
    if processes <= num_learning:
        return None
    samplers = f", of which vLLM has {num_sampling}" if num_sampling else ""
    return (
        f"{processes:,} processes need a GPU each, and torch finds {num_gpus} here{samplers}; use at most "
        f"{num_learning}, `auto`, or device: cpu"
    )
