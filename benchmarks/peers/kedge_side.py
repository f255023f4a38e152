"""Kedge's side of the case: generate, judge, update, as the ppo stage does it, timed by phase.

Afterwards, outside of the timing: the log-probs of generator and trainer against each other and against float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kedge.core.optimiser import OptimiserSettings
from kedge.core.protocols import Phase, RewardSource
from kedge.core.records import Prompts, Rollouts, repeated, take
from kedge.models.forward.heads import language_model
from kedge.models.reward.ensemble import load_reward
from kedge.models.reward.reward_model import RewardModel, reward_role
from kedge.models.roles.actor_critic import RoleSet
from kedge.models.roles.build import RoleSpec
from kedge.models.roles.lora import lora
from kedge.models.roles.separate import separate
from kedge.models.roles.trunk import trunk
from kedge.models.settings import LoraSettings
from kedge.rewards.failures import FailureCounter, FailureSettings
from kedge.rewards.model import OnTokens, Scorer
from kedge.rewards.settings import ModelSource
from kedge.rollout.local import LocalGenerator
from kedge.rollout.settings import SamplingSettings
from kedge.trainers.ppo import PPORoles, iteration
from kedge.trainers.settings import PolicyLossSettings, PPOConfig
from kedge.trainers.shared import RewardShaper, kl_controller
from peers.case import LORA, PAD, TRUNK, Case, Measured, Stopwatch, case_from_arguments, peak_gib, print_result

BUILD_ROLES = {"separate": separate, "lora": lora, "trunk": trunk}
CHECKED_ROWS = 16
"""Rows whose log-probs are computed in float32 too."""


def main() -> None:
    case = case_from_arguments()
    role_set = BUILD_ROLES[case.roles](role_spec(case))
    update = Update(case, role_set)
    for number in range(case.updates):
        update(number)
    laps, tokens = update.stopwatch.laps[1:], update.tokens[1:]
    peak, lengths = peak_gib(case.device), update.rollouts.response_mask_BT.sum(1).tolist()
    print_result(
        Measured(
            laps=laps,
            tokens=tokens,
            peak_gib=peak,
            new_lengths=lengths,
            costs=profiled(case, partial(update, 0)) if case.profile else (),
            gaps=gaps(role_set, update.generate(0)) if case.roles != "lora" else {},
        )
    )


class Update:
    """Runs updates one after the other, and times the phases of each."""

    def __init__(self, case: Case, role_set: RoleSet, *, reward: RewardSource | None = None) -> None:
        """Without a `reward`, the reward model of the case scores."""
        self._case, self._role_set = case, role_set
        self._prompts = case.prompts()
        sampling = SamplingSettings(max_new_tokens=case.new_tokens)
        self.generator: Any = LocalGenerator(
            role_set.model, sampling, stop_ids=case.stop_ids(), pad=PAD, max_rows=case.rows
        )
        self._cfg = PPOConfig(
            policy=PolicyLossSettings(old_logprobs=case.old_logprobs),
            epochs=case.epochs,
            minibatches=case.minibatches,
            max_new_tokens=case.new_tokens,
        )
        self.roles = PPORoles(
            policy=role_set.policy,
            critic=role_set.critic,
            reference=role_set.reference,
            reward=reward or reward_of(case, role_set),
        )
        self._kl, self._shaper = kl_controller(self._cfg.kl), RewardShaper()
        self.tokens: list[int] = []
        self.stopwatch = Stopwatch(case.device)

    def generate(self, number: int) -> Rollouts:
        return self.generator.generate(self._prompts_of(number), seed=number)

    def __call__(self, number: int) -> None:
        self.rollouts = self.generate(number)
        self.stopwatch.close("generate")
        iteration(self.rollouts, self.roles, self._cfg, self._kl, self._shaper, self, number=number, seed=number)
        self._role_set.forget()
        self.stopwatch.close("update")
        self.stopwatch.end()
        self.tokens.append(int(self.rollouts.attention_mask_BT.sum()))

    def gather(self, *calls: Callable[[], Any], phase: Phase = "judge") -> list[Any]:
        """The runtime of the iteration: one process, and the calls that judge are a phase."""
        results = [call() for call in calls]
        if phase == "judge":
            self.stopwatch.close(phase)
        return results

    def _prompts_of(self, number: int) -> Prompts:
        rows = self._case.rows
        return repeated(self._prompts[number * rows : (number + 1) * rows], ids=range(rows), answers=1)


def reward_of(case: Case, role_set: RoleSet) -> OnTokens:
    """On the policy's weights where they are shared, else a model of its own."""
    folder = Path(case.home) / TRUNK
    scorer: Scorer = role_set.shared_judge.members[0] if role_set.shared_judge else own_reward(case, folder)
    source = ModelSource.model_validate({"kind": "model", "from": str(folder), "rows": 4 * case.micro_batch})
    return OnTokens(scorer, source, FailureCounter("reward", FailureSettings()))


