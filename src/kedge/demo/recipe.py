"""The demo as a folder of plain files for `kedge run`: recipe, data, model and the true preference as a gold source.

Left out: what is printed while it runs (`kedge.demo.story`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from kedge.core.files import write_text
from kedge.core.seeds import seed_for
from kedge.demo.world import FULL_SIZES, Sizes, write

HEAD = """\
# A shop's customer service: SFT, a reward model, PPO and evaluation, from scratch, on words of our own.
kedge: 1
name: {name}
seed: {seed}
model: ./model # 118 thousand random weights, one token a word
stages:
"""

PREPARE = """\
  # Sets aside what teaches nothing, keeps the evaluation's prompts out, and holds out a sixth of the prompts.
  prepare:
    kind: data
    files: [data/pairs.jsonl]
    heldout: 0.1667
    decontaminate: [data/heldout-prompts.jsonl]
"""

SFT = """\
  # Imitates the shop's staff, the good and the bad: readable, and mediocre.
  sft:
    kind: sft
    data: data/demonstrations.jsonl
    batch: 16
    micro_batch: 16
    max_length: 128
    eval: {every: 1000}
    checkpoints: {every: 1000}
    optimiser: {lr: 5e-3, beta2: 0.98} # large, because the weights are random
"""

REWARD = """\
  # Learns from labels of which one in ten is wrong. It never sees the true preference.
  reward:
    kind: reward
    from: sft
    data: prepare.train
    heldout: prepare.heldout
    batch: 16
    micro_batch: 16
    max_length: 128
    eval: {every: 1000}
    checkpoints: {every: 1000}
    optimiser: {lr: 1e-3, beta2: 0.98}
"""

_PPO_START = """\
  ppo:
    kind: ppo
    from: sft
    reward: reward
    gold: {kind: function, path: gold.py:score} # the true preference: watched, never learnt from
    prompts: data/prompts.jsonl
    roles: separate # four full models: they are tiny
    batch: 64
    micro_batch: 64
    max_prompt_tokens: 48
    critic: {lr: 1e-3, schedule: constant, warmup: 0, eps: 1e-5}
"""

PPO = f"""\
  # Improves the replies against the reward model. `kl` is the anchor: a price that is steered towards a target, and a
  # limit past which the run goes back to its last good checkpoint.
{_PPO_START}\
    iterations: 40
    minibatches: 4
    sampling: {{max_new_tokens: 60, temperature: 0.8}}
    # Scores span about ten units: a clip of 0.2 would hold the critic back. And no batch may move the policy far.
    loss: {{policy: {{stop_at_kl: 0.03}}, value: {{clip: null}}}}
    actor: {{lr: 5e-4, schedule: linear, warmup: 0, eps: 1e-5}}
    kl: {{start: 0.5, target: 3.0, horizon: 2000, limit: 6.0, on_limit: rollback}}
    scores: {{overlong_buffer: 30, overlong_penalty: 4.0}} # the shop likes it short: tokens beyond 30 cost
"""

PPO_WITHOUT_KL = f"""\
  # PPO let go on purpose: neither KL nor length costs anything, there is no limit, and the rate never falls. It finds
  # the weak spots of the reward model, whose score goes on rising, while the true preference falls.
{_PPO_START}\
    iterations: 50
    minibatches: 2
    sampling: {{max_new_tokens: 60}}
    loss: {{value: {{clip: null}}}}
    actor: {{lr: 2.5e-4, schedule: constant, warmup: 0, eps: 1e-5}}
    kl: {{start: 0}}
"""

DPO = """\
  # The same labels, learnt directly: no reward model, no sampling.
  dpo:
    kind: preference
    from: sft
    method: {kind: dpo, beta: 0.3}
    data: prepare.train
    heldout: prepare.heldout
    batch: 32
    micro_batch: 32
    max_length: 128
    eval: {every: 1000}
    checkpoints: {every: 1000}
    optimiser: {lr: 5e-4}
"""

BEST = """\
  # Eight replies to each message; the model imitates the one that the reward model likes best.
  best8:
    kind: best_of_n
    from: sft
    reward: reward
    prompts: data/prompts.jsonl
    n: 8
    batch: 16
    micro_batch: 16
    max_prompt_tokens: 48
    sampling: {max_new_tokens: 60, temperature: 0.8}
    optimiser: {lr: 1e-3}
"""

EVALUATE = """\
  # The same held-out messages for all. `reward` says what they were trained for, `gold` what is true.
  eval:
    kind: evaluate
    models: [{models}]
    prompts: data/heldout-prompts.jsonl
    reward: reward
    gold: {{kind: function, path: gold.py:score}}
    max_new_tokens: 60
    temperature: {temperature} # as in PPO
    rows: 100
"""

Version = Literal["plain", "all", "overoptimised"]
"""The loop; the loop with DPO and best-of-N beside PPO; the loop with PPO without KL penalty."""

NAMES: Mapping[Version, str] = {"plain": "demo", "all": "demo-all", "overoptimised": "demo-overoptimised"}
STAGES: Mapping[Version, tuple[str, ...]] = {
    "plain": (PREPARE, SFT, REWARD, PPO, EVALUATE.format(models="sft, ppo", temperature=0.8)),
    "all": (
        *(PREPARE, SFT, REWARD, PPO, DPO, BEST),
        EVALUATE.format(models="sft, ppo, dpo, best8", temperature=0.8),
    ),
    "overoptimised": (PREPARE, SFT, REWARD, PPO_WITHOUT_KL, EVALUATE.format(models="sft, ppo", temperature=1.0)),
}
"""In the order in which they run."""

GOLD = '''\
"""The true preference: for watching, never for training."""

from kedge.demo.world import score

__all__ = ["score"]
'''


def write_demo(folder: Path, seed: int, sizes: Sizes = FULL_SIZES, *, version: Version = "plain") -> Path:
    """Write everything below `folder`, which is created; returns the recipe. The same seed, the same files."""
    from kedge.demo.model import make_model  # torch takes seconds to import

    write(folder / "data", seed, sizes)
    make_model(folder / "model", seed=seed_for(seed, "demo/model"))
    write_text(folder / "gold.py", GOLD)
    recipe = folder / "demo.yaml"
    write_text(recipe, HEAD.format(seed=seed, name=NAMES[version]) + "\n".join(STAGES[version]))
    return recipe
