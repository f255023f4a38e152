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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeVar

import httpx2

from kedge.core.errors import ContractStop, DataError
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

T = TypeVar("T")

LEDGER = "ledger.jsonl"
BYTES_A_TOKEN = 4
"""Of English, as JSON: what is not known yet is estimated by it. A token has at least one byte."""
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.UnsupportedProtocol, httpx2.InvalidURL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Of a call, or of several."""

    prompt: int = 0
    completion: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(prompt=self.prompt + other.prompt, completion=self.completion + other.completion)

    @property
    def total(self) -> int:
        return self.prompt + self.completion

    def usd(self, budget: Budget | None) -> float:
        """
        >>> Tokens(prompt=1000, completion=500).usd(Budget(usd=1, input=2, output=8))
        0.006
        """
        return 0.0 if budget is None else (self.prompt * budget.input + self.completion * budget.output) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What calls cost; a run that was resumed counts from its beginning. Without prices `usd` is 0."""

    calls: int = 0
    """Replies that were paid for."""
    kept: int = 0
    """Calls since this process began whose replies were there already."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float = 0.0
    estimated: int = 0
    """Replies that do not say their tokens: four bytes count as one."""
    lost: int = 0
    """Attempts without a reply that may have been paid for: missed deadlines, lost connections, a killed run."""
    lost_usd: float = 0.0
    """The most that those cost; it counts in the budget."""

    def in_words(self) -> str:
        """
        >>> Spent(calls=20, kept=3, prompt_tokens=9000, completion_tokens=800, usd=0.0123).in_words()
        '20 calls paid, 3 kept from before, 9,000 + 800 tokens, 0.0123 USD'
        """
        words = f"{self.calls:,} calls paid, {self.kept:,} kept from before, "
        words += f"{self.prompt_tokens:,} + {self.completion_tokens:,} tokens"
        words += f", {self.usd:.4f} USD" if self.usd else ""
        words += f"; {self.estimated:,} replies do not say their tokens, which are estimated" if self.estimated else ""
        at_most = f" (up to {self.lost_usd:.4f} USD)" if self.lost_usd else ""
        return words + (f"; {self.lost:,} calls without a reply may have been paid{at_most}" if self.lost else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Before the first call: what is to be sent, about how many tokens, and the most that replies may have."""

    calls: int
    kept: int
    prompt_tokens: int
    completion_tokens: int
    usd: float

    def in_words(self) -> str:
        tokens = f"about {self.prompt_tokens:,} tokens sent, at most {self.completion_tokens:,} replied"
        cost = f", up to {self.usd:,.2f} USD" if self.usd else ""
        return f"{self.calls:,} calls ({self.kept:,} more are kept from before), {tokens}{cost}"


class _OverBudget(CallFailed):
    """The call was not sent: it could pass the budget."""


