"""What sharded weights cost on one GPU: a step of plain weights beside one of FSDP2 in a group of one process.

Random weights of a real shape, computed in bfloat16 on a GPU, rows of unequal length. Of each way the peak memory of a
step is measured alone; then steps of both take turns in one process, so that the ratio is of one card at one time.
Also: how long the copy takes that a local generator samples from. What links between GPUs add is not measured here.

    python benchmarks/shard_cost.py --shape 0.5b
    python benchmarks/shard_cost.py --shape tiny --steps 4 --rows 8      # anywhere
    python benchmarks/shard_cost.py --shape 7b --load-only               # peak memory of host and GPU while loading
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kedge.core.batches import Batch
from kedge.core.optimiser import OptimiserSettings
from kedge.core.world import ALONE, World
from kedge.data.batching import TokenSequence, padded_batches
from kedge.models.forward.heads import language_model
from kedge.models.forward.parts import local, num_parts
from kedge.models.forward.reader import compile_layers
from kedge.models.forward.sharding import shard_model, whole_copy
from kedge.models.loading.start import start_causal
from kedge.models.loading.tiny import tiny_tokenizer
from kedge.models.training.learner import Learner
from kedge.models.training.objectives import imitation
from kedge.models.training.passes import Passes
from kedge.models.training.train_step import trained_weights
from kedge.runtime.processes import sharding_alone
from peers.stage_case import KEYS, SHAPES
from token_cache import peak_of, rss_anon

VOCABULARY, SHORTEST, LONGEST = 49_152, 60, 700
TINY_VOCABULARY = 512
PLAIN, SHARD = "plain", "shard"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--steps", type=int, default=30, help="pairs of steps that are timed")
    parser.add_argument("--rows", type=int, default=128, help="rows of a step, about 380 tokens each")
    parser.add_argument("--load-only", action="store_true", help="load from files, and nothing else")
    parser.add_argument("--load-from", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load_from:
        load_and_tell(args.load_from)
    elif args.load_only:
        measure_loading(args.shape)
    else:
        with sharding_alone(on_gpu=torch.cuda.is_available()) as world:
            compare(args.shape, args.rows, args.steps, world)


def compare(shape: str, rows: int, steps: int, world: World) -> None:
    sequences, worlds = random_rows(rows, vocabulary_of(shape)), {PLAIN: ALONE, SHARD: world}
    tokens = sum(len(sequence.tokens) for sequence in sequences)
    peaks = {name: peak_memory(shape, of, sequences) for name, of in worlds.items()}
    learners = {name: learner_of(shape, of) for name, of in worlds.items()}
    for learner, _ in learners.values():  # compiles, captures, chooses the size of passes
        for _ in range(3):
            step(learner, sequences)
    seconds: dict[str, list[float]] = {name: [] for name in learners}
    for number in range(steps):
        for name, (learner, _) in sorted(learners.items(), reverse=bool(number % 2)):
            seconds[name].append(timed(lambda learner=learner: step(learner, sequences)))
    ratios = [shard / plain for plain, shard in zip(seconds[PLAIN], seconds[SHARD], strict=True)]
    spread = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    print(f"{shape}, {rows} rows, {tokens:,} tokens a step, {steps} pairs of steps")
    for name in (PLAIN, SHARD):
        memory = f", peak {peaks[name] / 2**30:.2f} GiB" if peaks[name] else ""
        print(f"  {name}: {1e3 * statistics.median(seconds[name]):.2f} ms a step{memory}")
    memory = f", of memory {peaks[SHARD] / peaks[PLAIN]:.3f}" if peaks[PLAIN] else ""
    print(f"  ratio of pairs: {statistics.median(ratios):.4f} ± {spread:.4f}{memory}")
    _, model = learners[SHARD]
    whole_copy(model)
    refill = statistics.median(timed(lambda: whole_copy(model)) for _ in range(10))
    print(f"  the copy that is sampled from, filled again: {1e3 * refill:.2f} ms")


def peak_memory(shape: str, world: World, sequences: list[TokenSequence]) -> int:
    """Bytes of the GPU at the peak of a step; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    learner, model = learner_of(shape, world)
    step(learner, sequences)
    torch.cuda.reset_peak_memory_stats()
    step(learner, sequences)
    peak = torch.cuda.max_memory_allocated()
    del learner, model
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def learner_of(shape: str, world: World) -> tuple[Learner[Batch], LlamaForCausalLM]:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = LlamaForCausalLM(config_of(shape))
    if device == "cuda":
        compile_layers(model)
    if world.mesh is not None:
        shard_model(model, world.mesh, dtype=dtype)
    trained = trained_weights(model, dtype=dtype)
    policy = language_model(model, compiled=device == "cuda")
    learner = Learner(
        trained,
        policy.backbone,
        imitation(policy),
        OptimiserSettings(lr=1e-5),
        total_steps=10_000,
        passes=Passes(world=world),
    )
    return learner, model


def step(learner: Learner[Batch], sequences: list[TokenSequence]) -> dict[str, float]:
    return learner.update(
        lambda size: padded_batches(sequences, rows=size.rows, tokens=size.tokens, shares=size.shares, pad=0)
    )


def config_of(shape: str) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary_of(shape), num_key_value_heads=KEYS[shape], tie_word_embeddings=True, **SHAPES[shape]
    )


def vocabulary_of(shape: str) -> int:
    return TINY_VOCABULARY if shape == "tiny" else VOCABULARY


def random_rows(rows: int, vocabulary: int) -> list[TokenSequence]:
    rng = Random(0)
    lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(rows)]
    return [
        TokenSequence(tokens=[rng.randrange(vocabulary) for _ in range(length)], counted=[True] * length)
        for length in lengths
    ]


def measure_loading(shape: str) -> None:
    """Write random weights of a shape into files, and load them in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = LlamaForCausalLM(config_of(shape)).to(torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="2GB")
        tiny_tokenizer().save_pretrained(folder)
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        count = sum(weight.numel() for weight in model.parameters())
        print(f"{shape}: {count:,} weights, {size / 2**30:.2f} GiB of files", flush=True)
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        with subprocess.Popen([sys.executable, __file__, "--load-from", folder]) as child:
            host, _ = peak_of(child)
        print(f"  peak of the host {host / 2**30:.2f} GiB (anonymous: pages of mapped files do not count)")


def load_and_tell(folder: Path) -> None:
    on_gpu = torch.cuda.is_available()
    with sharding_alone(on_gpu=on_gpu) as world:
        start = rss_anon(os.getpid())
        model = load(folder, world.mesh, device="cuda" if on_gpu else "cpu")
        held = sum(local(weight).nbytes for weight in model.parameters())
        gpu = f"; peak of the GPU {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if on_gpu else ""
        print(f"  weights in {num_parts(world.mesh)} part: {held / 2**30:.2f} GiB, float32 as they learn{gpu}")
        print(f"  the host before loading: {start / 2**30:.2f} GiB", flush=True)


def load(folder: Path, mesh: Any, *, device: str) -> Any:
    """A model of which all weights learn, as a stage opens it."""
    model = start_causal(str(folder), lora=None, device=device, seed=0, unread=True)
    shard_model(model, mesh, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    return model


def timed(action: Callable[[], object]) -> float:
    synchronise()
    start = time.perf_counter()
    action()
    synchronise()
    return time.perf_counter() - start


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
