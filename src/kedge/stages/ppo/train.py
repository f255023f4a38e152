"""PPO: rollouts as they come, four roles. The loop is `trainers/ppo.py`, all around it `rollout_training`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from kedge.core.protocols import Metrics
from kedge.core.records import Rollouts
from kedge.core.seeds import seed_for
from kedge.rollout.stream import stream
from kedge.runtime.local import LocalRuntime
from kedge.stages.ppo.settings import PPOSettings
from kedge.stages.rl.session import Session
from kedge.stages.rl.training import Learn, generator_of, train_on_rollouts
from kedge.stages.shared.context import Context
from kedge.trainers.evaluated import Judged
from kedge.trainers.loop import train as train_each
from kedge.trainers.ppo import PPORoles, iteration


def train(context: Context, settings: PPOSettings) -> Mapping[str, Path]:
    """Train, and save the policy; a resumed run goes on where it was."""
    return {"model": train_on_rollouts(context, settings, partial(_learner, settings))}


def _learner(settings: PPOSettings, session: Session) -> Learn:
    held, clock, seed = session.held, session.clock, session.context.seed
    roles = PPORoles(policy=held.policy, critic=held.critic, reference=held.reference, reward=session.reward)
    generator, cfg, runtime = generator_of(session, settings.sampling), settings.config(), LocalRuntime(clock)
    order = seed_for(seed, "minibatches")

    def step(rollouts: Rollouts, number: int) -> tuple[Judged, Metrics]:
        return iteration(rollouts, roles, cfg, session.steering, runtime, number=number, seed=order + number)

    def learn(start: int) -> None:
        batches = session.book.batches(start, settings.iterations)
        rollouts = stream(generator, batches, lag=0, seed=seed, start=start)
        train_each(clock.each(rollouts, "generate"), step, session, start=start)

    return learn
