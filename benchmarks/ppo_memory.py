"""Peak GPU memory of full SFT and of PPO with its roles held separate, as lora and on a trunk, at one shape.

    python benchmarks/ppo_memory.py [--layers 24 --prompts 128 --prompt-tokens 128 --new-tokens 256 --micro-batch 8]

Random weights of the Qwen2.5-0.5B shape, the same rows and lengths for all. Each case is a process of its own and runs
one whole update; the table is relative to full SFT. Without a GPU it runs a small shape and prints no memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from kedge.core.batches import Batch
from kedge.core.clock import Clock
from kedge.core.optimiser import OptimiserSettings
from kedge.core.records import Rollouts
from kedge.models.adapters import base_of
from kedge.models.ensemble import lora_members
from kedge.models.learner import Learner
from kedge.models.objectives import imitation
from kedge.models.reward_files import build, save
from kedge.models.roles.hold import Held, Wanted
from kedge.models.roles.lora import lora
from kedge.models.roles.separate import separate
from kedge.models.roles.trunk import trunk
from kedge.models.settings import LoraSettings
from kedge.models.start import start_causal
from kedge.models.tiny import tiny_tokenizer
from kedge.rollout.local import LocalGenerator
from kedge.rollout.prompts import repeated
from kedge.rollout.settings import SamplingSettings
from kedge.runtime.local import LocalRuntime
from kedge.trainers.ppo import PPORoles, iteration
from kedge.trainers.ppo_settings import PPOConfig
from kedge.trainers.steering import steering_for

CASES = ("full sft", "separate", "lora", "trunk")
HOLD = {"separate": separate, "lora": lora, "trunk": trunk}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--layers", type=int, default=24 if on_gpu else 4)
    parser.add_argument("--prompts", type=int, default=128 if on_gpu else 8)
    parser.add_argument("--prompt-tokens", type=int, default=128 if on_gpu else 16)
    parser.add_argument("--new-tokens", type=int, default=256 if on_gpu else 16)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measured(args, args.folder)))
        return
    with tempfile.TemporaryDirectory() as home:
        write_models(Path(home), args.layers, is_full=on_gpu)
        found = {case: run_alone(case, Path(home)) for case in CASES}
    base = found["full sft"]["peak_gib"]
    print(f"{args.prompts} rows of {args.prompt_tokens} + {args.new_tokens} tokens, {args.micro_batch} at once")
    print(f"{'case':<10} {'peak GiB':>9} {'of full SFT':>12} {'seconds':>8}")
    for case, one in found.items():
        share = one["peak_gib"] / base if base else float("nan")
        print(f"{case:<10} {one['peak_gib']:>9.2f} {share:>11.2f}x {one['seconds']:>8.2f}")


def run_alone(case: str, home: Path) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--case", case, "--folder", str(home)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def write_models(home: Path, layers: int, *, is_full: bool) -> None:
    """A policy, and reward models that share its base and its trunk; the weights are random, the shapes are real."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    wide = {"hidden_size": 896, "intermediate_size": 4864, "vocab_size": 151_936}
    small = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}
    config = Qwen2Config(
        **(wide if is_full else small),
        num_hidden_layers=layers,
        num_attention_heads=14 if is_full else 4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        architectures=["Qwen2ForCausalLM"],
        eos_token_id=258,
        pad_token_id=256,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(home / "policy")
    tiny_tokenizer().save_pretrained(home / "policy")
    built = build(home / "policy", seed=1, dtype="bfloat16")
    save(built, home / "reward-trunk")
    (member,) = lora_members(replace(built), LoraSettings(), count=1, seed=1)
    save(member, home / "reward-lora")


def measured(args: argparse.Namespace, home: Path) -> dict[str, float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.perf_counter()
    if args.case == "full sft":
        full_sft(args, home, device)
    else:
        ppo(args, home, device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {"peak_gib": peak, "seconds": time.perf_counter() - started}


def full_sft(args: argparse.Namespace, home: Path, device: str) -> None:
    """Two optimiser steps over the same rows."""
    model = start_causal(str(home / "policy"), lora=None, device=device, seed=0)
    learner = Learner(model, imitation(base_of(model)), OptimiserSettings(), total_steps=2)
    width = args.prompt_tokens + args.new_tokens
    vocabulary = model.config.vocab_size
    batches = [
        Batch(
            tokens_BT=torch.randint(0, vocabulary, (args.micro_batch, width)),
            segment_BT=torch.ones(args.micro_batch, width, dtype=torch.int64),
            counted_BT=torch.arange(width).expand(args.micro_batch, width) >= args.prompt_tokens,
        )
        for _ in range(args.prompts // args.micro_batch)
    ]
    for _ in range(2):
        learner.update(batches)


def ppo(args: argparse.Namespace, home: Path, device: str) -> None:
    """Two iterations: generate, judge, update."""
    held = HOLD[args.case](wanted_for(args, home, device))
    vocabulary = held.model.config.vocab_size
    sampling = SamplingSettings(max_new_tokens=args.new_tokens, min_new_tokens=args.new_tokens)
    generator = LocalGenerator(base_of(held.model), sampling, stop_ids=[258], pad=256, max_rows=args.prompts)
    prompts = torch.randint(0, vocabulary, (args.prompts, args.prompt_tokens)).tolist()
    cfg = PPOConfig(epochs=1, minibatches=4, max_new_tokens=args.new_tokens)
    roles = PPORoles(policy=held.policy, critic=held.critic, reference=held.reference, reward=Scores(args, home, held))
    steering, runtime = steering_for(cfg.kl), LocalRuntime(Clock())
    for number in range(2):
        rollouts = generator.generate(repeated(prompts, ids=range(args.prompts), answers=1), seed=number)
        iteration(rollouts, roles, cfg, steering, runtime, number=number, seed=number)
        held.forget()


class Scores:
    """The reward role: on the policy's weights where they are shared, else a model of its own."""

    def __init__(self, args: argparse.Namespace, home: Path, held: Held) -> None:
        from kedge.models.reward_files import load

        self._rows = args.micro_batch
        self._judge = (
            held.shared_judge.members[0]
            if held.shared_judge
            else load(home / "reward-trunk", dtype="bfloat16", device=held.model.device)
        )

    def score(self, rollouts: Rollouts) -> torch.Tensor:
        rows = range(0, len(rollouts.tokens_BT), self._rows)
        parts = [
            self._judge.score_tokens(
                rollouts.tokens_BT[at : at + self._rows], rollouts.attention_mask_BT[at : at + self._rows]
            )
            for at in rows
        ]
        return torch.cat(parts)[:, 0]


def wanted_for(args: argparse.Namespace, home: Path, device: str) -> Wanted:
    optimiser = OptimiserSettings(lr=1e-6, eps=1e-5, schedule="constant")
    return Wanted(
        base=str(home / "policy"),
        reward=home / ("reward-lora" if args.case == "lora" else "reward-trunk"),
        objective=None,
        critic_from_reward=True,
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        lora=LoraSettings(),
        trunk_layers=None,
        actor=optimiser,
        critic=optimiser,
        actor_steps=8,
        critic_steps=8,
        temperature=1.0,
        rows=args.micro_batch,
        recompute=False,
        ema=None,
        imitation=None,
        seed=0,
    )


if __name__ == "__main__":
    main()
