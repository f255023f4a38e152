"""What the micro-batches of a step add up to: loss, facts to log and peaks, on one process and over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What a micro-batch adds to a step: its loss and each fact to log, as sums over its items, not means.

    `items` is how many items the facts are sums over, where that is not the weight of the loss. Of `peaks`, the largest
    over the micro-batches is logged.
    """

    loss: Tensor
    facts: Mapping[str, Tensor]
    items: Tensor | None = None
    peaks: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(slots=True, kw_only=True)
class Totals:
    """Sums over the micro-batches of one term, kept on the device until the step is over."""

    weight: float
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    facts: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    items: Tensor | None = None
    peaks: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def add(self, sums: Sums | Totals) -> None:
        self.loss = sums.loss.detach().float() + self.loss  # a number from the host makes nobody wait
        for name, value in sums.facts.items():
            fact = value.detach().float()
            self.facts[name] = self.facts[name] + fact if name in self.facts else fact
        for name, value in sums.peaks.items():
            peak = value.detach().float()
            self.peaks[name] = torch.maximum(self.peaks[name], peak) if name in self.peaks else peak
        if sums.items is not None:
            self.items = sums.items if self.items is None else self.items + sums.items

    def on(self, device: torch.device) -> Totals:
        return replace(
            self,
            loss=self.loss.to(device),
            facts={name: fact.to(device) for name, fact in self.facts.items()},
            items=None if self.items is None else self.items.to(device),
            peaks={name: peak.to(device) for name, peak in self.peaks.items()},
        )

    def means(self) -> dict[str, Tensor]:
        items = self.weight if self.items is None else self.items
        facts = {name: value / items for name, value in self.facts.items()}
        return {"loss": self.loss / self.weight, **facts, **self.peaks}


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one process tells the others about its share of a step, on the host; one alone keeps it on its device."""

    totals: Sequence[Totals]
    """Of each term."""
    reached: Sequence[bool] = ()
    """Which weights have a gradient."""
    norm: Tensor | None = None
    """Of the gradient, where a single process computes all of it."""


def added(shares: Sequence[Totals], device: torch.device) -> Totals:
    """The sums of all processes, whose weight is that of the first; a single one is left as it is."""
    if len(shares) == 1:
        return shares[0]
    totals = Totals(weight=shares[0].weight)
    for share in shares:
        totals.add(share)
    return totals.on(device)


def read(numbers: Sequence[Tensor]) -> list[float]:
    """All numbers with a single wait for the device."""
    return torch.stack(list(numbers)).tolist()