class PaidCalls:
    """The calls to one endpoint. `folder` keeps replies, and may be shared by runs; `ledger` is a file of what this one
    paid and was replied, by default of what it paid, in the same folder. Without a folder nothing is kept. `note` is
    given what there is to tell: a code, and words."""

    def __init__(
        self,
        endpoint: JudgeEndpoint,
        folder: Path | None,
        *,
        budget: Budget | None,
        rate: Rate | None,
        seed: int,
        ledger: Path | None = None,
        note: Callable[[str, str], None] = unheard,
    ) -> None:
        self._endpoint, self._seed, self._budget, self._note = endpoint, seed, budget, note
        self._url = chat_url(endpoint)
        self._folder = folder and folder / hash_bytes(f"{endpoint.url} {endpoint.model}".encode())[:16]
        self._pace = Pace(rate)
        self._ledger = Ledger(ledger or (folder and folder / LEDGER), budget, has_replies=ledger is not None)
        self._kept_calls = 0
        self._settled = asyncio.Condition()
        self._is_over = False
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
        tokens = sum((_expected(call.body) for call in new), start=Tokens())
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
        self._is_over = False  # a refused call may have been a long one
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
        usd = self._budget.usd if self._budget else 0.0
        return (
            f"budget of {usd:g} USD for {self._endpoint.model}: {self.spent.in_words()}; the next call could pass it, "
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
        key, expected, most = self._key(call), _expected(call.body), _expected(call.body, a_token=1)
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
            while self._budget is not None and self._ledger.most_usd(most) > self._budget.usd and not self._is_over:
                if self._ledger.in_flight:
                    await self._settled.wait()
                else:
                    self._is_over = True
                    self._settled.notify_all()
            if self._is_over:
                raise _OverBudget("not asked: it could pass the budget")
            self._ledger.sent(key, most)

    def _keep(self, key: str, kept: Any, tokens: Tokens) -> None:
        if (file := self._file(key)) is None:
            return
        with run_errors("keep a reply in", file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {"reply": kept, "tokens": asdict(tokens), "at": time.time()})


class Ledger:
    """What was sent and what it cost, a line each, read again by a run that is resumed.

    A call is `sent` with the most that it may cost, and ends as `paid`, `refused` (it cost nothing) or `lost` (nobody
    knows). Prices are not written down: tokens are, so that a corrected price corrects what was spent.
    """

    def __init__(self, file: Path | None, budget: Budget | None, *, has_replies: bool) -> None:
        self._file, self._budget, self._has_replies = file, budget, has_replies
        self.replies: dict[str, tuple[Any, Tokens]] = {}
        self._open: dict[str, Tokens] = {}
        self._paid = self._lost = Tokens()
        self._calls = self._estimated = self._lost_calls = 0
        if file is not None and file.exists():
            self._read(file)

    @property
    def in_flight(self) -> int:
        return len(self._open)

    @property
    def spent(self) -> Spent:
        return Spent(
            calls=self._calls,
            prompt_tokens=self._paid.prompt,
            completion_tokens=self._paid.completion,
            usd=self._paid.usd(self._budget),
            estimated=self._estimated,
            lost=self._lost_calls,
            lost_usd=self._lost.usd(self._budget),
        )

    def most_usd(self, more: Tokens) -> float:
        """What is spent at most once everything in flight is paid, and `more` too."""
        return sum((self._paid, self._lost, *self._open.values()), start=more).usd(self._budget)

    def settle_open(self, kept: Callable[[str], tuple[Any, Tokens] | None]) -> int:
        """End what was in flight when the last process did; how many of them have no reply."""
        lost = 0
        for key in list(self._open):
            row = kept(key)
            if row is None:
                lost += 1
                self.unpaid(key, "lost")
            else:
                self.paid(key, row[1], reply=row[0])
        return lost

    def sent(self, key: str, most: Tokens) -> None:
        self._note({"sent": key, **asdict(most)})

    def paid(self, key: str, tokens: Tokens, **more: Any) -> None:
        """`more` is the `reply`, where it can be used, and whether its tokens are `estimated`."""
        written = {name: value for name, value in more.items() if name != "reply" or self._has_replies}
        self._note({"paid": key, **asdict(tokens), **written})

    def unpaid(self, key: str, how: Literal["refused", "lost"]) -> None:
        self._note({how: key})

    def _note(self, line: dict[str, Any]) -> None:
        self._count(line)
        if self._file is None:
            return
        with run_errors("write down what is paid in", self._file):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("ab", buffering=0) as file:
                file.write(json.dumps(line).encode() + b"\n")

    def _count(self, line: dict[str, Any]) -> None:
        match line:
            case {"sent": key, "prompt": prompt, "completion": completion}:
                self._open[key] = Tokens(prompt=prompt, completion=completion)
            case {"paid": key, "prompt": prompt, "completion": completion}:
                self._open.pop(key, None)
                tokens = Tokens(prompt=prompt, completion=completion)
                self._paid, self._calls = self._paid + tokens, self._calls + 1
                self._estimated += bool(line.get("estimated"))
                if "reply" in line:
                    self.replies[key] = line["reply"], tokens
            case {"refused": key}:
                self._open.pop(key, None)
            case {"lost": key}:
                self._lost += self._open.pop(key, Tokens())
                self._lost_calls += 1
            case _:
                raise DataError(f"{self._file}: this is no line of a ledger: {json.dumps(line)[:120]}")

    def _read(self, file: Path) -> None:
        """All whole lines; one that a killed process did not end is cut off, because what it says was not done yet."""
        data = file.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with file.open("r+b") as opened:
                opened.truncate(whole)
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            try:
                self._count(json.loads(line))
            except ValueError as error:
                raise DataError(f"{file}:{number}: this is no line of a ledger: {error}") from error


def usage_of(reply: Any) -> Tokens | None:
    """What a reply says of its tokens; None where it says nothing that can be believed.

    >>> usage_of({"usage": {"prompt_tokens": 12, "completion_tokens": 3}})
    Tokens(prompt=12, completion=3)
    """
    match reply:
        case {"usage": {"prompt_tokens": int(prompt), "completion_tokens": int(completion)}}:
            return Tokens(prompt=prompt, completion=completion) if prompt >= 0 and completion >= 0 else None
        case _:
            return None


def _expected(body: bytes, *, a_token: int = BYTES_A_TOKEN) -> Tokens:
    """About how many tokens a request has, and the most that its reply may have."""
    request = json.loads(body)
    longest = int(request.get("max_tokens") or request.get("max_completion_tokens") or 0) * int(request.get("n") or 1)
    return Tokens(prompt=-(-len(body) // a_token), completion=longest)
