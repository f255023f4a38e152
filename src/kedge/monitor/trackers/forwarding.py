"""A tracker around another one: the base of wrappers that add something to a verb or two and pass on the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kedge.core.protocols import Metrics, Tracker


class ForwardingTracker:
    """Passes every call on to `inner`, unchanged. A wrapper overrides the verbs that it adds something to."""

    def __init__(self, inner: Tracker) -> None:
        self.inner = inner

    def log(self, metrics: Metrics, *, step: int) -> None:
        self.inner.log(metrics, step=step)

    def event(self, event: Mapping[str, Any]) -> None:
        self.inner.event(event)

    def close(self) -> None:
        self.inner.close()
