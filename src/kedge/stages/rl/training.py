"""Learning from rollouts: a policy, a reward and prompts in; a model folder out. Here the parts meet.

What differs between PPO and its relatives without a critic, the batches and what is learnt from them, is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kedge.core.batches import Batch
from kedge.core.clock import Clock
from kedge.core.errors import RewardError
from kedge.core.loss import masked
from kedge.core.seeds import seed_for
from kedge.data.batching import item_at, padded
from kedge.data.template import stop_ids
from kedge.data.tokenizer import padding_id
from kedge.models.forward.lora import base_of
from kedge.models.loading.load import DTypeName
from kedge.models.roles.build import RoleSet, RoleSpec
from kedge.models.roles.lora import lora
from kedge.models.roles.memory import table
from kedge.models.roles.policy import Imitation
from kedge.models.roles.separate import separate
from kedge.models.roles.trunk import trunk
from kedge.rewards.build import Reward
from kedge.rewards.settings import MixSource, ModelSource, RewardSettings
from kedge.rollout.local import LocalGenerator
from kedge.rollout.settings import SamplingSettings
from kedge.stages.ppo.settings import PPOSettings
from kedge.stages.rl.judge import Judge, find_judge, judge_of, load_standing
from kedge.stages.rl.lookout import Lookout
from kedge.stages.rl.prompts import PromptDataset, read_prompts
from kedge.stages.rl.reward import decoded, open_reward
from kedge.stages.rl.session import RolloutSettings, Session
from kedge.stages.shared import loop as training
from kedge.stages.shared.context import Context
from kedge.stages.shared.encoding import encode_demonstrations
from kedge.stages.shared.interrupt import interruptible
from kedge.stages.shared.tokenizer import tokenizer_for
from kedge.trainers.controllers import KLExceeded, steering_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HOLD = {"separate": separate, "lora": lora, "trunk": trunk}


Learn = Callable[[int], None]
"""Learns from the step it is given to the last one."""


def train_on_rollouts(context: Context, settings: RolloutSettings, learner: Callable[[Session], Learn]) -> Path:
    """Train, and save the policy; a resumed run goes on where it was."""
    torch.manual_seed(context.seed)
    tokenizer = tokenizer_for(context.input("from"), context.chat_template)
    book = read_prompts(
        context.input("prompts"),
        tokenizer,
        batch=settings.batch,
        answers=settings.answers,
        max_tokens=settings.max_prompt_tokens,
        seed=context.seed,
        set_aside=context.folder / "prompts.broken.jsonl",
    )
    held = hold(context, settings, tokenizer)
    with interruptible(context.stop, context.say):
        clock = Clock(torch.cuda.synchronize if held.model.device.type == "cuda" else lambda: None)
        session = _session(context, settings, held, book, tokenizer, clock)
        _improve(session, learner(session))
    return held.save(tokenizer, context.folder / "model")


def generator_of(session: Session, sampling: SamplingSettings) -> LocalGenerator:
    """Samples with the policy's own weights."""
    settings = session.settings
    return LocalGenerator(
        base_of(session.held.model),
        sampling,
        stop_ids=stop_ids(session.tokenizer),
        pad=padding_id(session.tokenizer),
        max_rows=settings.hold.generate_rows or settings.batch * settings.answers,
        decode=session.decode,
    )


def hold(context: Context, settings: RolloutSettings, tokenizer: PreTrainedTokenizerBase) -> RoleSet:
    """The roles, with a table of what each one takes."""
    device = training.pick_device(context.device)
    source, field = _first_model(settings.reward, "reward")
    place = find_judge(context.input(field)) if field else None
    steps = settings.epochs * settings.minibatches
    dtypes: dict[str, DTypeName] = {"auto": "bfloat16" if device.startswith("cuda") else "float32"}
    wanted = RoleSpec(
        base=context.input("from"),
        reward=Path(place) if place and Path(place).is_dir() else None,
        objective=source.objective if source else None,
        critic_from_reward=isinstance(settings, PPOSettings) and settings.hold.critic_from_reward,
        device=device,
        dtype=dtypes.get(settings.hold.dtype, settings.hold.dtype),
        lora=settings.hold.lora,
        trunk_layers=settings.hold.trunk_layers,
        actor=settings.actor,
        critic=settings.critic if isinstance(settings, PPOSettings) else None,
        actor_steps=steps
        * (settings.iterations - (settings.critic_warmup if isinstance(settings, PPOSettings) else 0)),
        critic_steps=steps * settings.iterations,
        temperature=settings.sampling.temperature,
        rows=settings.micro_batch,
        recompute=settings.hold.recompute,
        compile=settings.hold.compile,
        ema=settings.ema,
        imitation=_imitation(context, settings, tokenizer),
        seed=context.seed,
    )
    held = _HOLD[settings.roles](wanted)
    for line in table(held.memory):
        context.say(f"  {line}")
    for note in held.notes:
        context.event("info", f"{settings.kind}.roles", note)
    return held


