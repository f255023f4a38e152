"""How far generation may run ahead of training. The only file that sees a future."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future

from kedge.core.protocols import Generator
from kedge.core.records import Prompts, Rollouts
from kedge.core.seeds import seed_for


def stream(
    generator: Generator, batches: Iterable[Prompts], *, lag: int, seed: int, start: int = 0
) -> Iterator[Rollouts]:
    """Rollouts of the batches, in order. `lag` 0 is strictly on-policy; with 1, they are one version old.

    `start` is the number of the first batch: a resumed run samples what the uninterrupted one would have sampled.
    """
    in_flight = deque[Future[Rollouts]]()
    for number, prompts in enumerate(batches, start=start):
        in_flight.append(generator.submit(prompts, seed_for(seed, "rollout", number)))
        if len(in_flight) > lag:
            yield in_flight.popleft().result()
    while in_flight:
        yield in_flight.popleft().result()
