"""RL without a critic: answers scored as they are drawn. The loop is `trainers/group.py`, all around it
`rollout_training`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from kedge.core.protocols import Metrics
from kedge.core.seeds import seed_for
from kedge.pipeline.context import Context
from kedge.pipeline.group_drawing import Drawing
from kedge.pipeline.rollout_session import Session
from kedge.pipeline.rollout_training import Learn, generator_of, train_on_rollouts
from kedge.pipeline.stages.group import GroupSettings
from kedge.runtime.local import LocalRuntime
from kedge.trainers.group import GroupRoles, iteration
from kedge.trainers.group_settings import TRAITS
from kedge.trainers.judging import Judged, Scored
from kedge.trainers.loop import train


def train_group(context: Context, settings: GroupSettings) -> Path:
    """Train, and save the policy; a resumed run goes on where it was."""
    return train_on_rollouts(context, settings, partial(_learner, settings))


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
        train(drawing.batches(start, settings.iterations), step, session, start=start)

    return learn
