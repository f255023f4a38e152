"""The routes of a language model: /v1/models, /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from kedge.core.errors import DataError
from kedge.data.messages import as_messages
from kedge.data.template import encode_prompt
from kedge.data.tokenizer import tokens_of
from kedge.rollout.settings import SamplingSettings
from kedge.serving.app import Door, model_routes
from kedge.serving.jobs import Job
from kedge.serving.text_model import Answered, Question, TextModel
from kedge.serving.wire import (
    ApiError,
    ChatRequest,
    Choice,
    CompletionRequest,
    TokenLogprob,
    Usage,
    chat_reply,
    completion_reply,
    read_request,
)
from kedge.stages.rl.reward import decoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST = 256
"""Tokens of an answer to a conversation, unless asked for otherwise; less where the window leaves less."""
_GREEDY_BELOW = 1e-6
"""A temperature of 0 always takes the likeliest token."""


def text_app(model: TextModel, door: Door) -> FastAPI:
    """The application; answers are computed by the door's worker, with `model.compute`."""
    app = model_routes(door)
    about = {"model": door.name, "system_fingerprint": f"kedge-{model.fingerprint}"}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]  # fastapi calls it
        asked = read_request(await door.body(request), ChatRequest)
        door.check_model(asked.model)
        top = (asked.top_logprobs or 0) if asked.logprobs else None
        if asked.top_logprobs and not asked.logprobs:
            raise ApiError(400, "'top_logprobs' goes with 'logprobs': true", param="top_logprobs")
        prompt = _conversation(model.tokenizer, asked)
        room = model.window - len(prompt)
        longest = asked.max_completion_tokens or asked.max_tokens or max(1, min(LONGEST, room))
        ask = _Ask([tuple(prompt)], asked, longest, _seed(asked), top=top)
        answered = await _answered(request, model, door, ask)
        choices = [_choice(model.tokenizer, answer, asked.stops) for answer in answered]
        return JSONResponse(chat_reply(choices, _usage(ask, answered), {**about, "seed": ask.seed}))

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        asked = read_request(await door.body(request), CompletionRequest)
        door.check_model(asked.model)
        if not asked.max_tokens and not asked.echo:
            raise ApiError(400, "'max_tokens' is 0: nothing would be answered; 0 goes with 'echo': true")
        prompts = _prompts(model, asked)
        ask = _Ask(prompts, asked, asked.max_tokens, _seed(asked), top=asked.logprobs, with_prompt=asked.echo)
        answered = await _answered(request, model, door, ask)
        shown = [prompt for prompt in ask.prompts for _ in range(asked.n)] if asked.echo else [()] * len(answered)
        choices = [
            _choice(model.tokenizer, answer, asked.stops, prompt=prompt)
            for answer, prompt in zip(answered, shown, strict=True)
        ]
        return JSONResponse(completion_reply(choices, _usage(ask, answered), {**about, "seed": ask.seed}))

    return app


@dataclass(frozen=True, slots=True)
class _Ask:
    """A request in tokens."""

    prompts: Sequence[tuple[int, ...]]
    request: ChatRequest | CompletionRequest
    longest: int
    seed: int
    top: int | None = None
    with_prompt: bool = False

    @property
    def settings(self) -> SamplingSettings | None:
        """None where nothing is sampled."""
        if not self.longest:
            return None
        asked = self.request
        is_greedy = asked.temperature < _GREEDY_BELOW
        return SamplingSettings(
            temperature=1.0 if is_greedy else asked.temperature,
            top_p=1.0 if is_greedy else asked.top_p,
            top_k=1 if is_greedy else asked.top_k,
            max_new_tokens=self.longest,
            stop=asked.stops,
        )

    def questions(self) -> list[Question]:
        return [
            Question(tokens=prompt, seed=self.seed, answers=self.request.n, top=self.top, with_prompt=self.with_prompt)
            for prompt in self.prompts
        ]


