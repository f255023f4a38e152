"""What is written of each iteration of an RL run: metrics, alarms of detectors, samples, unscored answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from kedge.core.errors import RewardError
from kedge.core.files import hash_json
from kedge.core.protocols import Metrics
from kedge.core.records import Rollouts, num_rows
from kedge.monitor.detectors import CATALOGUE, Watchdog
from kedge.rewards.failures import Reward, refuse_never_scored
from kedge.runtime.local import Clock, TimedReward
from kedge.stages.rl.looks import Looks
from kedge.stages.rl.prompts import PromptDataset
from kedge.stages.rl.reward import TrustedSource, decoded, report_unscored
from kedge.stages.rl.settings import RLSettings, num_iterations
from kedge.stages.shared.context import Context
from kedge.trainers.shared import EvaluatedRollouts, correlation, sampled_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PHASES: Final = ("generate", "judge", "gold_score", "save", "sync", "exam")
"""Laps of an iteration that are not inside of each other: answers, scores and log-probs, scores of the gold source, the
checkpoint of the iteration before, weights for the generator, and a look at the policy."""


@dataclass(slots=True, kw_only=True)
class IterationJournal:
    """The state of the detectors is part of a checkpoint: a resumed run raises the same alarms."""

    context: Context
    settings: RLSettings
    reward: Reward
    gold: Reward | None
    prompts: PromptDataset
    tokenizer: PreTrainedTokenizerBase
    clock: Clock
    precision: str
    """The type that the policy computes in."""
    looks: Looks | None = None
    idle: Callable[[float], Metrics] | None = None
    """From the seconds of an iteration to what else is measured of where roles live."""
    iterations: int = field(init=False)
    """Of the whole run."""
    detectors: Watchdog = field(init=False)
    last_prompts: frozenset[str] = field(default=frozenset(), init=False)
    """Hashes of the prompts of the iteration before."""
    num_unscored: dict[str, int] = field(default_factory=dict[str, int], init=False)
    """Answers without a score that were reported, by source."""

    def __post_init__(self) -> None:
        kl, self.iterations = self.settings.kl, num_iterations(self.settings)
        # `reward/std` is of raw scores: normalised ones have a spread of about 1, whatever it says.
        score_std = None if self.settings.scores.normalise == "none" else 1.0
        self.detectors = Watchdog(
            CATALOGUE,
            self.settings.detectors,
            kl_target=kl.target,
            kl_limit=kl.limit,
            score_std=score_std,
            precision=self.precision,
        )

    @property
    def sources(self) -> tuple[Reward, ...]:
        return (self.reward, self.gold) if self.gold else (self.reward,)

    def write(self, number: int, evaluated: EvaluatedRollouts, metrics: Metrics) -> tuple[bool, RewardError | None]:
        """Write iteration `number`. Gives whether the gold source scored it, and why the run cannot go on with that
        source, for after the iteration is saved: the policy has learnt from it already."""
        step, every, iterations = number + 1, self.settings.logging.every, self.iterations
        gold_B, gold_error = self._gold_scores(number, evaluated)
        looked = self._look(step)
        record = {
            **metrics,
            **self._reward_metrics(evaluated, gold_B),
            **self.prompt_metrics(evaluated.rollouts),
            **self._speed(evaluated.rollouts),
            **looked,
        }
        self.context.tracker.log(record, step=step)
        for alarm in self.detectors.observe(step, record):
            self.context.tracker.event(alarm.as_event())
            self.context.say(f"  step {step}: {alarm.level}: {alarm.message}")
        counters = [counter for source in self.sources for counter in source.failure_counters]
        self.num_unscored = report_unscored(self.context, counters, reported=self.num_unscored, step=step)
        if step == 1 or step % every == 0 or step == iterations:
            self._write_samples(step, evaluated, gold_B)
            self.context.say(f"  {progress_line(step, iterations, record)}")
        return gold_B is not None, gold_error

    def mend_start(self, step: int) -> None:
        """The look that all later ones are compared with, where the run ended in it and goes on from there."""
        if step == 0 and self.looks is not None and not self.looks.has_start():
            self.write_look(0)

    def write_look(self, step: int) -> None:
        """The look at a step without an iteration of its own, where one is due."""
        if looked := self._look(step):
            self.context.tracker.log({**looked, "time/exam": self.clock.take().get("exam", 0.0)}, step=step)

    def _look(self, step: int) -> dict[str, float]:
        if self.looks is None or step not in self.looks.steps:
            return {}
        with self.clock.lap("exam"):
            return self.looks.take(step)

    def state(self) -> dict[str, Any]:
        return {"detectors": self.detectors.state(), "last_prompts": sorted(self.last_prompts)}

    def load(self, state: Mapping[str, Any], *, step: int) -> None:
        """`state` was that after so many iterations."""
        if self.looks is not None:
            self.looks.forget_after(step)
        self.detectors.load(state["detectors"])
        self.last_prompts = frozenset(state["last_prompts"])
        counters = [counter for source in self.sources for counter in source.failure_counters]
        self.num_unscored = {counter.source: counter.report().failed for counter in counters}

    def _gold_scores(self, number: int, evaluated: EvaluatedRollouts) -> tuple[Tensor | None, RewardError | None]:
        is_due = number % self.settings.logging.gold_every == 0 or number + 1 == self.iterations
        if not self.gold or not is_due:
            return None, None
        try:
            gold_B = TimedReward(self.gold, self.clock, "gold").score(evaluated.rollouts)
            refuse_never_scored(self.gold.failure_counters)
        except RewardError as error:
            return None, error
        return gold_B, None

    def _reward_metrics(self, evaluated: EvaluatedRollouts, gold_B: Tensor | None) -> dict[str, float]:
        metrics = {} if gold_B is None else gold_metrics(evaluated.scores_B, gold_B)
        if isinstance(self.reward.source, TrustedSource):
            metrics |= self.reward.source.trust_metrics(evaluated.scores_B)
        return metrics

    def prompt_metrics(self, rollouts: Rollouts) -> dict[str, float]:
        """The share of the prompts that the iteration before asked too, by their tokens. Fewer prompts than two batches
        cannot but repeat, and are not measured."""
        prompts, before = prompt_hashes(rollouts), self.last_prompts
        self.last_prompts = prompts
        if len(self.prompts.prompts) < 2 * self.prompts.batch:
            return {}
        return {"prompts/repeated": len(prompts & before) / len(prompts)}

    def _speed(self, rollouts: Rollouts) -> dict[str, float]:
        """Seconds by phase, and in each phase by role; what is no other phase is the update."""
        laps = self.clock.take()
        laps["update"] = laps["step"] - sum(laps.get(phase, 0.0) for phase in _PHASES)
        tokens = int(rollouts.attention_mask_BT.sum())
        return {
            "tokens/per_second": tokens / (laps["step"] - laps.get("exam", 0.0)),
            **{f"time/{name}": value for name, value in laps.items()},
            **(self.idle(laps["step"]) if self.idle else {}),
        }

    def _write_samples(self, step: int, evaluated: EvaluatedRollouts, gold_B: Tensor | None) -> None:
        rollouts = evaluated.rollouts
        answers = sampled_tokens(rollouts)
        for row in range(min(self.settings.logging.samples, num_rows(rollouts))):
            prompt = self.prompts.tokens[self.prompts.item(int(rollouts.group_B[row]))]
            sample = {
                "number": row,
                "prompt": decoded(self.tokenizer, prompt),
                "answer": decoded(self.tokenizer, answers[row]),
                "reward": evaluated.scores_B[row].item(),
                "kl": evaluated.kl_B[row].item(),
                "length": len(answers[row]),
                "finished": bool(rollouts.finished_B[row]),
                "gold": None if gold_B is None else gold_B[row].item(),
            }
            self.context.run.sample(sample, step)


def gold_metrics(scores_B: Tensor, gold_B: Tensor) -> dict[str, float]:
    """The mean of the gold scores, and how far they go with the scores that are learnt from."""
    metrics = {"gold/mean": torch.nanmean(gold_B).item()}
    gold_B = gold_B.to(scores_B.device)
    known_B = gold_B.isfinite()
    if int(known_B.sum()) > 1:
        metrics["reward/gold_correlation"] = correlation(scores_B[known_B], gold_B[known_B])
    return metrics


def prompt_hashes(rollouts: Rollouts) -> frozenset[str]:
    """A hash of the tokens of each prompt that was asked."""
    prompt_BT = rollouts.attention_mask_BT & ~rollouts.response_mask_BT
    rows = zip(rollouts.tokens_BT.tolist(), prompt_BT.tolist(), strict=True)
    prompts = {tuple(token for token, counts in zip(tokens, mask, strict=True) if counts) for tokens, mask in rows}
    return frozenset(hash_json(prompt)[:16] for prompt in prompts)


def progress_line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """One iteration as a line.

    >>> progress_line(20, 100, {"reward/mean": 1.256, "kl/mean": 3.0, "length/mean": 41.0, "entropy/mean": 0.5,
    ...     "policy/clip_fraction": 0.04, "tokens/per_second": 1500.0, "time/step": 3.0})
    'step 20/100: reward 1.26, KL 3, length 41, entropy 0.5, clipped 0.04, 1,500 tokens/s, 4 min left'
    """
    names = {"reward": "reward/mean", "gold": "gold/mean", "KL": "kl/mean", "length": "length/mean"}
    names |= {"entropy": "entropy/mean", "clipped": "policy/clip_fraction"}
    parts = [f"{word} {metrics[name]:.3g}" for word, name in names.items() if name in metrics]
    minutes = (total - step) * metrics["time/step"] / 60
    speed = f"{metrics['tokens/per_second']:,.0f} tokens/s, {minutes:,.0f} min left"
    return f"step {step}/{total}: {', '.join(parts)}, {speed}"
