"""The same small task by every method, and `kedge compare` over the runs: the table of docs/choosing.md.

    python benchmarks/choosing.py [FOLDER]     about six minutes on one core

The shop of `kedge demo`: sft, a reward model from labels of which one in ten is wrong, then each method from the same
policy. The true preference (gold) is known, and nothing is trained on it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import mkdtemp

import torch

from kedge.commands.compare import compare_runs
from kedge.core import plugins
from kedge.demo.model import make_model
from kedge.demo.recipe import GOLD
from kedge.demo.world import Sizes, write
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe

SEED = 7
HEAD = """
kedge: 1
name: choosing
seed: 7
model: ./model
device: cpu
stages:
  prepare: {kind: data, files: [data/pairs.jsonl], heldout: 0.1667, decontaminate: [data/heldout-prompts.jsonl]}
  sft:
    kind: sft
    data: data/demonstrations.jsonl
    batch: 16
    micro_batch: 16
    max_length: 128
    samples: 0
    checkpoints: {every: 1000}
    optimiser: {lr: 5e-3, beta2: 0.98}
  reward:
    kind: reward
    from: sft
    data: prepare.train
    heldout: prepare.heldout
    batch: 16
    micro_batch: 16
    max_length: 128
    if_unfit: go_on
    eval: {every: 1000}
    checkpoints: {every: 1000}
    optimiser: {lr: 1e-3, beta2: 0.98}
"""
PREFERENCE = """
  METHOD:
    kind: preference
    from: sft
    method: METHOD
    data: prepare.train
    heldout: prepare.heldout
    batch: 32
    micro_batch: 32
    max_length: 128
    samples: 0
    eval: {every: 1000}
    checkpoints: {every: 1000}
    optimiser: {lr: 2e-4, beta2: 0.98}
"""
ONLINE = """
  online:
    kind: preference
    from: sft
    method: dpo
    online:
      rounds: 3
      prompts: data/prompts.jsonl
      reward: reward
      gold: {kind: function, path: "gold.py:score"}
      answers: 4
      max_prompt_tokens: 64
      sampling: {max_new_tokens: 48}
      rows: 128
    epochs: 2
    batch: 32
    micro_batch: 32
    max_length: 128
    eval: {every: 1000}
    checkpoints: {every: 1000}
    optimiser: {lr: 2e-4, beta2: 0.98}
"""
ON_POLICY = """
    from: sft
    reward: reward
    gold: {kind: function, path: "gold.py:score"}
    prompts: data/prompts.jsonl
    max_prompt_tokens: 64
    sampling: {max_new_tokens: 48}
"""
PPO = f"""
  ppo:
    kind: ppo
    roles: separate{ON_POLICY}
    iterations: 40
    batch: 64
    answers: 1
    minibatches: 2
    micro_batch: 64
    memory: {{dtype: float32}}
    kl: {{start: 0.5}}
    actor: {{lr: 3e-4, eps: 1.0e-5, schedule: constant}}
    critic: {{lr: 1e-3, eps: 1.0e-5, schedule: constant}}
    checkpoints: {{every: 1000}}
"""
GRPO = f"""
  grpo:
    kind: group
    method: grpo
    roles: separate{ON_POLICY}
    iterations: 40
    batch: 16
    answers: 4
    micro_batch: 64
    memory: {{dtype: float32}}
    kl: {{start: 0.1}}
    actor: {{lr: 3e-4, eps: 1.0e-5, schedule: constant}}
    checkpoints: {{every: 1000}}
"""
BEST_OF = f"""
  NAME:
    kind: best_of_n
    method: METHOD{ON_POLICY}
    n: 8
    batch: 32
    micro_batch: 96
    rows: 128
    checkpoints: {{every: 1000}}
    optimiser: {{lr: RATE, beta2: 0.98}}
"""
REJECTION = (
    BEST_OF.replace("NAME", "rejection").replace("METHOD", "{kind: rejection, rounds: 2}").replace("RATE", "1e-3")
)
BOND = BEST_OF.replace("NAME", "bond").replace("METHOD", "{kind: bond, steps: 40}").replace("RATE", "5e-4")
EVALUATE = """
  eval:
    kind: evaluate
    models: [MODELS]
    prompts: data/heldout-prompts.jsonl
    reward: reward
    gold: {kind: function, path: "gold.py:score"}
    answers: 2
    max_new_tokens: 48
    dtype: float32
"""


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp(prefix="choosing-"))
    write(folder / "data", SEED, Sizes(demonstrations=12_000, pairs=4800, prompts=256, heldout=200))
    make_model(folder / "model", seed=SEED)
    (folder / "gold.py").write_text(GOLD)
    stages = {name: PREFERENCE.replace("METHOD", name) for name in ("dpo", "kto")} | {"online": ONLINE}
    stages |= {"ppo": PPO} | ({"grpo": GRPO} if "group" in plugins.names("stages") else {})
    stages |= {"rejection": REJECTION, "bond": BOND}
    evaluate = EVALUATE.replace("MODELS", ", ".join(["sft", *stages]))
    recipe = folder / "choosing.yaml"
    recipe.write_text(HEAD + "".join(stages.values()) + evaluate)
    run = run_recipe(load_recipe(recipe), folder / "runs", is_resumed=(folder / "runs").exists(), say=print)
    comparison = compare_runs([run / name for name in stages])
    print("\n".join(comparison.lines()))
    print(f"wrote {comparison.write_page(folder / 'compare.html')}")


if __name__ == "__main__":
    main()