async def _answered(request: Request, model: TextModel, door: Door, ask: _Ask) -> list[Answered]:
    if any(not stop for stop in ask.request.stops):
        raise ApiError(400, "'stop' holds an empty text, which every answer contains", param="stop")
    for prompt in ask.prompts:
        if len(prompt) + ask.longest > model.window:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens, which leave no room for {ask.longest} more in the model's "
                f"window of {model.window}",
                param="max_tokens",
                code="context_length_exceeded",
            )
    job = Job(kind=ask.settings, rows=len(ask.prompts) * ask.request.n, payload=ask.questions())
    return cast("list[Answered]", await door.computed(request, job))


def _seed(asked: ChatRequest | CompletionRequest) -> int:
    return secrets.randbits(31) if asked.seed is None else asked.seed


def _conversation(tokenizer: PreTrainedTokenizerBase, asked: ChatRequest) -> list[int]:
    try:
        messages = as_messages(asked.messages, text_role="user", field="messages")
    except DataError as error:
        raise ApiError(400, str(error), param="messages") from None
    try:
        return encode_prompt(tokenizer, messages)
    except (DataError, ValueError) as error:  # well-formed, but not for this model's chat template
        raise ApiError(
            422, f"the model's chat template cannot write this conversation: {error}", param="messages"
        ) from (None)


def _prompts(model: TextModel, asked: CompletionRequest) -> list[tuple[int, ...]]:
    given = asked.prompt
    several = cast(
        "Sequence[str | Sequence[int]]", given if isinstance(given, list) and not _is_tokens(given) else [given]
    )
    prompts = [tuple(tokens_of(model.tokenizer, one) if isinstance(one, str) else one) for one in several]
    for prompt in prompts:
        if not prompt:
            raise ApiError(400, "a prompt is empty, and nothing can follow nothing", param="prompt")
        if not all(0 <= token < model.vocabulary for token in prompt):
            raise ApiError(400, f"a token is not among the {model.vocabulary} of the model", param="prompt")
    if not prompts:
        raise ApiError(400, "there is no prompt", param="prompt")
    return prompts


def _is_tokens(given: Sequence[object]) -> bool:
    return bool(given) and isinstance(given[0], int)


def _usage(ask: _Ask, answered: Sequence[Answered]) -> Usage:
    return Usage(
        prompt_tokens=sum(map(len, ask.prompts)), completion_tokens=sum(answer.num_sampled for answer in answered)
    )


def _choice(
    tokenizer: PreTrainedTokenizerBase, answer: Answered, stops: Sequence[str], *, prompt: tuple[int, ...] = ()
) -> Choice:
    """The answer up to its first stop string; with a prompt, that stands before it."""
    before, text = decoded(tokenizer, prompt), decoded(tokenizer, answer.tokens)
    ends = [text.index(stop) for stop in stops if stop in text]
    text = before + text[: min(ends, default=len(text))]
    if answer.facts is None:
        return Choice(text=text, is_finished=answer.is_finished)
    tokens = (*prompt, *answer.tokens)[-len(answer.facts) :] if answer.facts else ()
    offsets = _offsets(tokenizer, tokens)
    written = [
        TokenLogprob(
            decoded(tokenizer, [token]),
            facts and facts.logprob,
            tuple((decoded(tokenizer, [other]), logprob) for other, logprob in facts.top) if facts else (),
        )
        for token, facts, offset in zip(tokens, answer.facts, offsets, strict=True)
        if offset < len(text) or not ends
    ]
    return Choice(
        text=text, is_finished=answer.is_finished, tokens=tuple(written), offsets=tuple(offsets[: len(written)])
    )


def _offsets(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[int]:
    """Where each token begins in the text of all of them; parts of one character begin where it does."""
    offsets: list[int] = []
    for count in range(len(tokens)):
        offsets.append(len(decoded(tokenizer, tokens[:count]).rstrip("\ufffd")))
    return offsets