def _session(
    context: Context,
    settings: RolloutSettings,
    held: RoleSet,
    book: PromptDataset,
    tokenizer: PreTrainedTokenizerBase,
    clock: Clock,
) -> Session:
    def load(place: str) -> Judge:
        """The reward model that shares weights with the policy is not read a second time."""
        _, field = _first_model(settings.reward, "reward")
        is_shared = held.shared_judge is not None and place == context.input(field)
        if held.shared_judge is None or not is_shared:
            device = training.pick_device(context.device)
            return load_standing(place, device=device, compiled=settings.hold.compile)
        return judge_of(place, held.shared_judge.members, held.shared_judge.combine, base=base_of(held.model))

    def source(wanted: RewardSettings | str, field: str) -> Reward:
        return open_reward(
            context,
            wanted,
            field=field,
            tokenizer=tokenizer,
            cases=book.case,
            failures=settings.failures,
            device=training.pick_device(context.device),
            max_tokens=max(map(len, book.tokens)) + settings.sampling.max_new_tokens,
            load=load,
        )

    return Session(
        context=context,
        settings=settings,
        held=held,
        steering=steering_for(settings.kl),
        reward=source(settings.reward, "reward"),
        gold=source(settings.gold, "gold") if settings.gold else None,
        book=book,
        tokenizer=tokenizer,
        decode=partial(decoded, tokenizer),
        clock=clock,
        lookout=Lookout(settings.detectors, settings.kl, settings.scores),
    )


def _improve(session: Session, learn: Learn) -> None:
    """Iterations until they are done; a broken budget ends them, or begins again from the last good checkpoint."""
    start = session.begin()
    while True:
        try:
            if start < session.settings.iterations:
                learn(start)
            return _hold_last_to_budget(session)
        except KLExceeded as broken:
            start = session.answer(broken)
        except RewardError:
            session.save()  # a source that fails too often may be mended, and nothing need be done twice
            raise


def _hold_last_to_budget(session: Session) -> None:
    """The policy that is saved is measured too: on prompts that would have come next, as every one before it was."""
    settings, held, seed = session.settings, session.held, session.context.seed
    if settings.kl.limit is None:
        return
    (prompts,) = session.book.batches(settings.iterations, settings.iterations + 1)
    rollouts = generator_of(session, settings.sampling).generate(prompts, seed_for(seed, "last"))
    gap_BT = held.policy.logprobs(rollouts) - held.reference.logprobs(rollouts)
    kl = masked(gap_BT, rollouts.response_mask_BT).sum(dim=1).mean().item()
    held.forget()
    if kl > settings.kl.limit:
        raise KLExceeded(kl, settings.kl.limit)
    session.context.event("info", "kl.last", f"the last policy has a KL of {kl:.3g} nats a sequence", kl=kl)


def _first_model(settings: RewardSettings | str | None, field: str) -> tuple[ModelSource | None, str]:
    """The first reward model among the sources, and where the recipe names its place; ("" where there is none)."""
    match settings:
        case str():
            return None, field
        case ModelSource():
            return settings, f"{field}.from"
        case MixSource():
            found = (_first_model(part, f"{field}.parts.{name}") for name, part in settings.parts.items())
            return next((one for one in found if one[1]), (None, ""))
        case _:
            return None, ""


def _imitation(context: Context, settings: RolloutSettings, tokenizer: PreTrainedTokenizerBase) -> Imitation | None:
    wanted = settings.loss.imitate
    if wanted is None:
        return None
    data = encode_demonstrations(context.input("loss.imitate.data"), tokenizer, max_length=wanted.max_length)
    if data.num_too_long:
        what = f"{data.num_too_long:,} conversations to imitate are longer than {wanted.max_length} tokens: left out"
        context.event("warning", f"{settings.kind}.too_long", what)
    pad, seed = padding_id(tokenizer), seed_for(context.seed, "imitate")

    def batches(step: int) -> Sequence[Batch]:
        first = step * wanted.batch
        items = [item_at(index, len(data.sequences), seed) for index in range(first, first + wanted.batch)]
        return padded([data.sequences[item] for item in items], rows=settings.micro_batch, pad=pad)

    return Imitation(batches=batches, coef=wanted.weight)
