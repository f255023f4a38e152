"""Weights on their way to a server: what is sent, how a server takes it, and the proof that it did."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from kedge.core.errors import GeneratorError, SyncError
from kedge.core.urls import redacted
from kedge.rollout.vllm.http import MODEL, Api
from kedge.rollout.vllm.weights import refuse_other_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """Weights of a version, as files that servers see too."""

    folder: Path
    version: int
    probe: Sequence[int]
    """A text that both sides score."""
    scores: Sequence[float]
    """The trainer's."""
    limit: float
    """Nats a token that a server's may be apart from them."""
    adapter: str | None = None
    """The name by which a server knows these weights where they are an adapter; None: all weights."""
    what: str = "the weights"

    @property
    def model(self) -> str:
        """Whom a request asks for."""
        return self.adapter or MODEL


def deliver(api: Api, handover: Handover, *, is_asleep: bool) -> None:
    """A server has these weights, is awake, and scores the probe as the trainer does, or an error says what is
    wrong."""
    folder = str(handover.folder.resolve())
    try:
        if handover.adapter is not None:
            with api.waking() if is_asleep else nullcontext():
                api.load_adapter(handover.adapter, folder)
        else:
            with api.waking() if is_asleep else api.paused():
                api.load_weights(folder, handover.version)
            api.refuse_other_version(handover.version)
    except SyncError:
        raise
    except GeneratorError as error:
        raise SyncError(f"weights of version {handover.version} could not be handed over: {error}") from error
    scores = api.score(handover.probe, model=handover.model)
    refuse_other_weights(handover.scores, scores, limit=handover.limit, url=redacted(api.url), what=handover.what)
