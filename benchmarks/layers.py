"""One pass through a decoder's layers, forward and backward, beside its floor: milliseconds, and its largest kernels.

Random weights of real shapes, packed rows of unequal length, read at their last tokens, as a reward model is trained.
The first pass compiles kernels and captures graphs. Needs a GPU.

    python benchmarks/layers.py                            # SmolLM2-135M, Qwen2.5-0.5B and 1.5B shapes, full and lora
    python benchmarks/layers.py --shapes 135m --ways lora --kernels 20
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from kedge.models.forward.backbones import Backbone, backbone_of
from kedge.models.forward.lora import with_lora
from kedge.models.forward.reader import compile_layers
from kedge.models.settings import LoraSettings
from peers.floor import measured_rates
from peers.stage_case import ALPHA, KEYS, RANK, SHAPES

VOCABULARY, SHORTEST, LONGEST = 49_152, 60, 320


def main() -> None:
    args = parse()
    rates = measured_rates("cuda")
    print(f"torch {torch.__version__}, {args.rows} rows of {SHORTEST} to {LONGEST} tokens")
    for shape in args.shapes:
        for way in args.ways:
            model = random_model(shape, way)
            run, tokens = pass_over(model, args.rows)
            first = seconds(run)
            seconds(run, times=2)
            each = seconds(run, times=args.times)
            layers = sum(weight.numel() for weight in cast(Any, model.get_decoder()).layers.parameters())
            floor = (6 if way == "full" else 4) * layers * tokens / rates.matrix
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(
                f"{shape:5} {way:5} {tokens:,} tokens: first {first:.2f} s, then {1e3 * each:.1f} ms, "
                f"{each / floor:.1f} × the floor of {1e3 * floor:.1f} ms, peak {peak:.1f} GiB",
                flush=True,
            )
            show_kernels(run, args.kernels)
            del model, run
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def random_model(shape: str, way: str) -> PreTrainedModel:
    kind, config = (LlamaForCausalLM, LlamaConfig) if shape in ("tiny", "135m") else (Qwen2ForCausalLM, Qwen2Config)
    sizes = {**SHAPES[shape], "num_key_value_heads": KEYS[shape], "tie_word_embeddings": True}
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: PreTrainedModel = cast(Any, kind)(config(**sizes, vocab_size=VOCABULARY)).bfloat16().eval()
    if way == "lora":
        model = with_lora(model, LoraSettings(rank=RANK, alpha=ALPHA), name="policy", seed=0)
    compile_layers(model)
    return model


def pass_over(model: PreTrainedModel, rows: int) -> tuple[Callable[[], object], int]:
    """A pass with the gradients of all weights that learn, and how many tokens it has."""
    backbone: Backbone = backbone_of(model)
    generator = torch.Generator().manual_seed(0)
    length_B = torch.randint(SHORTEST, LONGEST, (rows,), generator=generator)
    mask_BT = torch.arange(int(length_B.max())) < length_B[:, None]
    tokens_BT = torch.randint(0, VOCABULARY, mask_BT.shape, generator=generator).cuda()
    read_BT = torch.zeros_like(mask_BT)
    read_BT[torch.arange(rows), length_B - 1] = True
    weights = [weight for _, weight in backbone.trainable()]

    def run() -> object:
        with backbone.active():
            hidden_RD = backbone.hidden(tokens_BT, mask_BT, read_BT)
            return torch.autograd.grad(hidden_RD.float().square().sum(), weights, allow_unused=True)

    return run, int(length_B.sum())


def seconds(run: Callable[[], object], *, times: int = 1) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def show_kernels(run: Callable[[], object], count: int) -> None:
    if not count:
        return
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    kernels = sorted(found.key_averages(), key=lambda kernel: -kernel.device_time_total)
    print(f"      {sum(kernel.device_time_total for kernel in kernels) / 1e3:.1f} ms of kernels")
    for kernel in kernels[:count]:
        print(f"      {kernel.device_time_total / 1e3:7.2f} ms {kernel.count:5d} ×  {kernel.key[:100]}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["135m", "0.5b", "1.5b"])
    parser.add_argument("--ways", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--kernels", type=int, default=0, help="how many of the largest kernels to show")
    return parser.parse_args()


if __name__ == "__main__":
    main()
