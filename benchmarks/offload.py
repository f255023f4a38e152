"""What `memory.offload` saves and costs: peak memory and seconds a step with and without each word, for full SFT and
for PPO with `roles: separate`, and whether every number is the same to the last bit.

Random weights of a real shape on a GPU, the same rows for all, each case in a process of its own. Peaks are those of
the allocator, of the start (loading, first step) and of the steps after it. Without a GPU a tiny shape runs: the moves
are made within the host's memory, numbers are compared, and there is no peak to tell. With `--bits` also PPO with
frozen roles of so many bits (bitsandbytes), whose numbers are not meant to be the same.

    python benchmarks/offload.py [--shape 0.5b --rows 128 --prompt-tokens 128 --new-tokens 256 --steps 6 --bits 8 4]
    python benchmarks/offload.py --shape tiny        # anywhere
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kedge.core.batches import Batch
from kedge.core.optimiser import OptimiserSettings
from kedge.core.records import Rollouts
from kedge.models.forward.heads import language_model
from kedge.models.forward.host_memory import MovedWeights
from kedge.models.loading.hashing import module_hash
from kedge.models.loading.load import dtype_for
from kedge.models.loading.start import start_causal
from kedge.models.reward.ensemble import load_reward
from kedge.models.reward.reward_model import RewardModel, reward_role
from kedge.models.roles.separate import separate
from kedge.models.settings import BaseBits, TrainingMemory
from kedge.models.training.learner import Learner
from kedge.models.training.objectives import imitation
from kedge.models.training.passes import Passes
from kedge.models.training.train_step import trained_weights
from kedge.rewards.failures import FailureCounter, FailureSettings
from kedge.rewards.model import OnTokens
from kedge.rewards.settings import ModelSource
from kedge.trainers.ppo import iteration
from kedge.trainers.settings import PPOConfig
from kedge.trainers.shared import RewardShaper, kl_controller
from peers.case import SHAPES, TRUNK, Case, write_models
from peers.kedge_side import Update, role_spec

WAYS = {
    "sft": ((), (), ("optimiser",)),
    "ppo": ((), (), ("optimiser",), ("reference",), ("reward",), ("optimiser", "reference", "reward")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """One case: what is moved, and the work."""

    stage: str
    offload: tuple[str, ...]
    case: Case
    bits: BaseBits = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    start_gib: float
    steps_gib: float
    seconds: list[float]
    numbers: list[dict[str, float]]
    """All metrics of each step."""
    weights: str
    """Hash of the weights at the end."""


def main() -> None:
    args = parse()
    if args.child:
        run_child(json.loads(args.child))
        return
    with tempfile.TemporaryDirectory() as home:
        case = Case(
            home=home,
            shape=args.shape,
            rows=args.rows,
            prompt_tokens=args.prompt_tokens,
            new_tokens=args.new_tokens,
            is_unequal=False,
            epochs=1,
            minibatches=4,
            updates=args.steps,
            micro_batch=args.micro_batch,
            compile=torch.cuda.is_available(),
        )
        write_models(Path(home), case.shape, case.dtype)
        print(
            f"{case.shape}, {case.dtype}, {case.rows} rows of {case.prompt_tokens} + {case.new_tokens} tokens, "
            f"{case.micro_batch} at once, {args.steps} steps; torch {torch.__version__}\n"
            f"{'':36} {'peak GiB':>9} {'of steps':>9} {'s a step':>9}  numbers",
            flush=True,
        )
        for stage in args.stages:
            compare(stage, case, args.bits)


def compare(stage: str, case: Case, bits: list[BaseBits]) -> None:
    plain: Result | None = None
    for offload in WAYS[stage]:
        result = measure(Moves(stage=stage, offload=offload, case=case))
        plain = plain or result
        show(
            f"{stage} {', '.join(offload) or 'nothing moved'}", result, "–" if result is plain else equal(result, plain)
        )
    for count in bits if stage == "ppo" else ():
        result = measure(Moves(stage=stage, offload=(), case=case, bits=count))
        show(f"{stage} frozen_bits {count}", result, f"kl/mean at step 1: {result.numbers[0]['kl/mean']:.4f}")


def equal(result: Result, plain: Result) -> str:
    """Whether metrics of every step and the last weights are those of the case without moves; where they are not, the
    metric that differs first, and how much. On a GPU that is to be read beside the case that runs twice."""
    for step, (ours, theirs) in enumerate(zip(result.numbers, plain.numbers, strict=True), 1):
        if different := [name for name in theirs if repr(ours[name]) != repr(theirs[name])]:
            name = different[0]
            share = abs(ours[name] - theirs[name]) / max(abs(theirs[name]), 1e-30)
            return f"differ at step {step}: {name} by {share:.1e} of {theirs[name]:.6g}"
    return "equal to the bit" if result.weights == plain.weights else "differ: the last weights"


def show(name: str, result: Result, numbers: str) -> None:
    seconds = statistics.median(result.seconds[1:])
    print(f"{name:36} {result.start_gib:>9.2f} {result.steps_gib:>9.2f} {seconds:>9.3f}  {numbers}", flush=True)


def measure(moves: Moves) -> Result:
    """In a process of its own, which finds the memory empty."""
    child = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(asdict(moves))],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    if child.returncode:
        raise SystemExit(f"{moves.stage} {moves.offload} failed:\n{child.stderr[-3000:]}")
    return Result(**json.loads(child.stdout.splitlines()[-1]))


def run_child(fields: dict[str, Any]) -> None:
    moves = Moves(
        stage=fields["stage"], offload=tuple(fields["offload"]), case=Case(**fields["case"]), bits=fields["bits"]
    )
    step, weights = {"sft": sft, "ppo": ppo}[moves.stage](moves)
    seconds, numbers, peaks = list[float](), list[dict[str, float]](), list[float]()
    for number in range(moves.case.updates):
        start = time.perf_counter()
        numbers.append(step(number))
        synchronise()
        seconds.append(time.perf_counter() - start)
        peaks.append(peak_and_reset())
    result = Result(start_gib=max(peaks), steps_gib=max(peaks[1:]), seconds=seconds, numbers=numbers, weights=weights())
    print(f"\n{json.dumps(asdict(result))}")


def sft(moves: Moves) -> tuple[Callable[[int], dict[str, float]], Callable[[], str]]:
    """Full training; a step over all rows."""
    case, on_host = moves.case, "optimiser" in moves.offload
    torch.manual_seed(0)
    memory = TrainingMemory(dtype=case.dtype)
    model = start_causal(str(Path(case.home) / "policy"), lora=None, device=case.device, seed=0, memory=memory)
    trained = trained_weights(model, dtype=dtype_for("auto", case.device), on_host=on_host)
    policy = language_model(model, compiled=case.compile)
    settings = OptimiserSettings(lr=1e-5)
    passes = Passes(case.micro_batch)
    learner = Learner(trained, policy.backbone, imitation(policy), settings, total_steps=case.updates, passes=passes)
    width = case.prompt_tokens + case.new_tokens
    shape = (case.micro_batch, width)
    batches = [
        Batch(
            tokens_BT=torch.randint(0, SHAPES[case.shape]["vocab_size"], shape),
            attention_mask_BT=torch.ones(shape, dtype=torch.bool),
            counted_BT=torch.arange(width).expand(shape) >= case.prompt_tokens,
        )
        for _ in range(case.rows // case.micro_batch)
    ]
    return lambda _: learner.update(lambda _: batches), lambda: module_hash(model)


def ppo(moves: Moves) -> tuple[Callable[[int], dict[str, float]], Callable[[], str]]:
    """Four models; a step is an iteration, generation included."""
    case = moves.case
    torch.manual_seed(0)
    spec = replace(role_spec(case), offload=frozenset(moves.offload), frozen_bits=moves.bits)
    role_set = separate(spec)
    update = Update(replace(case, roles="separate"), role_set, reward=Reward(moves))
    cfg = PPOConfig(epochs=case.epochs, minibatches=case.minibatches, max_new_tokens=case.new_tokens)
    kl, shaper = kl_controller(cfg.kl), RewardShaper()

    def step(number: int) -> dict[str, float]:
        rollouts = update.generate(number)
        _, metrics = iteration(rollouts, update.roles, cfg, kl, shaper, update, number=number, seed=number)
        return dict(metrics)

    return step, lambda: module_hash(role_set.model)


class Reward:
    """A reward model of its own, which is moved where the case says so."""

    def __init__(self, moves: Moves) -> None:
        case, folder = moves.case, Path(moves.case.home) / TRUNK
        model = load_reward(folder, dtype=case.dtype, device=case.device, bits=moves.bits)
        assert isinstance(model, RewardModel)
        role = reward_role(model, compiled=case.compile)
        source = ModelSource.model_validate({"kind": "model", "from": str(folder), "rows": 4 * case.micro_batch})
        self._source = OnTokens(role, source, FailureCounter("reward", FailureSettings()))
        self._moved = MovedWeights([model.model]) if "reward" in moves.offload else None

    def score(self, rollouts: Rollouts) -> torch.Tensor:
        if self._moved is None:
            return self._source.score(rollouts)
        with self._moved.turn():
            return self._source.score(rollouts)


def peak_and_reset() -> float:
    if not torch.cuda.is_available():
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return peak


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def parse() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.5b" if on_gpu else "tiny")
    parser.add_argument("--stages", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rows", type=int, default=128 if on_gpu else 16)
    parser.add_argument("--prompt-tokens", type=int, default=128 if on_gpu else 16)
    parser.add_argument("--new-tokens", type=int, default=256 if on_gpu else 16)
    parser.add_argument("--micro-batch", type=int, default=8 if on_gpu else 4)
    parser.add_argument("--steps", type=int, default=6 if on_gpu else 3)
    parser.add_argument("--bits", nargs="*", type=int, choices=(8, 4), default=[], help="also frozen roles of so many")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
