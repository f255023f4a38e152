"""Tokens of calls and what they cost: before, by what is to be sent; after, by what replies say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kedge.rewards.settings import Budget

BYTES_A_TOKEN = 4
"""Of English, as JSON: what is not known yet is estimated by it. A token has at least one byte."""


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


def expected_tokens(body: bytes, *, a_token: int = BYTES_A_TOKEN) -> Tokens:
    """About how many tokens a request has, and the most that its reply may have."""
    request = json.loads(body)
    longest = int(request.get("max_tokens") or request.get("max_completion_tokens") or 0) * int(request.get("n") or 1)
    return Tokens(prompt=-(-len(body) // a_token), completion=longest)
