"""One PPO update of Kedge and of TRL 1.12.0 on the same GPU: seconds by phase, tokens/s, memory, and the floor.

The same random bfloat16 weights of a Qwen2.5 shape, the same prompts and lengths, four full models, each side in a
process of its own. TRL's batches are the largest that fit, and are halved where one does not. Unequal lengths are
geometric with a mean of a quarter of --new-tokens, and only real tokens count. Needs: pip install 'trl==1.12.0'

    python benchmarks/ppo_vs_trl.py                                                # the case of docs/speed.md
    python benchmarks/ppo_vs_trl.py --shape 1.5b --rows 512 --trl-rows 128 --lengths unequal
    python benchmarks/ppo_vs_trl.py --shape tiny --rows 8 --prompt-tokens 8 --new-tokens 16     # anywhere
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from peers.case import Case, Measured, OutOfMemory, config_of, measure, write_models
from peers.floor import floor, measured_rates, weights_of
from peers.options import MINIBATCHES, add_sizes, case_of, parse_sizes

PHASES = ("generate", "judge", "update")
TRL_TOKENS = 12_288
"""Tokens of a micro-batch that TRL is tried with first: its B×T×V logits leave no room for more at 0.5B on 139 GiB."""


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as home:
        case = case_of(args, home, trl_rollout=args.trl_rollout, profile=10 if args.profile else 0)
        write_models(Path(home), case.shape, case.dtype)
        print(
            f"{case.shape}, {case.dtype}, {case.rows} rows of {case.prompt_tokens} + {case.new_tokens} tokens "
            f"({args.lengths} lengths), {case.updates - 1} update(s) after the first; torch {torch.__version__}",
            flush=True,
        )
        print(f"{'':18}  {' '.join(f'{name:>8}' for name in (*PHASES, 'other', 'whole s'))}   tokens/s  peak GiB")
        trl = trl_side(case, args) if args.who != "kedge" else None
        kedge = kedge_side(case) if args.who != "trl" else None
    if kedge and trl:
        show_ratios(kedge, trl)
    if kedge:
        show_floor(case, kedge)
        show_costs(kedge)
        check_gaps(kedge, is_narrow=case.dtype == "bfloat16")


def kedge_side(case: Case) -> Measured:
    result = measure("kedge_side", case)
    assert isinstance(result, Measured)
    show_row(f"Kedge (by {case.micro_batch})", result)
    return result


def trl_side(case: Case, args: argparse.Namespace) -> Measured:
    """The first sizes that fit: fewer rows where generating or judging runs out of memory, smaller micro-batches where
    learning does."""
    rows, longest = args.trl_rows or case.rows, max(1, TRL_TOKENS // (case.prompt_tokens + case.new_tokens))
    micro = args.trl_micro_batch or rows // MINIBATCHES
    while micro > longest and not args.trl_micro_batch:
        micro = fewer(micro)
    while True:
        result = measure("trl_side", replace(case, rows=rows, micro_batch=micro))
        if isinstance(result, Measured):
            show_row(f"TRL (by {micro}{f', {rows} rows' if rows != case.rows else ''})", result)
            return result
        rows, micro = smaller(rows, micro, result)


def smaller(rows: int, micro: int, failure: OutOfMemory) -> tuple[int, int]:
    print(f"TRL: out of memory in '{failure.phase}' with {rows} rows, {micro} at once to learn from", flush=True)
    if failure.phase == "update" and micro > 1:
        return rows, fewer(micro)
    if rows % (2 * MINIBATCHES):
        raise SystemExit(f"TRL: {rows} rows cannot be halved into {MINIBATCHES} minibatches any more")
    minibatch = rows // 2 // MINIBATCHES
    return rows // 2, micro if minibatch % micro == 0 else minibatch


def fewer(micro: int) -> int:
    """The next smaller size that still divides a minibatch."""
    return next(size for size in range(micro // 2, 0, -1) if micro % size == 0)


def show_row(name: str, result: Measured) -> None:
    phases, whole = [result.seconds(phase) for phase in PHASES], result.seconds("step")
    columns = " ".join(f"{seconds:8.3f}" for seconds in (*phases, whole - sum(phases), whole))
    print(f"{name:18}  {columns} {result.tokens_per_second():>10,.0f} {result.peak_gib:>9.1f}", flush=True)


def show_ratios(kedge: Measured, trl: Measured) -> None:
    """Seconds a token, so that sides with other numbers of rows can be compared."""
    kedge_tokens, trl_tokens = (sum(side.tokens) / len(side.tokens) for side in (kedge, trl))
    speedups = [trl.seconds(phase) / trl_tokens * kedge_tokens / kedge.seconds(phase) for phase in PHASES]
    speedup = kedge.tokens_per_second() / trl.tokens_per_second()
    phases = " ".join(f"{ratio:7.2f}x" for ratio in speedups)
    print(f"{'Kedge over TRL':18}  {phases} {'':17} {speedup:>9.2f}x {kedge.peak_gib / trl.peak_gib:>8.2f}x")


def show_floor(case: Case, kedge: Measured) -> None:
    rates = measured_rates(case.device)
    least = floor(
        weights_of(config_of(case.shape)),
        rates,
        kedge.new_lengths,
        prompt=case.prompt_tokens,
        epochs=case.epochs,
        minibatches=case.minibatches,
    )
    whole = sum(least.values())
    print(f"{'floor':18}  " + " ".join(f"{least[phase]:8.3f}" for phase in PHASES) + f" {whole:17.3f}")
    ratios = [kedge.seconds(phase) / least[phase] for phase in PHASES]
    print(
        f"{'Kedge over floor':18}  "
        + " ".join(f"{ratio:7.2f}x" for ratio in ratios)
        + f" {kedge.seconds('step') / whole:16.2f}x"
    )
    print(f"this card, just now: matrices {rates.matrix / 1e12:.0f} TFLOP/s, copies {rates.copy / 1e12:.2f} TB/s")


def show_costs(kedge: Measured) -> None:
    if kedge.costs:
        (_, calls, whole), *largest = kedge.costs
        print(f"\none update: {calls:,} kernels, {whole:.3f} s of them; the largest:")
        for name, count, seconds in largest:
            print(f"{seconds * 1e3:9.1f} ms {seconds / whole:6.1%} {count:8,}  {name[:90]}")


def check_gaps(kedge: Measured, *, is_narrow: bool) -> None:
    """Generator and trainer must agree up to rounding.

    In float32 to 1e-4. In bfloat16 the measure of rounding is how far the trainer, a plain forward pass, is from
    float32: the generator may be 1.5 times as far on average and 3 times at worst, and so the two are at most 2.5
    times that from each other on average.
    """
    gaps = kedge.gaps
    print("\n|log-prob| in nats        mean   largest")
    for name, title in (
        ("between", "generator - trainer"),
        ("generator", "generator - fp32"),
        ("trainer", "trainer - fp32"),
    ):
        print(f"{title:20} {gaps[f'{name}_mean']:9.6f} {gaps[f'{name}_max']:9.6f}")
    if is_narrow:
        is_close = (
            gaps["generator_mean"] <= 1.5 * gaps["trainer_mean"]
            and gaps["generator_max"] <= 3 * gaps["trainer_max"]
            and gaps["between_mean"] <= 2.5 * gaps["trainer_mean"]
        )
    else:
        is_close = gaps["between_max"] <= 1e-4
    if not is_close:
        raise SystemExit("generator and trainer differ by more than their precision explains")
    print("they agree within what their precision explains")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, updates=3, micro_batch=16)
    parser.add_argument("--who", choices=["both", "kedge", "trl"], default="both")
    parser.add_argument("--trl-rows", type=int, help="rows an update of TRL, where all of them are known not to fit")
    parser.add_argument("--trl-micro-batch", type=int, help="rows that TRL learns from at once; else what fits")
    parser.add_argument(
        "--trl-rollout", type=int, help="rows that TRL generates at once (its default: 64); all if absent"
    )
    parser.add_argument("--profile", action="store_true", help="the ten kernels of one update that take longest")
    args = parse_sizes(parser)
    rows = args.trl_rows or args.rows
    if args.who != "kedge" and (rows % MINIBATCHES or rows // MINIBATCHES % (args.trl_micro_batch or 1)):
        parser.error(f"TRL needs rows that are {MINIBATCHES} minibatches of whole micro-batches, found {rows} rows")
    return args


if __name__ == "__main__":
    main()
