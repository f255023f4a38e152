"""A run on rollouts between iterations: what is written down, saved and resumed; what a broken KL budget leads to.

A checkpoint is *good* once an iteration has found the policy in it within the budget; that one is pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from kedge.core.clock import Clock
from kedge.core.errors import ContractStop, NumericsError
from kedge.core.protocols import Metrics
from kedge.core.records import Rollouts, num_rows
from kedge.models.roles.build import RoleSet
from kedge.rewards.build import Reward
from kedge.runs.state import capture_rng, load_state, restore_rng, save_state
from kedge.stages.group.settings import GroupSettings
from kedge.stages.ppo.settings import PPOSettings
from kedge.stages.rl.lookout import Lookout, peak_passed
from kedge.stages.rl.prompts import PromptDataset
from kedge.stages.rl.reward import ModelOnTokens
from kedge.stages.shared.context import Context
from kedge.stages.shared.loop import keep_bad
from kedge.trainers.controllers import KLExceeded, Steering
from kedge.trainers.evaluated import Judged
from kedge.trainers.metrics import sampled_tokens
from kedge.trainers.supervised import MAX_BAD_STEPS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GOOD = "good"

RolloutSettings = PPOSettings | GroupSettings


class Stateful(Protocol):
    def state(self) -> dict[str, Any]: ...
    def load(self, state: Mapping[str, Any]) -> None: ...


@dataclass(slots=True, kw_only=True)
class Session:
    """Implements `kedge.trainers.loop.Watch`. Numbers count iterations from 0; step n is the state after n of them."""

    context: Context
    settings: RolloutSettings
    held: RoleSet
    steering: Steering
    reward: Reward
    gold: Reward | None
    book: PromptDataset
    tokenizer: PreTrainedTokenizerBase
    decode: Callable[[Sequence[int]], str]
    clock: Clock
    lookout: Lookout
    also: dict[str, Stateful] = field(default_factory=dict[str, Stateful])
    """What else has a state that moves while a batch is drawn, by name."""
    rollbacks: int = 0
    bad: int = 0
    step: int = field(default=0, init=False)
    """How many iterations the weights have behind them."""
    told: dict[str, int] = field(default_factory=dict[str, int], init=False)
    """Answers without a score that have been spoken of, by source."""
    around: dict[str, Any] = field(default_factory=dict[str, Any], init=False)
    """Tallies, random state and `also` as they were at `step`: another batch changes them, and it may not count."""

    def begin(self) -> int:
        """The step to go on from: the newest checkpoint's, or 0, which is saved where a budget may lead back to it."""
        run = self.context.run
        latest = run.checkpoints.latest()
        if latest is None:
            if run.read_metrics() or run.read_samples():
                run.resume_at(None)
            self._done(0)
            self.save()
            return 0
        self._load(latest.checkpoint.folder)
        run.resume_at(latest.checkpoint.step)
        for reason in latest.skipped:
            run.event("warning", "checkpoint.damaged", f"left out: {reason}")
        return latest.checkpoint.step

    def learnt(self, number: int, judged: Judged, metrics: Metrics) -> None:
        step, run = number + 1, self.context.run
        self.bad = 0
        gold_B = self._gold(number, judged)
        seen = {} if gold_B is None else {"gold/mean": torch.nanmean(gold_B).item()}
        if isinstance(self.reward.source, ModelOnTokens):
            seen |= self.reward.source.facts_of(judged.scores_B)
        laps = self.clock.take()
        laps["update"] = laps["step"] - laps.get("generate", 0.0) - laps.get("judge", 0.0)
        tokens = int(judged.rollouts.attention_mask_BT.sum())
        speed = {"tokens/per_second": tokens / laps["step"]} | {f"time/{name}": value for name, value in laps.items()}
        told = {**metrics, **seen, **speed}
        self.context.tracker.log(told, step=step)
        for alarm in self.lookout.observe(step, told):
            self.context.tracker.event(alarm.as_event())
            self.context.say(f"  step {step}: {alarm.level}: {alarm.message}")
        self._tell_unscored(step)
        if step == 1 or step % self.settings.watch.every == 0 or step == self.settings.iterations:
            self._sample(step, judged, gold_B)
            self.context.say(f"  {in_words(step, self.settings.iterations, told)}")
        if number in run.checkpoints.steps():
            run.checkpoints.pin(number, _GOOD)
        self._after(step)
        if self.settings.stop.overoptimisation and gold_B is not None:
            self._stop_at_peak(step)

    def dropped(self, number: int, rollouts: Rollouts, error: NumericsError) -> None:
        """A batch that was refused: kept for study, told, and too many in a row end the run."""
        step = number + 1
        self.bad += 1
        self.clock.take()
        place = keep_bad(self.context.run, step, [rollouts])
        message = f"iteration {step}: dropped: {error}; its batch is kept in {place}"
        self.context.event("warning", "step.not_finite", message, step=step)
        if self.bad >= MAX_BAD_STEPS:
            self._done(step)
            self.save()
            raise NumericsError(f"{self.bad} iterations in a row were dropped; the last one: {error}") from error
        self._after(step)

    def answer(self, broken: KLExceeded) -> int:
        """What the recipe says to do when the budget is broken: the step to go on from, or an end with all saved."""
        kl, run = self.settings.kl, self.context.run
        evidence = {"kl": broken.kl, "limit": broken.limit, "coef": self.steering.kl.coef, "rollbacks": self.rollbacks}
        if kl.on_limit == "pause":
            self.save()
            self.context.event("fatal", "kl.limit", f"{broken}: paused", step=self.step, **evidence)
            raise ContractStop(
                f"{broken}; everything is saved as it is at step {self.step}. To go on: --resume "
                f"--set stages.{self.context.name}.kl.limit=HIGHER (or kl.on_limit=rollback)"
            )
        good, coef = run.checkpoints.pins().get(_GOOD, 0), self.steering.kl.coef
        self._load(run.checkpoints.read(good, check_hashes=True).folder)
        is_over = kl.on_limit == "stop" or self.rollbacks >= kl.max_rollbacks
        if not is_over:
            self.rollbacks += 1
            self.steering.kl.coef = max(self.steering.kl.coef, coef) * kl.rollback_factor
            run.resume_at(good)
            what = f"{broken}: back to step {good} with the coefficient {self.steering.kl.coef:.3g}, it was {coef:.3g}"
            self.context.event("warning", "kl.rollback", what, step=good, **evidence)
            self.save()
            return good
        self.held.save(self.tokenizer, self.context.folder / "model")
        self.context.event("fatal", "kl.limit", f"{broken}: stopped", step=good, **evidence)
        spent = f" after {self.rollbacks} rollbacks" if self.rollbacks else ""
        raise ContractStop(
            f"{broken}{spent}. The policy of step {good}, the last one found within the budget, is in "
            f"{self.context.folder / 'model'}. Raise kl.limit or kl.start, or lower actor.lr, and start a new run"
        )

    def _stop_at_peak(self, step: int) -> None:
        found = peak_passed(self.context.run.read_metrics())
        if found is None:
            return
        self.save()
        self.held.save(self.tokenizer, self.context.folder / "model")
        low, high = found.peak_kl_interval
        what = f"the gold score has its predicted peak at a KL of {found.peak_kl:.3g} nats ({low:.3g} to {high:.3g})"
        self.context.event("fatal", "overoptimisation.peak", what, step=step, kl=found.kl)
        raise ContractStop(
            f"{what}, and the run is at {found.kl:.3g}: more of this reward would make the answers worse. The policy "
            f"is in {self.context.folder / 'model'}. To go on all the same: --resume "
            f"--set stages.{self.context.name}.stop.overoptimisation=false"
        )

    def save(self) -> None:
        """Everything as it was at `step`."""
        state = {
            "step": self.step,
            "held": self.held.state(),
            "steering": self.steering.state(),
            "rollbacks": self.rollbacks,
            "bad": self.bad,
            **self.around,
        }
        self.context.run.save_checkpoint(self.step, lambda folder: save_state(folder, state))

    def _load(self, folder: Path) -> None:
        state = load_state(folder)
        self.held.load(state["held"])
        self.steering.load(state["steering"])
        sources = (self.reward, self.gold) if self.gold else (self.reward,)
        for source, tallies in zip(sources, state["tallies"], strict=True):
            for tally, found in zip(source.tallies, tallies, strict=True):
                tally.load(found)
        for name, part in self.also.items():
            part.load(state["also"][name])
        self.lookout.load(state["lookout"])
        self.rollbacks, self.bad = max(self.rollbacks, state["rollbacks"]), state["bad"]
        self.told = {tally.source: tally.report().failed for tally in self.reward.tallies}
        restore_rng(state["rng"])
        self._done(state["step"])

    def _done(self, step: int) -> None:
        sources = (self.reward, self.gold) if self.gold else (self.reward,)
        tallies = [[tally.state() for tally in source.tallies] for source in sources]
        also = {name: part.state() for name, part in self.also.items()}
        self.step, self.around = (
            step,
            {
                "tallies": tallies,
                "rng": capture_rng(),
                "also": also,
                "lookout": self.lookout.state(),
            },
        )

    def _after(self, step: int) -> None:
        self._done(step)
        self.held.forget()
        is_last = step == self.settings.iterations
        if is_last or self.context.stop.is_asked or step % self.settings.checkpoints.every == 0:
            self.save()
        if self.context.stop.is_asked and not is_last:
            self.context.event("info", "run.interrupted", f"stopped at step {step}, which is saved", step=step)
            raise KeyboardInterrupt

    def _gold(self, number: int, judged: Judged) -> Tensor | None:
        step = number + 1
        is_due = number % self.settings.watch.gold_every == 0 or step == self.settings.iterations
        return self.gold.score(judged.rollouts) if self.gold and is_due else None

    def _tell_unscored(self, step: int) -> None:
        for tally in self.reward.tallies:
            report = tally.report(top=3)
            if report.failed > self.told.get(report.source, 0):
                reasons = "; ".join(f"{reason} ({count}x)" for reason, count in report.reasons.items())
                what = f"{report.failed:,} of {report.rows:,} answers have no score so far"
                self.context.event("warning", "reward.unscored", f"{report.source}: {what}: {reasons}", step=step)
                self.told[report.source] = report.failed

    def _sample(self, step: int, judged: Judged, gold_B: Tensor | None) -> None:
        rollouts = judged.rollouts
        answers = sampled_tokens(rollouts)
        for row in range(min(self.settings.watch.samples, num_rows(rollouts))):
            group = int(rollouts.group_B[row])
            prompt = self.book.tokens[self.book.item(group)]
            record = {
                "number": row,
                "prompt": self.decode(list(prompt)),
                "answer": self.decode(answers[row]),
                "reward": judged.scores_B[row].item(),
                "kl": judged.kl_B[row].item(),
                "length": len(answers[row]),
                "finished": bool(rollouts.finished_B[row]),
                "gold": None if gold_B is None else gold_B[row].item(),
            }
            self.context.run.sample(record, step)


def in_words(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """One iteration as a line.

    >>> in_words(20, 100, {"reward/mean": 1.256, "kl/mean": 3.0, "length/mean": 41.0, "entropy/mean": 0.5,
    ...     "policy/clip_fraction": 0.04, "tokens/per_second": 1500.0, "time/step": 3.0})
    'step 20/100: reward 1.26, KL 3, length 41, entropy 0.5, clipped 0.04, 1,500 tokens/s, 4 min left'
    """
    names = {"reward": "reward/mean", "gold": "gold/mean", "KL": "kl/mean", "length": "length/mean"}
    names |= {"entropy": "entropy/mean", "clipped": "policy/clip_fraction"}
    parts = [f"{word} {metrics[name]:.3g}" for word, name in names.items() if name in metrics]
    minutes = (total - step) * metrics["time/step"] / 60
    speed = f"{metrics['tokens/per_second']:,.0f} tokens/s, {minutes:,.0f} min left"
    return f"step {step}/{total}: {', '.join(parts)}, {speed}"
