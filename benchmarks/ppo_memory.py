"""Peak memory of full SFT and of PPO with `roles: separate`, `lora` and `trunk`, at one shape.

Random weights of the Qwen2.5-0.5B shape on a GPU, the same rows and lengths for all, each case in a process of its own:
two whole updates, generation included. Without a GPU a small shape runs, and the memory is that of the process.

    python benchmarks/ppo_memory.py [--shape 0.5b --rows 128 --prompt-tokens 128 --new-tokens 256 --micro-batch 8]
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from peers.case import SHAPES, Case, Measured, measure, write_models

WAYS = ("separate", "lora", "trunk")


def main() -> None:
    args = parse()
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
            updates=2,
            micro_batch=args.micro_batch,
        )
        write_models(Path(home), case.shape, case.dtype, with_lora=True)
        print(
            f"{case.shape}, {case.dtype}, {case.rows} rows of {case.prompt_tokens} + {case.new_tokens} tokens, "
            f"{case.micro_batch} at once; torch {torch.__version__}\n"
            f"{'':14} {'peak GiB':>9} {'of full SFT':>12} {'s an update':>12}",
            flush=True,
        )
        sft_gib = show("full SFT", measure("sft_side", case), None)
        for way in WAYS:
            show(f"PPO {way}", measure("kedge_side", replace(case, roles=way)), sft_gib)


def show(name: str, result: object, sft_gib: float | None) -> float:
    """Print a row, with its ratio to full SFT; gives the peak."""
    assert isinstance(result, Measured), f"{name}: {result}"
    ratio = result.peak_gib / (sft_gib or result.peak_gib)
    print(f"{name:14} {result.peak_gib:>9.2f} {ratio:>11.2f}x {result.seconds('step'):>12.2f}", flush=True)
    return result.peak_gib


def parse() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.5b" if on_gpu else "tiny")
    parser.add_argument("--rows", type=int, default=128 if on_gpu else 16)
    parser.add_argument("--prompt-tokens", type=int, default=128 if on_gpu else 16)
    parser.add_argument("--new-tokens", type=int, default=256 if on_gpu else 16)
    parser.add_argument("--micro-batch", type=int, default=8 if on_gpu else 4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
