"""PPO: sample answers, evaluate them, update critic and policy. One iteration: `trainers.ppo`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kedge.core.errors import NumericsError
from kedge.core.seeds import seed_for
from kedge.runtime.local import TimedCritic, TimedPolicy, TimedReference, TimedReward
from kedge.stages.ppo.settings import PPOSettings
from kedge.stages.rl.remote.restarts import with_restarts
from kedge.stages.rl.roles import CriticSpec
from kedge.stages.rl.run import open_rl_run
from kedge.stages.shared.context import Context
from kedge.trainers.correction import AllDropped
from kedge.trainers.ppo import PPORoles, iteration
from kedge.trainers.shared import KLExceeded


def train(context: Context, settings: PPOSettings) -> Mapping[str, Path]:
    """Train, and save the policy; a resumed run goes on where it was."""
    return with_restarts(context, lambda: _train(context, settings))


def _train(context: Context, settings: PPOSettings) -> Mapping[str, Path]:
    critic = CriticSpec(
        optimiser=settings.critic, from_reward=settings.memory.critic_from_reward, warmup=settings.critic_warmup
    )
    with open_rl_run(context, settings, critic=critic) as run:
        roles = PPORoles(
            policy=TimedPolicy(run.roles.policy, run.clock),
            critic=TimedCritic(run.roles.critic, run.clock),
            reference=TimedReference(run.roles.reference, run.clock),
            reward=TimedReward(run.reward, run.clock),
        )
        cfg, runtime, seed = settings.config(), run.roles.runtime(run.clock), seed_for(context.seed, "minibatches")
        for number, rollouts in run.rollouts():  # a broken KL budget may lead back to an earlier number
            run.tell_rounding(number, rollouts)
            try:
                evaluated, metrics = iteration(
                    rollouts,
                    roles,
                    cfg,
                    run.kl,
                    run.shaper,
                    runtime,
                    number=number,
                    seed=seed + number,
                    age=run.age(number, rollouts),
                )
            except KLExceeded as exceeded:
                run.exceed_budget(exceeded)
            except AllDropped as error:
                run.skip(number, error)
            except NumericsError as error:
                run.drop(number, rollouts, error)
            else:
                run.finish(number, evaluated, metrics)
        return {"model": run.save_policy()}
