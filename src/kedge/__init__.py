"""Kedge: the complete RLHF loop as checked software.

The names below are imported when they are first used, so that `import kedge` is quick and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kedge import algorithms, data
    from kedge.api.models import load_model
    from kedge.api.recipe import Recipe
    from kedge.api.run import Run
    from kedge.api.stages import PPO, SFT, BestOfN, Evaluate, Group, Preference, Reward
    from kedge.core.answers import Answer

__version__ = "0.2.0"

__all__ = [
    "PPO",
    "SFT",
    "Answer",
    "BestOfN",
    "Evaluate",
    "Group",
    "Preference",
    "Recipe",
    "Reward",
    "Run",
    "__version__",
    "algorithms",
    "data",
    "load_model",
]

_HOMES = {
    "Answer": "core.answers",
    "Recipe": "api.recipe",
    "Run": "api.run",
    "load_model": "api.models",
    **dict.fromkeys(("PPO", "SFT", "BestOfN", "Evaluate", "Group", "Preference", "Reward"), "api.stages"),
}
_PACKAGES = ("algorithms", "data")


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_PACKAGES})
