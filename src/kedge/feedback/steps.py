"""How much better an answer was called, as the margin that a reward model is asked for (Touvron et al. 2023)."""

from __future__ import annotations

from typing import Literal

from kedge.core.errors import DataError

Margins = Literal["small", "large"]
_MARGINS: dict[Margins, dict[int, float]] = {
    "small": {3: 1.0, 2: 2 / 3, 1: 1 / 3},
    "large": {3: 3.0, 2: 2.0, 1: 1.0},
}


def margin_of(step: int, *, margins: Margins = "small") -> float | None:
    """The margin of a step from −3 to 3, whichever side is better; None for 0, a tie.

    >>> margin_of(-3), margin_of(1), margin_of(0), margin_of(2, margins="large")
    (1.0, 0.3333333333333333, None, 2.0)
    """
    if margins not in _MARGINS:
        raise DataError(f"margins is one of {', '.join(_MARGINS)}: found {margins!r}")
    if abs(step) not in (0, 1, 2, 3):
        raise DataError(f"a step is a whole number from -3 to 3: found {step!r}")
    return _MARGINS[margins].get(abs(step))
