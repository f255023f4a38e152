"""RL without a critic: sample groups of answers, score them, update the policy. One iteration: `trainers.group`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kedge.core.errors import NumericsError
from kedge.core.seeds import seed_for
from kedge.rollout.settings import lag_of
from kedge.runtime.local import TimedPolicy, TimedReference, TimedReward
from kedge.stages.group.dynamic_sampling import GroupSampler
from kedge.stages.group.settings import GroupSettings
from kedge.stages.rl.remote.restarts import with_restarts
from kedge.stages.rl.run import open_rl_run
from kedge.stages.shared.context import Context
from kedge.trainers.correction import AllDropped
from kedge.trainers.group import GroupRoles, iteration
from kedge.trainers.shared import KLExceeded


def train(context: Context, settings: GroupSettings) -> Mapping[str, Path]:
    """Train, and save the policy; a resumed run goes on where it was."""
    return with_restarts(context, lambda: _train(context, settings))


def _train(context: Context, settings: GroupSettings) -> Mapping[str, Path]:
    with open_rl_run(context, settings) as run:
        roles = GroupRoles(
            policy=TimedPolicy(run.roles.policy, run.clock), reference=TimedReference(run.roles.reference, run.clock)
        )
        cfg, runtime, seed = settings.config(), run.roles.runtime(run.clock), seed_for(context.seed, "minibatches")
        greedy = settings.sampling.model_copy(update={"top_k": 1})
        sampler = GroupSampler(
            run.prompts,
            run.generator,
            TimedReward(run.reward, run.clock),
            greedy=run.sibling_generator(greedy) if cfg.method.traits.needs_greedy else None,
            max_rounds=settings.max_rounds,
            seed=context.seed,
            clock=run.clock,
            ahead=run.stream if lag_of(settings.generator) else None,
        )
        run.stateful["sampler"] = sampler
        for number in run.numbers():  # a broken KL budget may lead back to an earlier number
            scored = sampler.sample(number)
            run.tell_rounding(number, scored.rollouts)
            try:
                evaluated, metrics = iteration(
                    scored,
                    roles,
                    cfg,
                    run.kl,
                    run.shaper,
                    runtime,
                    seed=seed + number,
                    age=run.age(number, scored.rollouts),
                )
            except KLExceeded as exceeded:
                run.exceed_budget(exceeded)
            except AllDropped as error:
                run.skip(number, error)
            except NumericsError as error:
                run.drop(number, scored.rollouts, error)
            else:
                run.finish(number, evaluated, metrics)
        return {"model": run.save_policy()}
