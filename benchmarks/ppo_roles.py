"""Where an update of Kedge goes, role by role: seconds by the clock, seconds that a GPU worked, and its kernels.

Every question to a role and every step of it is waited for, so that what it took is its own; the whole is a little
slower for it. Seconds by the clock are means over the updates after the first; the GPU's are of one update more, under
torch's profiler. Programs are those that torch.compile has made so far: they should come in the first update alone.

    python benchmarks/ppo_roles.py --compile                                       # the case of docs/speed.md
    python benchmarks/ppo_roles.py --compile --lengths unequal --updates 5
    python benchmarks/ppo_roles.py --shape tiny --rows 8 --prompt-tokens 8 --new-tokens 16 --micro-batch 2   # anywhere
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile, record_function

from kedge.trainers.ppo import PPORoles
from peers.case import Case, write_models
from peers.kedge_side import HOLD, Update, wanted_for
from peers.options import add_sizes, case_of, sized

MARK = "role "
"""Stands before what is ours among the profiler's events."""


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as home:
        case = case_of(args, home, roles=args.roles)
        write_models(Path(home), case.shape, case.dtype, with_lora=case.roles == "lora")
        clock = Clock(case.device)
        update = Update(case, HOLD[case.roles](wanted_for(case)))
        watch_roles(update, clock)
        for number in range(case.updates):
            if number == 1:
                clock.seconds.clear()
            update(number)
            lap, made = update.watch.laps[-1], counters["stats"]["unique_graphs"]
            phases = ", ".join(f"{phase} {lap[phase]:.3f}" for phase in ("generate", "judge", "update"))
            print(f"update {number}: {lap['step']:.3f} s ({phases}), {update.tokens[-1]:,} tokens, {made} programs")
        show(dict(clock.seconds), case.updates - 1, profiled(case, update), args.kernels)


class Clock:
    def __init__(self, device: str) -> None:
        self._device = device
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, name: str, call: Callable[[], Any]) -> Any:
        self._wait()
        start = time.perf_counter()
        with record_function(MARK + name):
            found = call()
            self._wait()
        self.seconds[name] += time.perf_counter() - start
        return found

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


class Watched:
    """A role, or the generator, each of whose calls is timed."""

    def __init__(self, role: Any, name: str, clock: Clock) -> None:
        self._role, self._name, self._clock = role, name, clock

    def __getattr__(self, method: str) -> Callable[..., Any]:
        call = getattr(self._role, method)
        return lambda *args, **named: self._clock.timed(f"{self._name}.{method}", lambda: call(*args, **named))


def watch_roles(update: Update, clock: Clock) -> None:
    names = ("reward", "policy", "reference", "critic")
    update.roles = PPORoles(**{name: Watched(getattr(update.roles, name), name, clock) for name in names})
    update.generator = Watched(update.generator, "generator", clock)


def profiled(case: Case, update: Update) -> list[tuple[str, str, float]]:
    """The kernels of one update: whose they are, their names and seconds; none without a GPU."""
    if case.device != "cuda":
        return []
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watch:
        update(0)
    events = list(watch.events())
    calls = [
        (event.name.removeprefix(MARK), event.time_range)
        for event in events
        if event.name.startswith(MARK) and event.device_type.name == "CPU"
    ]
    # The profiler repeats marks, ours and the optimiser's, among the device's events.
    kernels = [one for one in events if one.device_type.name == "CUDA" and not one.name.startswith((MARK, "Optimizer"))]
    found: list[tuple[str, str, float]] = []
    for one in kernels:
        begins = one.time_range.start
        whose = next((name for name, range_ in calls if range_.start <= begins < range_.end), "between")
        found.append((whose, one.name, (one.time_range.end - begins) / 1e6))
    return found


def show(seconds: dict[str, float], updates: int, kernels: list[tuple[str, str, float]], largest: int) -> None:
    print(f"\n{'seconds of an update':24} {'clock':>8} {'GPU':>8} {'kernels':>8}")
    for name in [*seconds, "between"] if kernels else seconds:
        own = [took for whose, _, took in kernels if whose == name]
        clock = f"{seconds[name] / updates:8.3f}" if name in seconds else f"{'':8}"
        print(f"{name:24} {clock}" + (f" {sum(own):8.3f} {len(own):8,}" if kernels else ""))
    by_name: dict[str, list[float]] = defaultdict(list)
    for whose, name, took in kernels:
        if whose != "generator.generate":
            by_name[name].append(took)
    if by_name:
        print("\nthe largest kernels but those of generation:")
    for name, took in sorted(by_name.items(), key=lambda one: -sum(one[1]))[:largest]:
        print(f"{sum(took) * 1e3:9.1f} ms {len(took):7,}  {name[:100]}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, updates=4, micro_batch=32)
    parser.add_argument("--roles", choices=list(HOLD), default="separate")
    parser.add_argument("--kernels", type=int, default=20, help="so many of the largest are listed")
    return sized(parser)


if __name__ == "__main__":
    main()
