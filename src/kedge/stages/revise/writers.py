"""Who writes: the model itself, whose texts are kept in pieces, or a model behind an endpoint, whose replies are kept
as they come. A stage that is killed goes on with what is kept, and ends with the same texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from kedge.core.errors import RewardError
from kedge.core.files import write_json
from kedge.core.records import repeated
from kedge.core.seeds import seed_for
from kedge.data.examples import Message, Messages
from kedge.data.template import encode_prompt
from kedge.models.loading.load import load_causal
from kedge.rewards.client import Call, CallFailed
from kedge.rewards.judge_protocol import chat_body, content_of
from kedge.rewards.paid import PaidCalls
from kedge.rewards.settings import FailureSettings, JudgeEndpoint
from kedge.rewards.spending.tokens import Spent
from kedge.rollout.settings import SamplingSettings
from kedge.stages.revise.settings import ReviseSettings
from kedge.stages.rl.answering import Answered, sample_answers
from kedge.stages.rl.prompts import prompt_limit
from kedge.stages.shared.context import Context
from kedge.stages.shared.device import pick_device
from kedge.stages.shared.tokenizer import tokenizer_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PIECES = "pieces"
CALLS = "calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwritten:
    """A text that could not be had, and why: `too_long` (the request leaves no room in the window) or `failed`."""

    reason: str
    detail: str = ""


Text = str | Unwritten


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked about the prompt at a place."""

    place: int
    messages: Messages


def asking(place: int, text: str) -> Request:
    """A request of one message."""
    return Request(place=place, messages=(Message("user", text),))


class Writer(Protocol):
    def write(self, requests: Sequence[Request], purpose: str) -> list[Text]:
        """A text for each request. `purpose` names what they are for: with the place, it is what an answer depends on
        besides the request."""
        ...


class LocalWriter:
    """A model of ours. A text depends on the request, its place and the purpose, on no other row."""

    def __init__(self, context: Context, settings: ReviseSettings) -> None:
        self._context, self._settings = context, settings
        self._name = context.input("from")
        self._longest, _ = prompt_limit(self._name, None, settings.max_new_tokens)
        self._sampling = SamplingSettings(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_new_tokens=settings.max_new_tokens,
        )

    def write(self, requests: Sequence[Request], purpose: str) -> list[Text]:
        if not requests:
            return []
        name = f"{purpose.replace(' ', '-')}-{requests[0].place:07d}.json"
        return _kept(self._context, name, lambda: self._sampled(requests, purpose))

    def _sampled(self, requests: Sequence[Request], purpose: str) -> list[Text]:
        tokens = [encode_prompt(self._tokenizer, request.messages) for request in requests]
        fits = [place for place, own in enumerate(tokens) if len(own) <= self._longest]
        texts: list[Text] = [Unwritten(reason="too_long", detail=f"{len(own):,} tokens") for own in tokens]
        if not fits:
            return texts
        rows = repeated([tokens[place] for place in fits], ids=[requests[place].place for place in fits], answers=1)
        rollouts = sample_answers(
            self._model,
            self._tokenizer,
            rows,
            self._sampling,
            seed=seed_for(self._context.seed, f"revise {purpose}"),
            at_once=self._settings.rows,
            world=self._context.world,
        )
        answered = Answered(rollouts=rollouts, tokenizer=self._tokenizer, is_cached=False)
        for place, text in zip(fits, answered.texts(), strict=True):
            texts[place] = text
        return texts

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return tokenizer_for(self._name, self._context.chat_template)

    @cached_property
    def _model(self) -> PreTrainedModel:
        """Loaded when something is to be written: a stage that is resumed at its end needs no weights."""
        return load_causal(self._name, dtype=self._settings.dtype, device=pick_device(self._context.device))


class EndpointWriter:
    """A model behind an endpoint, asked by the first process. No call is paid for twice."""

    def __init__(self, context: Context, endpoint: JudgeEndpoint, failures: FailureSettings) -> None:
        self._context, self._endpoint, self._failures = context, endpoint, failures
        self._asked = self._failed = 0
        context.once(self._open)

    def _open(self) -> None:
        self._calls = PaidCalls(
            self._endpoint,
            self._context.folder / CALLS,
            budget=self._endpoint.budget,
            rate=self._endpoint.rate,
            seed=self._context.seed,
            note=lambda code, words: self._context.event("warning", f"revise.{code}", words),
        )

    def write(self, requests: Sequence[Request], purpose: str) -> list[Text]:
        del purpose  # the request alone decides
        texts = self._context.once(lambda: self._ask(requests))
        failed = [text for text in texts if isinstance(text, Unwritten)]
        self._asked += len(texts)
        self._failed += len(failed)
        if self._failed > self._failures.max_share * self._asked:
            raise RewardError(
                f"{self._endpoint.model}: {self._failed:,} of {self._asked:,} calls failed, more than "
                f"{self._failures.max_share:.0%} (failures.max_share); the last: {failed[-1].detail}. What was "
                "answered is kept: --resume asks the others alone"
            )
        return texts

    def spent(self) -> Spent:
        return self._context.once(lambda: self._calls.spent)

    def _ask(self, requests: Sequence[Request]) -> list[Text]:
        bodies = [chat_body(self._endpoint, request.messages[0].content) for request in requests]
        replies = self._calls.ask([Call(body=body, read=str, keep=content_of) for body in bodies])
        return [
            Unwritten(reason="failed", detail=str(text)) if isinstance(text, CallFailed) else text for text in replies
        ]


def _kept(context: Context, name: str, make: Callable[[], list[Text]]) -> list[Text]:
    """Texts that were written before, by this run; else those of `make`, which are kept."""
    file = context.folder / PIECES / name

    def read() -> list[Any] | None:
        file.parent.mkdir(parents=True, exist_ok=True)
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    rows = context.once(read)
    if rows is not None:
        return [row if isinstance(row, str) else Unwritten(**row) for row in rows]
    texts = make()
    plain = [text if isinstance(text, str) else {"reason": text.reason, "detail": text.detail} for text in texts]
    context.once(lambda: write_json(file, plain))
    return texts
