"""The time of an update of Kedge, role by role: wall-clock seconds, seconds that the GPU was busy, and its kernels.

The GPU is synchronised after every call to a role, so that a call's time is its own; the whole update is a little
slower for it. Wall-clock seconds are means over the updates after the first; the GPU's are of one update more, under
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
from peers.kedge_side import BUILD_ROLES, Update, role_spec
from peers.options import add_sizes, case_of, parse_sizes

MARK = "role "
"""Prefix of our own marks among the profiler's events."""


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as home:
        case = case_of(args, home, roles=args.roles)
        write_models(Path(home), case.shape, case.dtype, with_lora=case.roles == "lora")
        timer = RoleTimer(case.device)
        update = Update(case, BUILD_ROLES[case.roles](role_spec(case)))
        time_roles(update, timer)
        for number in range(case.updates):
            if number == 1:
                timer.seconds.clear()
            update(number)
            lap, programs = update.stopwatch.laps[-1], counters["stats"]["unique_graphs"]
            phases = ", ".join(f"{phase} {lap[phase]:.3f}" for phase in ("generate", "judge", "update"))
            print(f"update {number}: {lap['step']:.3f} s ({phases}), {update.tokens[-1]:,} tokens, {programs} programs")
        show(dict(timer.seconds), case.updates - 1, profiled(case, update), args.kernels)


class RoleTimer:
    """Seconds by the name of a call; the GPU is synchronised before and after each."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, name: str, call: Callable[[], Any]) -> Any:
        self._wait()
        start = time.perf_counter()
        with record_function(MARK + name):
            result = call()
            self._wait()
        self.seconds[name] += time.perf_counter() - start
        return result

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


class TimedRole:
    """A role, or the generator, each of whose calls is timed."""

    def __init__(self, role: Any, name: str, timer: RoleTimer) -> None:
        self._role, self._name, self._timer = role, name, timer

    def __getattr__(self, method: str) -> Callable[..., Any]:
        call = getattr(self._role, method)
        return lambda *args, **kwargs: self._timer.timed(f"{self._name}.{method}", lambda: call(*args, **kwargs))


def time_roles(update: Update, timer: RoleTimer) -> None:
    """Put a timer around the roles and the generator of `update`."""
    names = ("reward", "policy", "reference", "critic")
    update.roles = PPORoles(**{name: TimedRole(getattr(update.roles, name), name, timer) for name in names})
    update.generator = TimedRole(update.generator, "generator", timer)


def profiled(case: Case, update: Update) -> list[tuple[str, str, float]]:
    """The kernels of one update: the call that launched each, its name and its seconds; none without a GPU."""
    if case.device != "cuda":
        return []
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        update(0)
    events = list(profiler.events())
    calls = [
        (event.name.removeprefix(MARK), event.time_range)
        for event in events
        if event.name.startswith(MARK) and event.device_type.name == "CPU"
    ]
    # The profiler repeats marks, ours and the optimiser's, among the device's events.
    marks = (MARK, "Optimizer")
    kernels = [event for event in events if event.device_type.name == "CUDA" and not event.name.startswith(marks)]
    rows: list[tuple[str, str, float]] = []
    for kernel in kernels:
        start = kernel.time_range.start
        whose = next((name for name, span in calls if span.start <= start < span.end), "between")
        rows.append((whose, kernel.name, (kernel.time_range.end - start) / 1e6))
    return rows


def show(seconds: dict[str, float], updates: int, kernels: list[tuple[str, str, float]], largest: int) -> None:
    print(f"\n{'seconds of an update':24} {'clock':>8} {'GPU':>8} {'kernels':>8}")
    for name in [*seconds, "between"] if kernels else seconds:
        own = [duration for whose, _, duration in kernels if whose == name]
        clock = f"{seconds[name] / updates:8.3f}" if name in seconds else f"{'':8}"
        print(f"{name:24} {clock}" + (f" {sum(own):8.3f} {len(own):8,}" if kernels else ""))
    by_name: dict[str, list[float]] = defaultdict(list)
    for whose, name, duration in kernels:
        if whose != "generator.generate":
            by_name[name].append(duration)
    if by_name:
        print("\nthe largest kernels but those of generation:")
    for name, durations in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:largest]:
        print(f"{sum(durations) * 1e3:9.1f} ms {len(durations):7,}  {name[:100]}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, updates=4, micro_batch=32)
    parser.add_argument("--roles", choices=list(BUILD_ROLES), default="separate")
    parser.add_argument("--kernels", type=int, default=20, help="so many of the largest are listed")
    return parse_sizes(parser)


if __name__ == "__main__":
    main()
