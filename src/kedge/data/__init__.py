"""Text in, records out: readers, formats, chat templates, tokenising, audit, splits.

`read` gives the examples of a file or dataset one by one; `convert` writes them in the canonical form of a kind;
`split` parts files into train and held out by prompt; `audit` says what is wrong with them. Each is imported when it is
first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kedge.data.auditing import audit
    from kedge.data.converting import convert
    from kedge.data.reading import read
    from kedge.data.splitting import split

__all__ = ["audit", "convert", "read", "split"]

_HOMES = {"audit": "auditing", "convert": "converting", "read": "reading", "split": "splitting"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
