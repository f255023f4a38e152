"""What a run sent, what that cost, and what several ledgers may cost together."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from kedge.core.errors import DataError
from kedge.core.files import run_errors
from kedge.rewards.settings import Budget
from kedge.rewards.spending.tokens import Spent, Tokens


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


class SharedBudget:
    """One ceiling over several ledgers, each with its own prices: what the judges of a panel may cost together."""

    def __init__(self, usd: float) -> None:
        self.usd = usd
        self._ledgers: list[Ledger] = []

    def add(self, ledger: Ledger) -> None:
        self._ledgers.append(ledger)

    @property
    def most_usd(self) -> float:
        """What all have spent at most once everything in flight is paid; what earlier processes spent counts too."""
        return sum(ledger.most_usd(Tokens()) for ledger in self._ledgers)
