"""The demo as a folder that anybody may look into and run again: recipe, data, model and the door to the truth.

What it holds is plain files for `kedge run`; the story on the screen is the command's.
"""

from __future__ import annotations

from pathlib import Path

from kedge.core.files import write_text
from kedge.core.seeds import seed_for
from kedge.demo.world import ALL, Sizes, write

HEAD = """\
# A shop's customer service: SFT and a reward model from scratch, on words of our own, in about a minute.
kedge: 1
name: demo
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
    packing: false # rows of 60 tokens: padding costs less than a mask over packed ones
    max_length: 128
    look: {every: 1000}
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
    look: {every: 1000}
    checkpoints: {every: 1000}
    optimiser: {lr: 1e-3, beta2: 0.98}
"""

STAGES = (PREPARE, SFT, REWARD)
"""In the order in which they run; a stage that follows is one more text here."""

GOLD = '''\
"""The true preference: for watching, never for training."""

from kedge.demo.world import score

__all__ = ["score"]
'''


def write_demo(folder: Path, seed: int, sizes: Sizes = ALL) -> Path:
    """Write everything below `folder`, which is made; gives the path of the recipe. The same seed, the same files."""
    from kedge.demo.model import make_model  # torch takes seconds to import

    write(folder / "data", seed, sizes)
    make_model(folder / "model", seed=seed_for(seed, "demo/model"))
    write_text(folder / "gold.py", GOLD)
    recipe = folder / "demo.yaml"
    write_text(recipe, HEAD.format(seed=seed) + "\n".join(STAGES))
    return recipe