def own_reward(case: Case, folder: Path) -> Scorer:
    model = load_reward(folder, dtype=case.dtype, device=case.device)
    assert isinstance(model, RewardModel)
    return reward_role(model, compiled=case.compile)


def role_spec(case: Case) -> RoleSpec:
    # TRL's rate and constant schedule; what is learnt does not change the work.
    optimiser = OptimiserSettings(lr=1e-6, eps=1e-5, schedule="constant", warmup=0.0)
    steps = case.epochs * case.minibatches * (case.updates + 1)
    return RoleSpec(
        base=str(Path(case.home) / "policy"),
        reward=Path(case.home) / (LORA if case.roles == "lora" else TRUNK),
        objective=None,
        critic_from_reward=True,
        device=case.device,
        dtype=case.dtype,
        lora=LoraSettings(),
        trunk_layers=case.trunk_layers,
        actor=optimiser,
        critic=optimiser,
        actor_steps=steps,
        critic_steps=steps,
        temperature=1.0,
        rows=case.micro_batch,
        recompute=False,
        ema=None,
        imitation=None,
        seed=0,
        compile=case.compile,
    )


def gaps(role_set: RoleSet, rollouts: Rollouts) -> dict[str, float]:
    """Mean and largest difference of log-probs in nats, on response tokens: between generator and trainer on all rows,
    and of each of them from a float32 copy of the policy on the first rows."""
    trainer_BT = role_set.policy.logprobs(rollouts)
    between = _distance("between", rollouts.behaviour_logp_BT - trainer_BT, rollouts)
    first_rows = torch.arange(min(CHECKED_ROWS, len(trainer_BT)), device=trainer_BT.device)
    part = take(rollouts, first_rows)
    exact_BT = float32_logprobs(role_set.model, part)
    generator = _distance("generator", part.behaviour_logp_BT - exact_BT, part)
    return between | generator | _distance("trainer", trainer_BT[first_rows] - exact_BT, part)


@torch.no_grad()
def float32_logprobs(model: Any, rollouts: Rollouts) -> Tensor:
    wide = language_model(copy.deepcopy(model).float())
    with wide.active():
        rows = [
            wide.logprobs(row.tokens_BT, row.attention_mask_BT.cpu(), row.response_mask_BT.cpu())
            for row in (take(rollouts, slice(index, index + 1)) for index in range(len(rollouts.tokens_BT)))
        ]
    return torch.cat(rows)


def _distance(name: str, gap_BT: Tensor, rollouts: Rollouts) -> dict[str, float]:
    gap_N = gap_BT[rollouts.response_mask_BT].abs()
    return {f"{name}_mean": gap_N.mean().item(), f"{name}_max": gap_N.max().item()}


def profiled(case: Case, work: Callable[[], None]) -> list[tuple[str, int, float]]:
    """Kernels of one update by their own time on the GPU, or operators by their own time on the CPU."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = case.device == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        work()
    events: list[Any] = list(profiler.key_averages())
    if on_gpu:
        events = [event for event in events if event.device_type.name == "CUDA"]
    own_time = (lambda event: event.self_device_time_total) if on_gpu else (lambda event: event.self_cpu_time_total)
    largest = sorted(events, key=own_time, reverse=True)[: case.profile]
    return [
        ("all together", sum(event.count for event in events), sum(map(own_time, events)) / 1e6),
        *((event.key, event.count, own_time(event) / 1e6) for event in largest),
    ]


if __name__ == "__main__":
    main()
