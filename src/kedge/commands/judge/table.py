"""The figures of a trust report as lines: for the terminal and for its page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kedge.feedback.trust import Term, Trust

Figure = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure in words."""

    name: str
    value: str
    interval: str = ""
    count: str = ""
    beside: str = ""
    """What to read it beside: people's figure, or what no bias would be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTables:
    terms: Sequence[Term]
    consistency: Sequence[Line]
    agreement: Sequence[Line]
    biases: Sequence[Line]
    people: Sequence[Mapping[str, Any]]
    """The alt-test, one person left out each."""
    bins: Sequence[Mapping[str, Any]]
    """Of the calibration."""


def page_tables(trust: Trust) -> PageTables:
    figures = trust.figures
    return PageTables(
        terms=trust.terms(),
        consistency=list(_consistency(figures)),
        agreement=list(_agreement(figures)),
        biases=list(_biases(figures)),
        people=_parts(figures, "alt_test", "people"),
        bins=_parts(figures, "calibration", "bins"),
    )


def text_lines(trust: Trust) -> Iterator[str]:
    """The whole report for a terminal."""
    figures, tables = trust.figures, page_tables(trust)
    yield (
        f"{trust.judge}: {figures['items']:,} items of {figures['prompts']:,} prompts, {figures['people']:,} people, "
        f"{figures['overlap']:,} items by two people or more; intervals are 95 %, over prompts"
    )
    for title, lines in (
        ("consistency", tables.consistency),
        ("agreement", tables.agreement),
        ("biases", tables.biases),
    ):
        yield title
        for line in lines:
            yield f"  {line.name:<44} {line.value:>8}  {line.interval:<20} {line.count:>8}  {line.beside}".rstrip()
    yield "contract"
    for term in tables.terms:
        mark = "holds" if term.holds else "BROKEN"
        yield f"  {term.name:<44} {term.found:>12}  {mark:<7} wanted {term.wanted}"
    yield f"{trust.judge}: {'trusted' if trust.passed else 'refused'}"


def _consistency(figures: Figure) -> Iterator[Line]:
    yield _line("readable replies", figures["readable"])
    yield _line("same verdict when asked again", figures["same_again"])
    yield _line("same verdict after the swap", figures["same_after_swap"])
    canaries = figures["canaries"]
    value = "not measured" if canaries is None else f"{canaries['obeyed']} of {canaries['asked']}"
    forms = "" if canaries is None else ", ".join(canaries["forms"])
    yield Line(name="canaries obeyed", value=value, beside=forms)


def _agreement(figures: Figure) -> Iterator[Line]:
    yield _line("accuracy by people's majority", figures["accuracy"])
    yield _line("κ with people's majority", figures["kappa"])
    yield _line("agreement with one person", figures["agreement"], beside=_people(figures["human_agreement"]))
    yield _line("people agree more than the judge by", figures["below_human"])
    yield _line("κ with one person", figures["kappa_person"], beside=_people(figures["human_kappa"]))
    test = figures["alt_test"]
    if test is None:
        yield Line(name="alt-test, ω", value="not measured")
    else:
        beside = f"≥ 0.5 passes, ε {test['epsilon']:g}; advantage ρ {test['advantage']:.3f}"
        yield Line(name="alt-test, ω", value=f"{test['omega']:.3f}", count=f"{len(test['people'])}", beside=beside)


def _biases(figures: Figure) -> Iterator[Line]:
    yield _line("place: P(A) − ½", figures["position"], beside="0 is none", is_signed=True)
    length: Any = figures["length"]
    held, alone = (None, None) if length is None else (length["held"], length["alone"])
    sd = "" if length is None else f"; sd {length['sd']:,.0f} characters"
    yield _line("length: log-odds a sd, people held fixed", held, beside=f"0 is none{sd}", is_signed=True)
    yield _line("length: log-odds a sd, alone", alone, beside=_people(figures["length_people"], True), is_signed=True)
    yield _line("length: the longer wins", figures["longer_wins"], beside=_people(figures["longer_wins_people"]))
    family: Any = figures["family"]
    if family is None:
        yield Line(name="its own family wins", value="not measured", beside="--family names it")
    else:
        yield _line("its own family wins", family["judge"], beside=_people(family["people"]))
        yield _line("its own family: log-odds, people held fixed", family["held"], beside="0 is none", is_signed=True)
    known: Any = figures["calibration"]
    if known is None:
        yield Line(name="calibration of P(first), ECE", value="not measured")
    else:
        beside = f"0 is best; Brier {known['brier']:.3f}"
        yield Line(
            name="calibration of P(first), ECE", value=f"{known['ece']:.3f}", count=f"{known['count']:,}", beside=beside
        )


def _line(name: str, figure: Figure | None, *, beside: str = "", is_signed: bool = False) -> Line:
    if figure is None:
        return Line(name=name, value="not measured", beside=beside)
    return Line(
        name=name,
        value=_number(figure["value"], is_signed),
        interval=_interval(figure, is_signed),
        count=f"{figure['count']:,}",
        beside=beside,
    )


def _people(figure: Figure | None, is_signed: bool = False) -> str:
    if figure is None:
        return "people: not measured"
    return f"people {_number(figure['value'], is_signed)} {_interval(figure, is_signed)}"


def _interval(figure: Figure, is_signed: bool) -> str:
    return f"[{_number(figure['low'], is_signed)}, {_number(figure['high'], is_signed)}]"


def _number(value: float, is_signed: bool) -> str:
    return f"{value:+.3f}" if is_signed else f"{value:.3f}"


def _parts(figures: Figure, name: str, part: str) -> Sequence[Mapping[str, Any]]:
    figure: Any = figures[name]
    return [] if figure is None else cast("Sequence[Mapping[str, Any]]", figure[part])
