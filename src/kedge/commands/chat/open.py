"""From the arguments of `kedge chat` to a chat that is ready: what is wrong is told before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kedge.commands.chat.model import ChatModel
from kedge.commands.chat.session import Session, with_temperature
from kedge.commands.chat.verdicts import VerdictFile
from kedge.commands.export.source import find_source
from kedge.core.errors import ConfigError
from kedge.models.loading.load import DTypeName
from kedge.rollout.settings import SamplingSettings
from kedge.stages.shared.device import checked_device


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    models: Sequence[str]
    system: str = ""
    temperature: float = 0.7
    top_p: float = 1.0
    max_new_tokens: int = 512
    seed: int = 0
    feedback: Path | None = None
    chat_template: str | None = None
    device: str = "auto"
    dtype: DTypeName = "auto"


def open_chat(request: ChatRequest) -> Session:
    """The models loaded, and the file of verdicts checked."""
    if not 1 <= len(request.models) <= 2:
        raise ConfigError(f"kedge chat takes one model, or two to compare; found {len(request.models)}")
    kind = "thumbs" if len(request.models) == 1 else "pairs"
    verdicts = VerdictFile(request.feedback or Path(f"chat-{kind}.jsonl"), kind)
    sampling = with_temperature(SamplingSettings(), str(request.temperature)).model_copy(
        update={"top_p": request.top_p, "max_new_tokens": request.max_new_tokens}
    )
    device = checked_device(request.device)
    sources = [find_source(model) for model in request.models]
    models = [
        ChatModel(source.place, name=given, device=device, dtype=request.dtype, chat_template=request.chat_template)
        for given, source in zip(request.models, sources, strict=True)
    ]
    return Session(models=models, verdicts=verdicts, sampling=sampling, seed=request.seed, system=request.system)
