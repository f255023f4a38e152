"""One PPO update on a CPU: TRL 1.12.0 against Kedge with `roles: separate`, `lora` and `trunk`.

Random float32 weights (hidden 256, 4 layers, vocabulary 4,096), 64 prompts of 32 tokens and 48 new ones, 2 epochs of
4 minibatches, 2 threads. Each side is a process of its own; the sides take turns for --rounds, and the fastest update
of each counts, because other work on the machine only ever adds time. Where there is much of it, `--clock cpu
--threads 1` counts seconds of processor time instead of wall-clock time. `trunk` shares the lower half of the
layers, `trunk-3` three of the four; `separate+sampled` and the like take the generator's log-probs as the old ones
(`old_logprobs`), `separate+compiled` has its layers compiled, and `separate+sampled+compiled` both.
Needs: pip install 'trl==1.12.0'

    python benchmarks/ppo_cpu.py [--rounds 2 --updates 3 --threads 2 --sides trl separate trunk-3 --profile 15]
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from peers.case import Case, Measured, config_of, measure, write_models
from peers.floor import floor, measured_rates, weights_of

SIDES = ("trl", "separate", "lora", "trunk", "trunk-3")
WAYS = ("sampled", "compiled")
PHASES = ("generate", "judge", "update", "step")


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as home:
        case = Case(
            home=home,
            shape="cpu",
            rows=64,
            prompt_tokens=32,
            new_tokens=48,
            is_unequal=False,
            epochs=2,
            minibatches=4,
            updates=args.updates,
            micro_batch=16,
            threads=args.threads,
        )
        write_models(Path(home), case.shape, case.dtype, with_lora=any(side.startswith("lora") for side in args.sides))
        rounds: dict[str, list[Measured]] = {side: [] for side in args.sides}
        for number in range(args.rounds):
            is_last = number == args.rounds - 1
            for side in args.sides:
                rounds[side].append(measure_side(side, replace(case, profile=args.profile if is_last else 0)))
    prefix = "cpu/" if args.clock == "cpu" else ""
    show({side: fastest(results, prefix) for side, results in rounds.items()}, case)
    show_floor(case)
    for side, results in rounds.items():
        show_costs(side, results[-1])


def measure_side(side: str, case: Case) -> Measured:
    result = measure("trl_side", case) if side == "trl" else measure("kedge_side", kedge_case(side, case))
    assert isinstance(result, Measured)
    return result


def kedge_case(side: str, case: Case) -> Case:
    """The case with what the name of a side says, such as `trunk-3+sampled`."""
    placement, *ways = side.split("+")
    roles, _, layers = placement.partition("-")
    return replace(
        case,
        roles=roles,
        trunk_layers=int(layers) if layers else None,
        old_logprobs="sampled" if "sampled" in ways else "recomputed",
        compile="compiled" in ways,
    )


def known_side(text: str) -> str:
    placement, *ways = text.split("+")
    if placement not in SIDES or not set(ways) <= {*WAYS} or (placement == "trl" and ways):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected one of {', '.join(SIDES)}, those but trl with +{' or +'.join(WAYS)} behind it"
        )
    return text


def fastest(results: list[Measured], prefix: str) -> dict[str, float]:
    """Seconds by phase of the fastest update, and the largest memory of all."""
    laps = [lap for result in results for lap in result.laps]
    best = min(laps, key=lambda lap: lap[f"{prefix}step"])
    return {phase: best[f"{prefix}{phase}"] for phase in PHASES} | {"peak": max(result.peak_gib for result in results)}


def show(sides: dict[str, dict[str, float]], case: Case) -> None:
    peer, tokens = sides.get("trl"), case.rows * (case.prompt_tokens + case.new_tokens)
    width = max(9, *map(len, sides))
    print(
        f"{'':{width}} {'generate':>9} {'judge':>8} {'update':>8} {'whole s':>8} {'tokens/s':>9} {'peak GiB':>9}",
        end="",
    )
    print("   TRL's seconds over these: generate, judge, update, whole" if peer else "")
    for side, best in sides.items():
        seconds = " ".join(f"{best[phase]:8.2f}" for phase in PHASES)
        print(f"{side:{width}}  {seconds} {tokens / best['step']:>9,.0f} {best['peak']:>9.2f}", end="")
        print("   " + " ".join(f"{peer[phase] / best[phase]:6.2f}x" for phase in PHASES) if peer else "")


def show_floor(case: Case) -> None:
    """The time of the operations of `separate` at the rate of a large matrix product, with as many threads."""
    torch.set_num_threads(case.threads or torch.get_num_threads())
    rates = measured_rates("cpu")
    lengths = [case.new_tokens] * case.rows
    shape = weights_of(config_of(case.shape))
    least = floor(shape, rates, lengths, prompt=case.prompt_tokens, epochs=case.epochs, minibatches=case.minibatches)
    phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in least.items())
    print(f"the floor of separate: {phases}, whole {sum(least.values()):.2f} s at {rates.matrix / 1e9:.0f} GFLOP/s")


def show_costs(side: str, result: Measured) -> None:
    if result.costs:
        (_, calls, whole), *largest = result.costs
        print(f"\n{side}: {calls:,} operators, {whole:.3f} s the largest:")
        for name, count, seconds in largest:
            print(f"{seconds * 1e3:9.1f} ms {seconds / whole:6.1%} {count:7,}  {name}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--updates", type=int, default=3, help="of each side and round; the first warms up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sides", nargs="+", type=known_side, default=list(SIDES))
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: for a machine with other work")
    parser.add_argument("--profile", type=int, default=0, help="so many of the largest costs of each Kedge side")
    args = parser.parse_args()
    if args.updates < 2 or args.rounds < 1:
        parser.error(f"--updates {args.updates}, --rounds {args.rounds}: at least 2 and 1 are needed")
    return args


if __name__ == "__main__":
    main()
