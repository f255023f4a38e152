"""From a recipe to the roles of an RL run: which models they start from, how they learn, what memory they take, and the
reward source that stands beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.core import plugins
from kedge.core.batches import Batch
from kedge.core.errors import ConfigError
from kedge.core.optimiser import OptimiserSettings
from kedge.core.seeds import item_at, seed_for
from kedge.data.tokenizer import padding_id
from kedge.models.roles.actor_critic import Imitation, RoleSet
from kedge.models.roles.build import RoleSpec
from kedge.models.roles.memory import RoleMemory, table
from kedge.models.training.passes import Cut
from kedge.rewards.failures import Reward
from kedge.rewards.settings import MixSource, ModelSource, RewardSourceSettings
from kedge.stages.rl.judge import Judge, find_judge, judge_of, load_standing, moved
from kedge.stages.rl.prompts import PromptDataset, fields_of
from kedge.stages.rl.reward import open_reward
from kedge.stages.rl.settings import ImitationSettings, RLSettings, num_iterations
from kedge.stages.shared.context import Context
from kedge.stages.shared.device import pick_device
from kedge.stages.shared.encoding import encode_demonstrations
from kedge.stages.shared.loop import batches_of
from kedge.stages.shared.policy import refuse_sharded_offload, tell_sharding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSpec:
    """How the critic of an actor-critic method learns."""

    optimiser: OptimiserSettings
    from_reward: bool
    """It starts from the reward model where there is one, else from the policy."""
    warmup: int
    """Iterations at the beginning in which it learns alone."""


def build_roles(
    context: Context, settings: RLSettings, tokenizer: PreTrainedTokenizerBase, critic: CriticSpec | None
) -> RoleSet:
    """The roles, held as `settings.roles` says; says what memory each takes."""
    spec = role_spec(context, settings, tokenizer, critic)
    roles: RoleSet = plugins.find("roles", settings.roles)(spec)
    if context.world.mesh is not None:
        tell_sharding(context, roles.model, compiled=spec.compile)
    tell_roles(context, settings, roles.memory, roles.notes)
    return roles


def role_spec(
    context: Context, settings: RLSettings, tokenizer: PreTrainedTokenizerBase, critic: CriticSpec | None
) -> RoleSpec:
    """What the roles of a stage are built from."""
    device = pick_device(context.device)
    refuse_sharded_offload(context, settings.memory)
    source, field = first_reward_model(settings.reward, "reward")
    reward = find_judge(context.input(field)) if field else None
    steps, iterations = settings.epochs * settings.minibatches, num_iterations(settings)
    return RoleSpec(
        base=context.input("from"),
        reward=Path(reward) if reward and Path(reward).is_dir() else None,
        objective=source.objective if source else None,
        critic_from_reward=critic is not None and critic.from_reward,
        device=device,
        dtype=settings.memory.dtype,
        lora=settings.memory.lora,
        trunk_layers=settings.memory.trunk_layers,
        actor=settings.actor,
        critic=critic.optimiser if critic else None,
        actor_steps=steps * (iterations - (critic.warmup if critic else 0)),
        critic_steps=steps * iterations,
        temperature=settings.sampling.temperature,
        rows=settings.micro_batch,
        report=context.event,
        world=context.world,
        recompute=settings.memory.recompute,
        compile=settings.memory.compiles_on(device),
        offload=settings.memory.offloads_on(device),
        frozen_bits=settings.memory.frozen_bits,
        ema=settings.ema,
        imitation=_imitation(context, settings, settings.loss.imitate, tokenizer) if settings.loss.imitate else None,
        seed=context.seed,
    )


def tell_roles(context: Context, settings: RLSettings, memory: Sequence[RoleMemory], notes: Iterable[str]) -> None:
    """Say what memory the roles take, and what a user should know about them."""
    for line in table(memory):
        context.say(f"  {line}")
    for note in notes:
        context.event("info", f"{settings.kind}.roles", note)


def first_reward_model(settings: RewardSourceSettings | str | None, field: str) -> tuple[ModelSource | None, str]:
    """The first reward model among the sources, and the input field that names it ("" where there is none)."""
    match settings:
        case str():
            return None, field
        case ModelSource():
            return settings, f"{field}.from"
        case MixSource():
            parts = (first_reward_model(part, f"{field}.parts.{name}") for name, part in settings.parts.items())
            return next((part for part in parts if part[1]), (None, ""))
        case _:
            return None, ""


def _imitation(
    context: Context, settings: RLSettings, imitate: ImitationSettings, tokenizer: PreTrainedTokenizerBase
) -> Imitation:
    """The PTX mix: which conversations stand beside an optimiser step depends on its number alone."""
    data = encode_demonstrations(context.input("loss.imitate.data"), tokenizer, max_length=imitate.max_length)
    if data.num_too_long:
        what = f"{data.num_too_long:,} conversations to imitate are longer than {imitate.max_length} tokens: left out"
        context.event("warning", f"{settings.kind}.too_long", what)
    pad, seed = padding_id(tokenizer), seed_for(context.seed, "imitate")

    def batches(step: int) -> Cut[Batch]:
        first = step * imitate.batch
        items = [item_at(index, len(data.sequences), seed) for index in range(first, first + imitate.batch)]
        sequences = [data.sequences[item] for item in items]
        return batches_of(sequences, pad)

    return Imitation(batches=batches, coef=imitate.weight)


def open_run_reward(
    context: Context,
    settings: RLSettings,
    prompts: PromptDataset,
    tokenizer: PreTrainedTokenizerBase,
    source: RewardSourceSettings | str,
    field: str,
    *,
    roles: RoleSet | None = None,
) -> Reward:
    """The source behind `reward` or `gold` of an RL run; it may share weights with the policy of `roles`."""
    device = pick_device(context.device)

    def load(place: str, *, unread: bool) -> Judge:
        """A reward model that shares weights with the policy is not read a second time."""
        _, shared_field = first_reward_model(settings.reward, "reward")
        shared = roles.shared_judge if roles else None
        is_moved = "reward" in settings.memory.offloads_on(device)
        if roles is None or shared is None or place != context.input(shared_field):
            compiled, bits = settings.memory.compiles_on(device), settings.memory.frozen_bits
            judge = load_standing(place, device=device, compiled=compiled, unread=unread, bits=bits)
            return moved(judge) if is_moved else judge
        if is_moved:
            raise ConfigError(
                f"stages.{context.name}.memory.offload has reward, and {place} shares the weights of the policy: it "
                "has none of its own to move; leave reward out"
            )
        return judge_of(place, shared.members, shared.combine, base=roles.model)

    return open_reward(
        context,
        source,
        field=field,
        tokenizer=tokenizer,
        cases=prompts.case,
        fields=fields_of(prompts.prompts),
        failures=settings.failures,
        device=device,
        max_tokens=max(map(len, prompts.tokens)) + settings.sampling.max_new_tokens,
        load=load,
    )
