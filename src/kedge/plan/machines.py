"""What a run may be planned for: GPUs by their data sheets, this machine, or so many GiB.

The H200 is the one card that Kedge was measured on: the shares in `duration` are of its data sheet. Other cards are
scaled by theirs, and nothing about them is measured. Prices are never shipped: they change by the week.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from kedge.core.errors import ConfigError
from kedge.core.suggest import did_you_mean
from kedge.plan import scale

GIB: Final = 2**30
Kind = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a run has: some equal GPUs, or the cores of a CPU."""

    name: str
    kind: Kind
    memory: int
    """Bytes of one GPU, or of the machine."""
    flops: float
    """Of dense bfloat16 products on a GPU by its data sheet, of float32 products on a CPU; a second."""
    bandwidth: float
    """Of its memory, bytes a second."""
    watts: float
    """Of one board at full load."""
    gpus: int = 1
    price: float | None = None
    """US dollars an hour of one GPU, or of the machine."""
    label_price: float | None = None
    """US dollars for one label of a person or a judge."""

    @property
    def is_measured(self) -> bool:
        """Whether the shares of the hardware's rates that software reaches were measured on such a card."""
        return self.name == "h200"


def _card(name: str, gib: float, tflops: float, bandwidth: float, watts: float) -> Machine:
    return Machine(
        name=name, kind="cuda", memory=int(gib * GIB), flops=tflops * 1e12, bandwidth=bandwidth * 1e12, watts=watts
    )


CARDS: Final = {
    card.name: card
    for card in (
        # What torch can have of the memory, dense bfloat16 TFLOP/s, TB/s, W.
        _card("h200", 139.8, 989, 4.8, 700),
        _card("h100", 79.1, 989, 3.35, 700),
        _card("h100-pcie", 79.1, 756, 2.0, 350),
        _card("b200", 178.3, 2250, 8.0, 1000),
        _card("a100-80g", 79.1, 312, 2.04, 400),
        _card("a100-40g", 39.4, 312, 1.56, 400),
        _card("l40s", 44.4, 362, 0.864, 350),
        _card("l4", 22.0, 121, 0.3, 72),
        _card("a10", 22.0, 125, 0.6, 150),
        _card("rtx-6000-ada", 47.4, 364, 0.96, 300),
        _card("5090", 31.4, 210, 1.79, 575),
        _card("4090", 23.6, 165, 1.01, 450),
        _card("3090", 23.6, 71, 0.936, 350),
        _card("t4", 14.6, 65, 0.32, 70),
    )
}
"""By the name that `--gpu` takes."""
UNKNOWN_CARD: Final = CARDS["a100-80g"]
"""Rates of a card of which only the memory is given."""
_CPU_CORE_FLOPS: Final = 1.0e11
"""Of one core with AVX2 in large float32 products: 197 GFLOP/s on two cores (docs/speed.md)."""
_CPU_BANDWIDTH: Final = 2.0e10
_CPU_CORE_WATTS: Final = 10.0
NVLINK: Final = 4.5e11
NETWORK: Final = 5e10
"""Bytes a second of a GPU in one direction, within a machine and to others, by data sheets."""


def find_machine(
    gpu: str | None, *, gpus: int = 1, price: float | None = None, label_price: float | None = None
) -> Machine:
    """The machine that was asked for: a card by name, one of so many GiB, `cpu`, or None for this machine."""
    for name, number in (("price", price), ("label-price", label_price)):
        if number is not None and not 0 <= number < float("inf"):
            raise ConfigError(f"--{name}: found {number:g}, expected US dollars, 0 or more")
    if gpus < 1:
        raise ConfigError(f"--gpus: found {gpus}, expected 1 or more; without a GPU: --gpu cpu")
    machine = this_machine() if gpu is None else _named(gpu)
    if machine.kind == "cpu" and gpus > 1:
        raise ConfigError(f"--gpus: found {gpus}, and the machine that is planned for has no GPU; name one: --gpu h200")
    return replace(machine, gpus=gpus, price=price, label_price=label_price)


def _named(gpu: str) -> Machine:
    """
    >>> _named("24GiB").name, _named("A100-80G").flops
    ('24 GiB', 312000000000000.0)
    """
    asked = gpu.strip().lower().replace(" ", "-")
    if asked == "cpu":
        return _cpu()
    short = asked.removeprefix("nvidia-").removeprefix("rtx-")
    if (card := CARDS.get(asked) or CARDS.get(short)) is not None:
        return card
    if (size := re.fullmatch(r"(\d+(?:\.\d+)?)-?(?:gib|gb|g)?", asked)) and 0 < float(size[1]) <= 2**20:
        return replace(UNKNOWN_CARD, name=f"{float(size[1]):g} GiB", memory=int(float(size[1]) * GIB))
    raise ConfigError(
        f"--gpu: no card named '{gpu}'{did_you_mean(asked, [*CARDS, 'cpu'])}; one of {', '.join(CARDS)}, cpu, or its "
        "memory in GiB (--gpu 48)"
    )


def this_machine() -> Machine:
    """The first GPU that the driver tells of, else the CPU. torch is not asked: it need not be there."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        told = []
    return card_of(told[0]) if told else _cpu()


def card_of(told: str) -> Machine:
    """The card behind a line of the driver: name, MiB. One that no data sheet is here for has its memory alone.

    >>> card_of("NVIDIA H200, 143771").name, card_of("NVIDIA A100-SXM4-80GB, 81920").name, card_of("X, 2048").name
    ('h200', 'a100-80g', 'x')
    """
    name, _, mib = told.rpartition(",")
    words = re.sub(r"[^a-z0-9]+", " ", name.lower().replace("80gb", "80g").replace("40gb", "40g")).split()
    known = [card for card in CARDS if all(word in words for word in card.split("-"))]
    if known:
        return CARDS[max(known, key=len)]
    return replace(UNKNOWN_CARD, name=name.strip().lower() or "gpu", memory=int(float(mib) * 2**20))


def links_of(machine: Machine) -> scale.Machine:
    """The machine with links of a data sheet, 8 GPUs each."""
    return scale.Machine(
        flops=machine.flops,
        bandwidth=machine.bandwidth,
        memory=machine.memory,
        nvlink=NVLINK,
        network=NETWORK,
    )


def _cpu() -> Machine:
    cores = os.cpu_count() or 1
    return Machine(
        name="cpu",
        kind="cpu",
        memory=_main_memory(),
        flops=cores * _CPU_CORE_FLOPS,
        bandwidth=_CPU_BANDWIDTH,
        watts=cores * _CPU_CORE_WATTS,
    )


def _main_memory() -> int:
    try:
        line = next(
            line for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines() if line[:9] == "MemTotal:"
        )
        return int(line.split()[1]) * 2**10
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
