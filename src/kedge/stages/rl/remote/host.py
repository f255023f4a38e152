"""The driver's `RoleHost`: each role is asked in the group that it lives in, through the same protocols.

Nothing of the roles is in this process but what they answer. Shape letters: B sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kedge.core.errors import KedgeError
from kedge.core.optimiser import Per
from kedge.core.protocols import CriticRole, Generator, Metrics, PolicyLoss, Runtime, ValueLoss
from kedge.core.records import Experience, Prompts, Rollouts, ValueTargets
from kedge.models.roles.actor_critic import NoCritic, refuse_other_reference
from kedge.rewards.failures import FailureCounter, Reward
from kedge.rollout.settings import SamplingSettings
from kedge.runtime.groups import Call, Group, Groups, ThreadedRuntime
from kedge.runtime.local import Clock
from kedge.stages.rl.remote.worker import About, StageOrder, make_parts
from kedge.stages.rl.roles import CriticSpec, tell_roles
from kedge.stages.rl.settings import RLSettings
from kedge.stages.shared.context import Context


class RolesInGroups:
    """Opens the groups that hold a role of the stage; those that are there already go on as they are."""

    def __init__(self, context: Context, settings: RLSettings, critic: CriticSpec | None, *, groups: Groups) -> None:
        self._context, self._settings, self._all = context, settings, groups
        roles = {"policy", "reference", "generator", "reward"}
        roles |= ({"critic"} if critic else set[str]()) | ({"gold"} if settings.gold else set[str]())
        homes = {role: layout.name for layout in groups.layout.values() for role in layout.roles & roles}
        names = [name for name in groups.layout if name in homes.values()]
        self._groups = groups.open(names, make_parts, order_of(context, settings, critic), context.folder / "stacks")
        self._home = {role: self._groups[name] for role, name in homes.items()}
        about = {name: cast(About, group.ask("stage", "about")) for name, group in self._groups.items()}
        self._tell(about)
        self.policy = RemotePolicy(self._home["policy"])
        self.critic: CriticRole = RemoteCritic(self._home["critic"]) if critic else NoCritic()
        self.reference = RemoteReference(self._home["reference"])
        self.reward = self._reward("reward", about)
        self.gold = self._reward("gold", about) if settings.gold else None
        self.speaker = RemoteSpeaker(self._home["policy"])
        self.device = torch.device("cpu")
        self.precision = str(about[homes["policy"]].precision)
        self._reference_hash = str(about[homes["reference"]].reference_hash)
        self._max_mismatch = about[homes["generator"]].max_mismatch

    def generator(self, sampling: SamplingSettings) -> RemoteGenerator:
        home = self._home["generator"]
        return RemoteGenerator(home, sampling, max_mismatch=self._max_mismatch, has_policy=home is self._home["policy"])

    def publish(self, generator: Generator, *, version: int) -> None:
        generator.load_weights(self.policy.weights(), version)

    def clock(self) -> Clock:
        return Clock()

    def runtime(self, clock: Clock) -> Runtime:
        return ThreadedRuntime(clock, self.tell_notes)

    def idle(self, seconds: float) -> Metrics:
        """The share of an iteration in which a group had nothing to do."""
        self.tell_notes()
        busy = {name: group.take_busy() for name, group in self._groups.items()}
        return {f"idle/{name}": max(0.0, 1 - worked / seconds) for name, worked in busy.items()}

    def save_policy(self) -> Path:
        folder = self._home["policy"].ask("stage", "save_policy")
        self.tell_notes()
        return Path(folder)

    def forget(self) -> None:
        _wait_all([group.submit("stage", "forget") for group in self._groups.values()])

    def state(self) -> dict[str, Any]:
        policy = self._home["policy"].submit("policy", "state")
        critic = self._home["critic"].submit("critic", "state") if "critic" in self._home else None
        _wait_all([call for call in (policy, critic) if call is not None])
        return {
            "policy": policy.result(),
            "critic": critic.result() if critic else {},
            "reference": self._reference_hash,
        }

    def parts(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        refuse_other_reference(state["reference"], self._reference_hash)
        loading = [self._home["policy"].submit("policy", "load", state["policy"])]
        if "critic" in self._home:
            loading.append(self._home["critic"].submit("critic", "load", state["critic"]))
        _wait_all(loading)

    def tell_notes(self) -> None:
        """Write the events of workers into the run."""
        for note in self._all.taken_notes():
            self._context.event(note.level, note.code, note.message, **note.evidence)

    def _tell(self, about: Mapping[str, About]) -> None:
        for name, facts in about.items():
            layout = self._all.layout[name]
            roles = ", ".join(sorted(role for role, home in self._home.items() if home is self._groups[name]))
            self._context.say(f"  group {name}: {layout.size} process(es), {roles}")
            if facts.memory:
                tell_roles(self._context, self._settings, facts.memory, facts.remarks)
        self.tell_notes()

    def _reward(self, name: str, about: Mapping[str, About]) -> Reward:
        home = self._home[name]
        names = about[home.name].counters[name]
        counters = tuple(FailureCounter(source, self._settings.failures) for source in names)
        return Reward(source=RemoteReward(home, name, counters), failure_counters=counters)


def order_of(context: Context, settings: RLSettings, critic: CriticSpec | None) -> StageOrder:
    """What workers build their parts from, with paths that hold in any working folder."""

    def absolute(source: str) -> str:
        return str(Path(source).absolute()) if Path(source).exists() else source

    return StageOrder(
        name=context.name,
        seed=context.seed,
        settings=settings,
        critic=critic,
        chat_template=absolute(context.chat_template) if context.chat_template else None,
        recipe_folder=context.recipe_folder.absolute(),
        folder=context.folder.absolute(),
        round=context.round,
        sources={field: [absolute(source) for source in sources] for field, sources in context.sources.items()},
    )


def _wait_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call.wait()


class RemoteReference:
    def __init__(self, group: Group) -> None:
        self._group = group

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        return self._group.ask("reference", "logprobs", rollouts)


class RemotePolicy:
    def __init__(self, group: Group) -> None:
        self._group = group

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        return self._group.ask("policy", "logprobs", rollouts)

    def update(self, experience: Experience, loss: PolicyLoss, *, per: Per) -> Metrics:
        return self._group.ask("policy", "update", experience, loss, per=per)

    def weights(self) -> RemoteWeights:
        return RemoteWeights(self._group)


class RemoteCritic:
    def __init__(self, group: Group) -> None:
        self._group = group

    def values(self, rollouts: Rollouts) -> Tensor:
        return self._group.ask("critic", "values", rollouts)

    def update(self, targets: ValueTargets, loss: ValueLoss, *, per: Per) -> Metrics:
        return self._group.ask("critic", "update", targets, loss, per=per)


class RemoteWeights(Mapping[str, Tensor]):
    """The weights of a policy as they are when they are first needed; another group gets them without the driver."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._tensors: Mapping[str, Tensor] | None = None

    def handle(self) -> Any:
        call = self._group.submit("policy", "weights")
        call.wait()
        return call.handle

    def __getitem__(self, name: str) -> Tensor:
        return self._here()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._here())

    def __len__(self) -> int:
        return len(self._here())

    def _here(self) -> Mapping[str, Tensor]:
        if self._tensors is None:
            self._tensors = cast("Mapping[str, Tensor]", self._group.ask("policy", "weights"))
        return self._tensors


