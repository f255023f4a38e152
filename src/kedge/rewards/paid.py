"""Calls to a chat endpoint that cost money: asked once, kept at once, at the server's pace, within a budget.

A reply is kept in a file under a hash of address, request and sample as soon as it is there; an equal request is not
sent again, by no run. Every attempt is a line of a ledger before it is sent, with what it may cost at most, and another
line with its reply. So a killed run knows what it paid, also where the cache is gone, and which calls were in flight:
at most those are asked again, which is told, and counted as if they had been paid. Left out: prices of cached prompts,
batching APIs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import httpx2

from kedge.core.errors import ContractStop
from kedge.core.files import hash_bytes, run_errors, write_json
from kedge.core.seeds import seed_for
from kedge.rewards.client import (
    Call,
    CallFailed,
    Client,
    Endpoint,
    Exchange,
    Pace,
    Refused,
    Unreadable,
    all_of_it,
    failed,
    key_from,
)
from kedge.rewards.context import unheard
from kedge.rewards.judge_protocol import chat_url
from kedge.rewards.settings import Budget, JudgeEndpoint, Rate
from kedge.rewards.spending.ledger import Ledger, SharedBudget
from kedge.rewards.spending.tokens import BYTES_A_TOKEN, Estimate, Spent, Tokens, expected_tokens, usage_of

T = TypeVar("T")

LEDGER = "ledger.jsonl"
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.UnsupportedProtocol, httpx2.InvalidURL)


class _OverBudget(CallFailed):
    """The call was not sent: it could pass the budget."""


class PaidCalls:
    """The calls to one endpoint. `folder` keeps replies, and may be shared by runs; `ledger` is a file of what this one
    paid and was replied, by default of what it paid, in the same folder. Without a folder nothing is kept. `shared` is
    a budget that others spend of too. `note` is given what there is to tell: a code, and words."""

    def __init__(
        self,
        endpoint: JudgeEndpoint,
        folder: Path | None,
        *,
        budget: Budget | None,
        rate: Rate | None,
        seed: int,
        ledger: Path | None = None,
        shared: SharedBudget | None = None,
        note: Callable[[str, str], None] = unheard,
    ) -> None:
        self._endpoint, self._seed, self._budget, self._shared, self._note = endpoint, seed, budget, shared, note
        self._url = chat_url(endpoint)
        self._folder = folder and folder / hash_bytes(f"{endpoint.url} {endpoint.model}".encode())[:16]
        self._pace = Pace(rate)
        self._ledger = Ledger(ledger or (folder and folder / LEDGER), budget, has_replies=ledger is not None)
        if shared is not None:
            shared.add(self._ledger)
        self._kept_calls = 0
        self._settled = asyncio.Condition()
        self._passed: tuple[float, str] | None = None
        self._server = Endpoint(
            url=self._url,
            timeout_s=endpoint.timeout_s,
            retries=endpoint.retries,
            backoff_s=endpoint.backoff_s,
            workers=endpoint.workers,
            key=key_from(endpoint.key_variable, kind="judge"),
        )
        self._client = Client(self._server, self._pay)

    @property
    def spent(self) -> Spent:
        return replace(self._ledger.spent, kept=self._kept_calls)

    def estimate(self, calls: Sequence[Call[Any]]) -> Estimate:
        """Calls, tokens and money of what is not kept yet."""
        keys = {self._key(call): call for call in calls}
        new = [call for key, call in keys.items() if self._row(key) is None]
        tokens = sum((expected_tokens(call.body) for call in new), start=Tokens())
        return Estimate(
            calls=len(new),
            kept=len(keys) - len(new),
            prompt_tokens=tokens.prompt,
            completion_tokens=tokens.completion,
            usd=tokens.usd(self._budget),
        )

    def ask(self, calls: Sequence[Call[T]]) -> list[T | CallFailed]:
        """What each call gives, in their order; one without a reply, or with one that cannot be read, fails alone. What
        is kept is never asked for again. Past the budget a ContractStop, with everything kept."""
        self._passed = None  # a refused call may have been a long one
        if in_flight := self._ledger.settle_open(self._row):
            words = f"{in_flight:,} calls to {self._endpoint.model} were in flight when the run ended: they are asked"
            self._note("calls.lost", f"{words} again, and the budget counts them as paid")
        rows: dict[str, Any] = {}
        new: dict[str, Call[Any]] = {}
        for call in calls:
            key = self._key(call)
            if key in rows or key in new:
                continue
            row = self._row(key)
            if row is None:
                new[key] = replace(call, read=all_of_it, rng=Random(seed_for(self._seed, f"calls/{key}")))
            else:
                rows[key] = row[0]
                self._kept_calls += 1
        if new and self._folder is not None:
            with run_errors("keep replies in", self._folder):  # before anything is paid for
                self._folder.mkdir(parents=True, exist_ok=True)
        rows |= zip(new, self._client.call_all(list(new.values())), strict=True)
        if unasked := sum(isinstance(row, _OverBudget) for row in rows.values()):
            raise ContractStop(self._over_budget(unasked))
        return [self._read(call, rows[self._key(call)]) for call in calls]

    def _read(self, call: Call[T], row: Any) -> T | CallFailed:
        if isinstance(row, CallFailed):
            return row
        try:
            return call.read(row)
        except (ValueError, RecursionError) as error:
            return failed(self._server, f"unusable reply: {error}", Unreadable)

    def _over_budget(self, unasked: int) -> str:
        usd, whose = self._passed or (0.0, self._endpoint.model)
        return (
            f"budget of {usd:g} USD for {whose}: {self.spent.in_words()}; the next call could pass it, "
            f"and {unasked:,} are not asked. Every reply is kept: raise budget.usd, and --resume asks the rest"
        )

    def _key(self, call: Call[Any]) -> str:
        return hash_bytes(b"\0".join((self._url.encode(), call.body, str(call.sample).encode())))

    def _file(self, key: str) -> Path | None:
        return self._folder and self._folder / key[:2] / f"{key}.json"

    def _row(self, key: str) -> tuple[Any, Tokens] | None:
        """The reply to a call and its tokens; None where nothing is kept, or where the file is damaged."""
        file = self._file(key)
        if key in self._ledger.replies or file is None:
            return self._ledger.replies.get(key)
        try:
            row = json.loads(file.read_bytes())
            return row["reply"], Tokens(**row["tokens"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    async def _pay(self, exchange: Exchange, call: Call[Any]) -> bytes:
        """One attempt: waits for its turn and for money, sends, keeps the reply, and writes down what it cost."""
        key, expected, most = self._key(call), expected_tokens(call.body), expected_tokens(call.body, a_token=1)
        await self._pace.turn(expected.total)
        await self._reserve(key, most)
        tokens: Tokens | None = None
        try:
            reply = json.loads(await exchange(call.body))
            tokens = usage_of(reply)  # known also where the reply is of no use
            kept = call.keep(reply)
            is_estimated, text = tokens is None, json.dumps(kept).encode()
            tokens = tokens or Tokens(prompt=expected.prompt, completion=-(-len(text) // BYTES_A_TOKEN))
            self._keep(key, kept, tokens)
            self._ledger.paid(key, tokens, reply=kept, estimated=is_estimated)
            return text
        except Refused as refused:
            self._ledger.unpaid(key, "refused")
            if not refused.is_final:
                self._pace.hold(refused.wait_s)
            raise
        except BaseException as error:
            if isinstance(error, ValueError) and tokens is not None:
                self._ledger.paid(key, tokens)
            else:
                self._ledger.unpaid(key, "refused" if isinstance(error, _NEVER_SENT) else "lost")
            raise
        finally:
            self._pace.give_back(expected.total - (tokens.total if tokens else 0))
            async with self._settled:
                self._settled.notify_all()

    async def _reserve(self, key: str, most: Tokens) -> None:
        """Wait until the call fits the budget beside those in flight; where nothing is in flight it never will."""
        async with self._settled:
            while self._passed is None and (ceiling := self._ceiling(most)) is not None:
                if self._ledger.in_flight:
                    await self._settled.wait()
                else:
                    self._passed = ceiling
                    self._settled.notify_all()
            if self._passed is not None:
                raise _OverBudget("not asked: it could pass the budget")
            self._ledger.sent(key, most)

    def _ceiling(self, most: Tokens) -> tuple[float, str] | None:
        """The budget that a call could pass, and whose it is: the endpoint's own, or one that others spend of too."""
        if self._budget is not None and self._ledger.most_usd(most) > self._budget.usd:
            return self._budget.usd, self._endpoint.model
        if self._shared is not None and self._shared.most_usd + most.usd(self._budget) > self._shared.usd:
            others = self._shared.most_usd - self._ledger.most_usd(Tokens())
            whose = f"all judges together, of which {others:.4f} USD are spent by others than {self._endpoint.model}"
            return self._shared.usd, whose
        return None

    def _keep(self, key: str, kept: Any, tokens: Tokens) -> None:
        if (file := self._file(key)) is None:
            return
        with run_errors("keep a reply in", file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {"reply": kept, "tokens": asdict(tokens), "at": time.time()})
