"""The nearest valid name, for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, options: Iterable[str]) -> str | None:
    """The option most like `name`, or None when nothing is close. The same letters in another order are closest.

    >>> nearest("momentun", ["lr", "momentum"])
    'momentum'
    >>> nearest("gpro", ["gspo", "grpo"])
    'grpo'
    """
    by_lower = {option.lower(): option for option in options}
    found = get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    found.sort(key=lambda option: sorted(option) != sorted(name.lower()))
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """A clause to append to a message: the nearest name, or nothing.

    >>> did_you_mean("gpro", ["grpo", "ppo"])
    " (did you mean 'grpo'?)"
    >>> did_you_mean("x", ["grpo"])
    ''
    """
    found = nearest(name, options)
    return f" (did you mean '{found}'?)" if found else ""