class RemoteReward:
    def __init__(self, group: Group, part: str, counters: Sequence[FailureCounter]) -> None:
        self._group, self._part, self._counters = group, part, counters

    def score(self, rollouts: Rollouts) -> Tensor:
        scores_B, counted = self._group.ask(
            self._part, "score", rollouts, [counter.state() for counter in self._counters]
        )
        for counter, state in zip(self._counters, counted, strict=True):
            counter.load(state)
        return scores_B

    def trust_metrics(self, scores_B: Tensor) -> dict[str, float]:
        return self._group.ask(self._part, "trust_metrics", scores_B)


class RemoteGenerator:
    """Batches and weights are served in the order in which they were submitted."""

    def __init__(
        self, group: Group, sampling: SamplingSettings, *, max_mismatch: float | None, has_policy: bool
    ) -> None:
        """`has_policy`: the policy lives in the same group, and its weights need not be sent."""
        self._group, self._sampling, self._has_policy = group, sampling, has_policy
        self.max_mismatch = max_mismatch

    def submit(self, prompts: Prompts, seed: int) -> Future[Rollouts]:
        return self._group.future(self._group.submit("generator", "generate", prompts, seed, self._sampling))

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        if self._has_policy:
            self._group.ask("generator", "load_own", version)
        else:
            sent = cast(RemoteWeights, weights).handle()
            self._group.submit("generator", "load_sent", version, carried=sent).wait()

    def close(self) -> None:
        if not self._group.is_over:
            with suppress(KedgeError):  # whoever closes may do so because the group is lost
                self._group.ask("generator", "close")


class RemoteSpeaker:
    def __init__(self, group: Group) -> None:
        self._group = group

    def ask(self, questions: Sequence[Any]) -> list[Any]:
        return self._group.ask("speaker", "ask", list(questions))

    def write(self, prompts: Sequence[Any], sampling: SamplingSettings, answers: int) -> Rollouts:
        return self._group.ask("speaker", "write", list(prompts), sampling, answers)
