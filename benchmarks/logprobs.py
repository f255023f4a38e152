"""Time and peak memory of tiled log-probs against plain log-softmax, from hidden states and LM-head weights.

Prints each and its ratio to plain, for forward and for forward + backward; `compiled` is tiled with one kernel for the
work on a tile, and `again` is tiled with no logits kept for backward. On the CPU each variant runs in a process of its
own, whose peak resident memory is read; a plain variant that would not fit into the memory now free is not run, and
the output says so.

    python benchmarks/logprobs.py                                  # 8×1024 tokens, 150,000 entries, width 896
    python benchmarks/logprobs.py --batch 2 --length 256 --vocabulary 50000
    python benchmarks/logprobs.py --batch 32 --length 256 --entropy --variants again tiled compiled   # a PPO step
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from kedge.algorithms import logprobs

MIB = 2**20
# float32 copies of all logits alive at once, as measured: logits and log-softmax; in backward a gradient besides.
PLAIN_COPIES = {"forward": 2, "forward+backward": 3}


def plain(hidden_ND: Tensor, head_VD: Tensor, target_N: Tensor, *, with_entropy: bool) -> Tensor:
    logp_NV = (hidden_ND @ head_VD.T).float().log_softmax(-1)
    if with_entropy:
        (logp_NV.detach().exp() * logp_NV.detach()).sum(-1)
    return logp_NV.gather(1, target_N[:, None])[:, 0]


def tiled(
    hidden_ND: Tensor, head_VD: Tensor, target_N: Tensor, *, with_entropy: bool, compiled: bool = False
) -> Tensor:
    if with_entropy:
        return logprobs.logprobs_and_entropy(hidden_ND, head_VD, target_N, compiled=compiled)[0]
    return logprobs.token_logprobs(hidden_ND, head_VD, target_N, compiled=compiled)


def again(hidden_ND: Tensor, head_VD: Tensor, target_N: Tensor, *, with_entropy: bool) -> Tensor:
    with patch.object(logprobs, "_kept_bytes", lambda _: 0):
        return tiled(hidden_ND, head_VD, target_N, with_entropy=with_entropy)


VARIANTS: dict[str, Callable[..., Tensor]] = {
    "plain": plain,
    "tiled": tiled,
    "compiled": partial(tiled, compiled=True),
    "again": again,
}


def peak_mib(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(variant: str, phase: str, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of the fastest repeat, and MiB above what the inputs take."""
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    tokens = args.batch * args.length
    hidden_ND = torch.randn(tokens, args.width, generator=generator).to(args.device, dtype)
    head_VD = torch.randn(args.vocabulary, args.width, generator=generator)
    head_VD = head_VD.div_(args.width**0.5).to(args.device, dtype)  # in place: the peak so far is that of the inputs
    target_N = torch.randint(0, args.vocabulary, (tokens,), generator=generator).to(args.device)
    backward = phase == "forward+backward"
    hidden_ND.requires_grad_(backward)
    head_VD.requires_grad_(backward and not args.frozen_head)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before, seconds = peak_mib(args.device), list[float]()
    for _ in range(args.repeats):
        start = now(args.device)
        logp_N = VARIANTS[variant](hidden_ND, head_VD, target_N, with_entropy=args.entropy)
        if backward:
            logp_N.sum().backward()
        seconds.append(now(args.device) - start)
        del logp_N
        hidden_ND.grad = head_VD.grad = None
    return {"seconds": min(seconds), "mib": peak_mib(args.device) - before}


def measure_in_child(variant: str, phase: str, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--child", variant, phase]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out)


def free_mib(device: str) -> float:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] / MIB
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) / 1024


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--repeats", type=int, default=5 if torch.cuda.is_available() else 1, help="the fastest counts")
    parser.add_argument("--threads", type=int, default=1, help="on the CPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--phases", nargs="+", choices=list(PLAIN_COPIES), default=list(PLAIN_COPIES))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=["tiled", "plain"])
    parser.add_argument("--entropy", action="store_true", help="and the entropy, without its gradient")
    parser.add_argument("--frozen-head", action="store_true", help="no gradient for the head")
    parser.add_argument("--child", nargs=2, metavar=("VARIANT", "PHASE"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    if args.child:
        variant, phase = args.child
        print(json.dumps(measure(variant, phase, args)))
        return
    tokens = args.batch * args.length
    logits_mib = tokens * args.vocabulary * 4 / MIB
    type_name = "bfloat16" if args.device == "cuda" else f"float32, {args.threads} thread(s)"
    print(
        f"{args.batch}×{args.length} tokens, {args.vocabulary} entries, width {args.width}; {args.device}, {type_name}"
    )
    print(f"one float32 copy of all logits: {logits_mib:,.0f} MiB")
    for phase in args.phases:
        results: dict[str, dict[str, float]] = {}
        for variant in args.variants:
            need, free = PLAIN_COPIES[phase] * logits_mib + 1024, free_mib(args.device)
            if variant == "plain" and need > free:
                print(f"{phase:17} {variant:8} not run: needs about {need:,.0f} MiB, {free:,.0f} are free")
                continue
            run = measure if args.device == "cuda" else measure_in_child
            results[variant] = result = run(variant, phase, args)
            print(f"{phase:17} {variant:8} {result['seconds']:9.3f} s  {result['mib']:9,.0f} MiB above the inputs")
        for variant in results.keys() - {"plain"} if "plain" in results else ():
            times, memory = (results[variant][key] / results["plain"][key] for key in ("seconds", "mib"))
            print(f"{phase:17} {variant} / plain: time {times:.2f}, memory {memory:.3f}")


if __name__ == "__main__":
    main()
