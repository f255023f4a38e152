"""What a world of processes costs, as far as one GPU tells: a step in a world of one, and the bandwidth of gradients.

Random weights of a real shape in bfloat16 with float32 masters, rows of unequal length. Steps alone and steps in a
world of one process (torch.distributed, NCCL) take turns, so that both see the same card. Gradients are packed into
buckets, added up (one process: nothing travels) and unpacked; what a link between GPUs adds is not measured here.

    python benchmarks/replicate.py --shape 135m
    python benchmarks/replicate.py --shape tiny --steps 4        # anywhere
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections.abc import Callable
from random import Random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kedge.core.batches import Batch
from kedge.core.optimiser import OptimiserSettings
from kedge.core.world import ALONE, World
from kedge.data.batching import TokenSequence, padded_batches
from kedge.models.forward.heads import language_model
from kedge.models.forward.reader import compile_layers
from kedge.models.training.learner import Learner
from kedge.models.training.objectives import imitation
from kedge.models.training.passes import Passes
from kedge.models.training.train_step import trained_weights
from kedge.runtime.processes import Place, joined
from peers.stage_case import KEYS, SHAPES

VOCABULARY, SHORTEST, LONGEST = 49_152, 60, 320


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=64)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    place = Place(rank=0, size=1, local_rank=0, address="127.0.0.1", port=free_port())
    with joined(place, on_gpu=on_gpu, timeout_s=60) as world:
        compare_steps(args.shape, args.rows, args.steps, world)
        measure_buckets(args.shape, world)


def compare_steps(shape: str, rows: int, steps: int, world: World) -> None:
    learners = {"alone": learner_of(shape, ALONE), "world of one": learner_of(shape, world)}
    rng = Random(0)
    sequences = [
        TokenSequence(tokens=tokens, counted=[True] * len(tokens))
        for tokens in ([rng.randrange(VOCABULARY) for _ in range(rng.randint(SHORTEST, LONGEST))] for _ in range(rows))
    ]
    for learner in learners.values():  # compiles, captures, chooses the size of passes
        for _ in range(3):
            learner.update(lambda size: padded_batches(sequences, rows=size.rows, tokens=size.tokens, pad=0))
    seconds: dict[str, list[float]] = {name: [] for name in learners}
    for step in range(steps):
        for name, learner in sorted(learners.items(), reverse=bool(step % 2)):
            update = lambda learner=learner: learner.update(  # noqa: E731
                lambda size: padded_batches(sequences, rows=size.rows, tokens=size.tokens, pad=0)
            )
            seconds[name].append(timed(update))
    alone, joined_s = (statistics.median(seconds[name]) for name in ("alone", "world of one"))
    ratios = [b / a for a, b in zip(seconds["alone"], seconds["world of one"], strict=True)]
    spread = statistics.stdev(ratios) / len(ratios) ** 0.5
    tokens = sum(len(sequence.tokens) for sequence in sequences)
    print(
        f"{shape}, {tokens:,} tokens a step: alone {1e3 * alone:.2f} ms, world of one {1e3 * joined_s:.2f} ms, "
        f"ratio of pairs {statistics.median(ratios):.4f} ± {1.96 * spread:.4f} ({steps} pairs)"
    )


def learner_of(shape: str, world: World) -> Learner[Batch]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, num_key_value_heads=KEYS[shape], tie_word_embeddings=True, **SHAPES[shape]
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM(config).to(device)
    trained = trained_weights(model, dtype=torch.bfloat16 if device == "cuda" else None)
    compile_layers(model)
    policy = language_model(model)
    return Learner(
        trained,
        policy.backbone,
        imitation(policy),
        OptimiserSettings(lr=1e-5),
        total_steps=10_000,
        passes=Passes(world=world),
    )


def measure_buckets(shape: str, world: World) -> None:
    config = LlamaConfig(
        vocab_size=VOCABULARY, num_key_value_heads=KEYS[shape], tie_word_embeddings=True, **SHAPES[shape]
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        shapes = [weight.shape for weight in LlamaForCausalLM(config).parameters()]
    gradients = [torch.ones(shape, device=device) for shape in shapes]
    weights = [gradient.bfloat16() for gradient in gradients]
    num_bytes = sum(gradient.nbytes for gradient in gradients)
    seconds = statistics.median(timed(lambda: world.add(*gradients)) for _ in range(10))
    print(f"gradients of {num_bytes / 2**30:.2f} GiB: {1e3 * seconds:.1f} ms, {num_bytes / seconds / 1e9:.0f} GB/s")
    copies = [torch.empty_like(weight) for weight in weights]
    refill = statistics.median(timed(lambda: torch._foreach_copy_(copies, weights)) for _ in range(10))  # pyright: ignore
    print(f"a copy of the weights in bfloat16, refilled: {1e3 * refill:.2f} ms")


def timed(action: Callable[[], object]) -> float:
    synchronise()
    start = time.perf_counter()
    action()
    synchronise()
    return time.perf_counter() - start


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    main()
