"""An RL run around its iterations: rollouts, journal, detectors, checkpoints, and what follows on a broken KL budget.

A checkpoint is *good* once an iteration has measured its policy within the KL budget; the newest good one is pinned.
Numbers count iterations from 0; step n is the state after n of them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kedge.core.errors import ContractStop, GeneratorError, MisledError, NumericsError, RewardError
from kedge.core.loss import masked
from kedge.core.protocols import Generator as AnswerGenerator
from kedge.core.protocols import Metrics
from kedge.core.records import Rollouts
from kedge.core.seeds import seed_for
from kedge.monitor.overoptimisation import passed_peak
from kedge.rewards.failures import Reward, refuse_never_scored
from kedge.rollout.generators import close_generator, max_mismatch, with_sampling
from kedge.rollout.settings import SamplingSettings, lag_of
from kedge.runs.state import capture_rng, load_state, restore_rng
from kedge.runtime.local import Clock
from kedge.stages.rl.divergence import rounding
from kedge.stages.rl.generator import refuse_other_weights
from kedge.stages.rl.host import RoleHost, RolesHere
from kedge.stages.rl.journal import IterationJournal
from kedge.stages.rl.looks import open_looks
from kedge.stages.rl.prompts import (
    PromptDataset,
    RolloutStream,
    UnderWay,
    batches_of,
    report_long_prompts,
    run_prompts,
    state_of,
)
from kedge.stages.rl.remote.host import RolesInGroups
from kedge.stages.rl.roles import CriticSpec
from kedge.stages.rl.settings import RLSettings, is_always_new, num_iterations
from kedge.stages.shared.context import Context
from kedge.stages.shared.interrupt import interruptible
from kedge.stages.shared.loop import keep_bad, save_checkpoint
from kedge.stages.shared.policy import tell_offload
from kedge.stages.shared.tokenizer import tokenizer_for
from kedge.trainers.correction import AllDropped
from kedge.trainers.shared import EvaluatedRollouts, KLController, KLExceeded, RewardShaper, kl_controller
from kedge.trainers.supervised import MAX_BAD_STEPS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GOOD = "good"


class Stateful(Protocol):
    def state(self) -> dict[str, Any]: ...
    def load(self, state: Mapping[str, Any]) -> None: ...


@contextmanager
def open_rl_run(context: Context, settings: RLSettings, *, critic: CriticSpec | None = None) -> Generator[RLRun]:
    """Prompts, roles, reward and generator of a run. Ctrl-C ends it after the iteration that is under way."""
    torch.manual_seed(context.seed)
    tokenizer = tokenizer_for(context.input("from"), context.chat_template)
    prompts = run_prompts(
        context,
        settings,
        tokenizer,
        set_aside=context.set_aside("prompts.broken.jsonl"),
        report=partial(report_long_prompts, context, settings.too_long),
    )
    tell_offload(context, settings.memory)
    roles: RoleHost = (
        RolesHere(context, settings, prompts, tokenizer, critic)
        if context.groups is None
        else RolesInGroups(context, settings, critic, groups=context.groups)
    )
    with interruptible(context.stop, context.say):
        run = RLRun(
            context=context,
            settings=settings,
            roles=roles,
            kl=kl_controller(settings.kl),
            shaper=RewardShaper(),
            reward=roles.reward,
            gold=roles.gold,
            prompts=prompts,
            tokenizer=tokenizer,
            clock=roles.clock(),
        )
        try:
            yield run
        except (RewardError, GeneratorError) as error:
            if not isinstance(error, MisledError):
                run.save()  # what fails may be mended, and nothing need be done twice
            raise
        finally:
            close_generator(run.generator)


@dataclass(slots=True, kw_only=True)
class RLRun:
    """What PPO and the critic-free methods have in common around an iteration."""

    context: Context
    settings: RLSettings
    roles: RoleHost
    kl: KLController
    shaper: RewardShaper
    reward: Reward
    gold: Reward | None
    prompts: PromptDataset
    tokenizer: PreTrainedTokenizerBase
    clock: Clock
    generator: AnswerGenerator = field(init=False)
    max_mismatch: float | None = field(init=False)
    """`policy/mismatch` above which the generator has other weights than the policy."""
    stream: RolloutStream = field(init=False)
    """Rollouts of the iterations by their numbers, sampled ahead where the generator has a lag."""
    journal: IterationJournal = field(init=False)
    stateful: dict[str, Stateful] = field(default_factory=dict[str, Stateful])
    """What else changes while a batch is sampled, by its name in a checkpoint."""
    iterations: int = field(init=False)
    """How many there are in all."""
    is_always_new: bool = field(init=False)
    """Whether all answers are of the policy as it is."""
    step: int = field(default=0, init=False)
    """How many iterations the weights have behind them."""
    rollbacks: int = field(default=0, init=False)
    num_bad: int = field(default=0, init=False)
    """Iterations in a row that were dropped."""
    published: int | None = field(default=None, init=False)
    """The step whose weights the generator has."""
    state_at_step: dict[str, Any] = field(default_factory=dict[str, Any], init=False)
    """Failure counts, random state, journal and `stateful` as they were at `step`: sampling the next batch changes
    them, and a checkpoint must not hold half of an iteration."""
    under_way_at_step: UnderWay = field(default=(), init=False)
    """The batches that were under way at `step`: a checkpoint waits for them."""

    def __post_init__(self) -> None:
        self.iterations, self.is_always_new = num_iterations(self.settings), is_always_new(self.settings)
        self.journal = IterationJournal(
            context=self.context,
            settings=self.settings,
            reward=self.reward,
            gold=self.gold,
            prompts=self.prompts,
            tokenizer=self.tokenizer,
            clock=self.clock,
            precision=self.roles.precision,
            looks=open_looks(self.context, self.settings, self.roles.speaker, self.tokenizer),
            idle=self.roles.idle,
        )
        self.generator = self.roles.generator(self.settings.sampling)  # last: it may start what has to be ended
        self.max_mismatch = max_mismatch(self.generator)
        self.stream = RolloutStream(
            self.generator,
            self.prompts.prompts_in,
            lag=lag_of(self.settings.generator),
            seed=self.context.seed,
            end=self.iterations,
        )

    def sibling_generator(self, sampling: SamplingSettings) -> AnswerGenerator:
        """A generator with the weights of the run's own that samples in another way."""
        return with_sampling(self.generator, sampling) or self.roles.generator(sampling)

    # The iterations

    def rollouts(self) -> Iterator[tuple[int, Rollouts]]:
        """Number and rollouts of each iteration, from where the run was, or where a rollback led back to."""
        for number in self.numbers():
            with self.clock.lap("generate"):
                rollouts = self.stream.take(number)
            yield number, rollouts

    def numbers(self) -> Iterator[int]:
        """The number of the next iteration, until all are done and the last policy is within the KL budget too."""
        self._resume()
        while self.step < self.iterations or not self._last_policy_is_within_budget():
            with self.clock.lap("sync"):
                self._publish_weights()
            yield self.step

    def age(self, number: int, rollouts: Rollouts) -> int | None:
        """How many versions older than the policy of iteration `number` the one is that sampled; None where it is
        always the same one."""
        return None if self.is_always_new else number - rollouts.version

    def tell_rounding(self, number: int, rollouts: Rollouts) -> None:
        """Before anything is learnt: how far a reference of 8 or 4 bits is from the policy that it is the start of."""
        bits = self.settings.memory.frozen_bits
        if number or bits == 16:
            return
        gap, kl = rounding(self.roles.policy, self.roles.reference, rollouts)
        message = (
            f"the reference has {bits} bits a weight: on the first answers its log-probs are {gap:.3g} nats a token "
            f"off those of the policy that it was, and kl/mean begins at {kl:.3g} instead of 0"
        )
        self.context.event("info", "reference.rounded", message, bits=bits, gap=gap, kl=kl)

    def finish(self, number: int, evaluated: EvaluatedRollouts, metrics: Metrics) -> None:
        """After an iteration: journal, detectors, samples, checkpoint; and whether it was the last one for now."""
        step, run = number + 1, self.context.run
        self.num_bad = 0
        has_gold, gold_error = self.journal.write(number, evaluated, metrics)
        if self.max_mismatch is not None:
            refuse_other_weights(metrics, self.max_mismatch)
        if number in run.checkpoints.steps():
            run.checkpoints.pin(number, _GOOD)
        self._end_step(step)
        if gold_error is not None:
            raise gold_error
        if self.settings.stop.overoptimisation and has_gold:
            self._stop_at_peak(step)

    def drop(self, number: int, rollouts: Rollouts, error: NumericsError) -> None:
        """A batch with numbers that are not finite: kept for study and reported; too many in a row end the run.

        A reward source that has not scored a single answer so far ends it at once, before anything is lost.
        """
        refuse_never_scored(self.reward.failure_counters)
        place = self.context.once(lambda: keep_bad(self.context.run, number + 1, [rollouts]))
        self._end_without_learning(number, "step.not_finite", f"dropped: {error}; its batch is kept in {place}", error)

    def skip(self, number: int, error: AllDropped) -> None:
        """A batch of which no answer is near enough to the policy: reported; too many in a row end the run."""
        self._end_without_learning(number, "step.all_dropped", f"skipped: {error}", error)

    def _end_without_learning(self, number: int, code: str, what: str, error: NumericsError | AllDropped) -> None:
        step = number + 1
        self.num_bad += 1
        self.clock.take()
        self.context.event("warning", code, f"iteration {step}: {what}", step=step)
        self.journal.write_look(step)
        # Batches under way were sampled before: those behind them are of the policy as it now stays.
        if self.num_bad >= MAX_BAD_STEPS + lag_of(self.settings.generator):
            self._note_state(step)
            self.save()
            raise type(error)(f"{self.num_bad} iterations in a row were dropped; the last one: {error}") from error
        self._end_step(step)

    def exceed_budget(self, exceeded: KLExceeded) -> None:
        """What the recipe says to do when the KL budget is broken: go back to the last good checkpoint with a larger
        coefficient, or end the run with everything saved."""
        kl, run = self.settings.kl, self.context.run
        evidence = {"kl": exceeded.kl, "limit": exceeded.limit, "coef": self.kl.coef, "rollbacks": self.rollbacks}
        if kl.on_limit == "pause":
            self.save()
            self.context.event("fatal", "kl.limit", f"{exceeded}: paused", step=self.step, **evidence)
            raise ContractStop(
                f"{exceeded}; everything is saved as it is at step {self.step}. To go on: --resume "
                f"--set stages.{self.context.name}.kl.limit=HIGHER (or kl.on_limit=rollback)"
            )
        good, coef = run.checkpoints.pins().get(_GOOD, 0), self.kl.coef
        self._load(run.checkpoints.read(good, check_hashes=True).folder)
        if kl.on_limit == "rollback" and self.rollbacks < kl.max_rollbacks:
            self.rollbacks += 1
            self.kl.coef = max(self.kl.coef, coef) * kl.rollback_factor
            run.resume_at(good)
            what = f"{exceeded}: back to step {good} with the coefficient {self.kl.coef:.3g}, it was {coef:.3g}"
            self.context.event("warning", "kl.rollback", what, step=good, **evidence)
            self.save()
            return
        place = self.save_policy()
        self.context.event("fatal", "kl.limit", f"{exceeded}: stopped", step=good, **evidence)
        spent = f" after {self.rollbacks} rollbacks" if self.rollbacks else ""
        raise ContractStop(
            f"{exceeded}{spent}. The policy of step {good}, the last one found within the budget, is in "
            f"{place}. Raise kl.limit or kl.start, or lower actor.lr, and start a new run"
        )

    def save_policy(self) -> Path:
        return self.roles.save_policy()

    # Checkpoints

    def save(self) -> None:
        """A checkpoint of everything as it was at `step`."""
        state = {
            "step": self.step,
            "roles": self.roles.state(),
            "kl": self.kl.state(),
            "shaper": self.shaper.state(),
            "rollbacks": self.rollbacks,
            "num_bad": self.num_bad,
            "under_way": state_of(self.under_way_at_step),
            **self.state_at_step,
        }
        save_checkpoint(self.context, self.step, state)

    def _resume(self) -> None:
        """Take up the newest checkpoint; else save step 0, to which a broken budget may lead back."""
        run = self.context.run
        latest = run.checkpoints.latest()
        if latest is None:
            if run.read_metrics() or run.read_samples():
                run.resume_at(None)
            self._note_state(0)
            self.journal.write_look(0)
            self.save()
            return
        self._load(latest.checkpoint.folder)
        run.resume_at(latest.checkpoint.step)
        for reason in latest.skipped:
            run.event("warning", "checkpoint.damaged", f"left out: {reason}")
        self.journal.mend_start(self.step)

    def _load(self, folder: Path) -> None:
        state = load_state(folder, like={"roles": self.roles.parts()})
        self.published = None
        self.roles.load(state["roles"])
        self.kl.load(state["kl"])
        self.shaper.load(state["shaper"])
        for source, counts in zip(self.journal.sources, state["failures"], strict=True):
            for counter, count in zip(source.failure_counters, counts, strict=True):
                counter.load(count)
        for name, part in self.stateful.items():
            part.load(state["stateful"][name])
        self.rollbacks, self.num_bad = max(self.rollbacks, state["rollbacks"]), state["num_bad"]
        self.journal.load(state["journal"], step=state["step"])
        restore_rng(state["rng"])
        self.stream.replace(batches_of(state.get("under_way", ()), self.roles.device))
        self._note_state(state["step"])

    def _note_state(self, step: int) -> None:
        self.step = step
        self.under_way_at_step = self.stream.under_way
        self.state_at_step = {
            "failures": [[counter.state() for counter in source.failure_counters] for source in self.journal.sources],
            "rng": capture_rng(),
            "stateful": {name: part.state() for name, part in self.stateful.items()},
            "journal": self.journal.state(),
        }

    def _end_step(self, step: int) -> None:
        self._note_state(step)
        self.roles.forget()
        is_last, is_asked = step == self.iterations, self.context.stop.is_asked
        if is_last or is_asked or step % self.settings.checkpoints.every == 0:
            with self.clock.lap("save"):
                self.save()
        if is_asked and not is_last:
            self.context.event("info", "run.interrupted", f"stopped at step {step}, which is saved", step=step)
            raise KeyboardInterrupt

    def _publish_weights(self) -> None:
        """The generator samples with the weights as they are now; rollouts carry their version."""
        if self.published != self.step:
            self.roles.publish(self.generator, version=self.step)
            self.published = self.step

    # Ends

    def _last_policy_is_within_budget(self) -> bool:
        """The policy that is saved is measured too, on the prompts that would have come next; over the limit, what the
        recipe says about a broken budget happens."""
        limit = self.settings.kl.limit
        if limit is None:
            return True
        self._publish_weights()
        prompts = self.prompts.prompts_in(self.iterations)
        rollouts = self.generator.submit(prompts, seed_for(self.context.seed, "last")).result()
        gap_BT = self.roles.policy.logprobs(rollouts) - self.roles.reference.logprobs(rollouts)
        kl = masked(gap_BT, rollouts.response_mask_BT).sum(dim=1).mean().item()
        self.roles.forget()
        if kl > limit:
            self.exceed_budget(KLExceeded(kl, limit))
            return False
        self.context.event("info", "kl.last", f"the last policy has a KL of {kl:.3g} nats a sequence", kl=kl)
        return True

    def _stop_at_peak(self, step: int) -> None:
        """End the run where the gold score is at or past its predicted peak, or has fallen from one."""
        peak = passed_peak(self.context.run.read_metrics())
        if peak is None:
            return
        self.save()
        place = self.save_policy()
        low, high = peak.kl_interval
        how = "has its predicted peak" if peak.is_predicted else "has fallen; it was best"
        what = f"the gold score {how} at a KL of {peak.kl:.3g} nats ({low:.3g} to {high:.3g})"
        self.context.event("fatal", "overoptimisation.peak", what, step=step, kl=peak.kl_now)
        raise ContractStop(
            f"{what}, and the run is at {peak.kl_now:.3g}: more of this reward would make the answers worse. The "
            f"policy is in {place}. To go on all the same: --resume "
            f"--set stages.{self.context.name}.stop.overoptimisation=false"
        )
