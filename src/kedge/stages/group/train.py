"""RL without a critic: answers scored as they are drawn. The loop is `trainers/group.py`, all around it
`rollout_training`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from kedge.core.protocols import Metrics
from kedge.core.seeds import seed_for
from kedge.runtime.local import LocalRuntime
from kedge.stages.group.dynamic_sampling import Drawing
from kedge.stages.group.settings import GroupSettings
from kedge.stages.rl.session import Session
from kedge.stages.rl.training import Learn, generator_of, train_on_rollouts
from kedge.stages.shared.context import Context
from kedge.trainers.evaluated import Judged, Scored
from kedge.trainers.group import GroupRoles, iteration
from kedge.trainers.group_settings import TRAITS
from kedge.trainers.loop import train as train_each


def train(context: Context, settings: GroupSettings) -> Mapping[str, Path]:
    """Train, and save the policy; a resumed run goes on where it was."""
    return {"model": train_on_rollouts(context, settings, partial(_learner, settings))}


def _learner(settings: GroupSettings, session: Session) -> Learn:
    roles = GroupRoles(policy=session.held.policy, reference=session.held.reference)
    cfg, runtime, order = settings.config(), LocalRuntime(session.clock), seed_for(session.context.seed, "minibatches")
    likeliest = settings.sampling.model_copy(update={"top_k": 1})
    drawing = Drawing(
        session.book,
        generator_of(session, settings.sampling),
        session.reward,
        greedy=generator_of(session, likeliest) if TRAITS[settings.method.kind].needs_greedy else None,
        max_rounds=settings.max_rounds,
        seed=session.context.seed,
        clock=session.clock,
    )
    session.also["drawing"] = drawing

    def step(scored: Scored, number: int) -> tuple[Judged, Metrics]:
        return iteration(scored, roles, cfg, session.steering, runtime, seed=order + number)

    def learn(start: int) -> None:
        train_each(drawing.batches(start, settings.iterations), step, session, start=start)

    return learn
