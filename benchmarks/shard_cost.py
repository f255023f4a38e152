"""What sharded weights cost on one GPU: a step of plain weights beside one of FSDP2 in a group of one process.

Random weights of a real shape, computed in bfloat16 on a GPU, rows of unequal length. Of each way the peak memory of a
step is measured alone; then steps of both take turns in one process, so that the ratio is of one card at one time.
Also: how long the copy takes that a local generator samples from. What links between GPUs add is not measured here.

    python benchmarks/shard_cost.py --shape 0.5b
    python benchmarks/shard_cost.py --shape tiny --steps 4 --rows 8      # anywhere
    python benchmarks/shard_cost.py --shape 7b --load-only               # peak memory of host and GPU while loading
    python benchmarks/shard_cost.py --shape 7b --load-only --lora        # adapters on a frozen base in bfloat16
"""

from __future__ import annotations

import argparse
import gc
import json
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
from safetensors.torch import save_file
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
from kedge.models.settings import LoraSettings, TrainingMemory
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
FILE_BYTES = 2 * 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--steps", type=int, default=30, help="pairs of steps that are timed")
    parser.add_argument("--rows", type=int, default=128, help="rows of a step, about 380 tokens each")
    parser.add_argument("--load-only", action="store_true", help="load from files, and nothing else")
    parser.add_argument("--lora", action="store_true", help="with --load-only: adapters learn, on a base in bfloat16")
    parser.add_argument("--load-from", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load_from:
        load_and_tell(args.load_from, with_lora=args.lora)
    elif args.load_only:
        measure_loading(args.shape, with_lora=args.lora)
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


def measure_loading(shape: str, *, with_lora: bool) -> None:
    """Write the weights of a shape into files, and load them in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        count, size = write_weights(shape, Path(folder))
        print(f"{shape}: {count:,} weights, {size / 2**30:.2f} GiB of files", flush=True)
        command = [sys.executable, __file__, "--load-from", folder, *(["--lora"] if with_lora else [])]
        with subprocess.Popen(command) as child:
            host, _ = peak_of(child)
        print(f"  peak of the host {host / 2**30:.2f} GiB (anonymous: pages of mapped files do not count)")


def write_weights(shape: str, folder: Path) -> tuple[int, int]:
    """A model's folder in bfloat16, of which one file at a time is in memory: how many weights, and bytes of them."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config_of(shape)).to(torch.bfloat16)
    model.config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    files: list[list[str]] = [[]]
    room = FILE_BYTES
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        if files[-1] and weight.nbytes > room:
            files.append([])
            room = FILE_BYTES
        files[-1].append(name)
        room -= weight.nbytes
    named = {f"model-{number:05}-of-{len(files):05}.safetensors": names for number, names in enumerate(files, 1)}
    for file, names in named.items():
        # All alike: what they are changes no memory, and billions of random numbers take minutes.
        save_file({name: torch.full_like(weights[name], 1e-3, device="cpu") for name in names}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, names in named.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(weight.numel() for weight in weights.values()), sum((folder / file).stat().st_size for file in named)


def load_and_tell(folder: Path, *, with_lora: bool) -> None:
    on_gpu = torch.cuda.is_available()
    with sharding_alone(on_gpu=on_gpu) as world:
        start = rss_anon(os.getpid())
        model = load(folder, world.mesh, device="cuda" if on_gpu else "cpu", with_lora=with_lora)
        held = sum(local(weight).nbytes for weight in model.parameters())
        gpu = f"; peak of the GPU {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if on_gpu else ""
        kind = "adapters in float32 on a base in bfloat16" if with_lora else "float32 as they learn"
        print(f"  weights in {num_parts(world.mesh)} part: {held / 2**30:.2f} GiB, {kind}{gpu}")
        print(f"  the host before loading: {start / 2**30:.2f} GiB", flush=True)


def load(folder: Path, mesh: Any, *, device: str, with_lora: bool) -> Any:
    """A model of which all weights learn, or adapters alone, as a stage opens it."""
    narrow = torch.bfloat16 if device == "cuda" or with_lora else torch.float32
    model = start_causal(
        str(folder),
        lora=LoraSettings() if with_lora else None,
        device=device,
        seed=0,
        memory=TrainingMemory(dtype="bfloat16" if with_lora else "auto"),
        unread=True,
    )
    shard_model(model, mesh, dtype=narrow)
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
