"""Numbers as a reader meets them: in sentences, tables and charts alike."""

from __future__ import annotations


def number(value: float | None, digits: int = 3) -> str:
    """
    >>> number(-0.12345), number(-0.0001), number(None)
    ('−0.123', '0.000', '–')
    """
    if value is None:
        return "–"
    text = f"{abs(value):,.{digits}f}"
    is_zero = not any(digit in text for digit in "123456789")
    return text if value >= 0 or is_zero else f"−{text}"


def short(value: float) -> str:
    """As few digits as tell numbers of a chart apart; whole numbers stay whole.

    >>> short(-120.0), short(0.125), short(12.34), short(24500.0)
    ('−120', '0.125', '12.3', '24,500')
    """
    if value != value or abs(value) == float("inf"):
        return "not finite"
    text = f"{abs(value):,.0f}" if value == int(value) or abs(value) >= 1000 else f"{abs(value):.3g}"
    return f"−{text}" if value < 0 else text


def span(low: float, high: float) -> str:
    """
    >>> span(3.0, 3.0), span(-8.0, 12.0)
    ('3', '−8 to 12')
    """
    return short(low) if low == high else f"{short(low)} to {short(high)}"


def duration(seconds: float) -> str:
    """
    >>> duration(0.84), duration(75), duration(7_260), duration(190_000)
    ('0.8 s', '1 min 15 s', '2 h 1 min', '2 d 4 h')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    for size, unit, smaller_size, smaller in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} {int(seconds % size // smaller_size)} {smaller}"
    return f"{seconds:.0f} s"


def amount(count: float) -> str:
    """
    >>> amount(812), amount(45_300), amount(12_400_000)
    ('812', '45.3 k', '12.4 M')
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"
