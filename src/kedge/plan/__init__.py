"""What a run will take, before it is started: closed formulas, no measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kedge.plan.plan import Plan as Plan
    from kedge.plan.plan import plan_recipe as plan_recipe

__all__ = ["Plan", "plan_recipe"]


def __getattr__(name: str) -> Any:
    """Lazily: the model of scale needs no recipe."""
    if name not in __all__:
        raise AttributeError(name)
    from kedge.plan import plan

    return getattr(plan, name)
