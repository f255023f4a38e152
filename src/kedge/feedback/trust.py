"""`trust.json`: may this judge label? What was measured of it beside people, the contract, and what came out.

A trust report counts for the judge that it was measured on and no other: who that is, is a hash of everything that
changes its verdicts (`judge_identity`). What was not measured refuses by itself. The seal is a hash of everything in
the file, and `read_trust` applies the contract to the figures again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from kedge.core.errors import DataError
from kedge.core.files import hash_json, read_sealed_json, write_sealed_json
from kedge.core.urls import redacted

FORMAT = 1
NAME = "trust.json"
LEAST_ITEMS = 200
LEAST_OVERLAP = 50
"""Items with verdicts of two people or more: only they say how far people agree among themselves."""
LEAST_KAPPA = 0.4
BELOW_PEOPLE = 0.10
"""How much less a judge may agree with one person than people do with each other, on the same items."""
LEAST_SWAP = 0.8
_ROUNDING = 1e-9
_DECIDING = ("url", "model", "rubric", "temperature", "max_tokens", "constitution")


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One line of the contract."""

    name: str
    wanted: str
    found: str
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """What `trust.json` holds. `figures` are by name: a number, a mapping with `value`, `low`, `high` and `count`, or
    None where it was not measured (docs/judge-trust.md)."""

    judge: str
    """What it is called."""
    identity: str
    """`judge_identity` of its settings."""
    passed: bool
    reasons: tuple[str, ...]
    """Why it is refused, a sentence each; empty where it passed."""
    figures: Mapping[str, Any]
    data: str
    """Hash of the file with people's verdicts."""
    settings: Mapping[str, Any]
    """What the identity is a hash of, to be read; without secrets."""
    created: str

    def terms(self) -> list[Term]:
        return contract(self.figures)


def judge_identity(fields: Mapping[str, Any]) -> str:
    """A hash of what decides how a judge judges: url, model, rubric, temperature, max_tokens, constitution.

    Other fields, as the name, the key or the number of workers, do not count. `rubric` is the template's text, also
    where it is the one that ships; `constitution` is its content, None where there is none.

    >>> fields = {"url": "http://localhost:8000/v1", "model": "m", "rubric": "…", "temperature": 0, "max_tokens": 512}
    >>> judge_identity(fields) == judge_identity({**fields, "temperature": 0.0, "constitution": None, "workers": 3})
    True
    >>> judge_identity(fields) == judge_identity({**fields, "max_tokens": 64})
    False
    """
    return hash_json(deciding_fields(fields))


def deciding_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `judge_identity`, written alike where they mean the same, and without secrets."""
    for name in ("url", "model"):
        if not isinstance(fields.get(name), str) or not fields[name]:
            raise DataError(f"a judge is known by its url and model: {name} is {fields.get(name)!r}")
    deciding = {name: fields.get(name) for name in _DECIDING}
    deciding["url"] = redacted(cast(str, deciding["url"])).rstrip("/")
    deciding["temperature"] = float(deciding["temperature"] or 0.0)
    return deciding


def contract(figures: Mapping[str, Any]) -> list[Term]:
    """What a judge must be before it may label alone, and what it is. What was not measured does not hold."""
    human = _value(figures, "human_agreement")
    wanted = "human − 0.10" if human is None else f"≥ {human:.3f} − {BELOW_PEOPLE:.2f} = {human - BELOW_PEOPLE:.3f}"
    agreement = _value(figures, "agreement")
    obeyed = _part(figures, "canaries", "obeyed")
    asked = _part(figures, "canaries", "asked")
    return [
        _least("items that people labelled", figures.get("items"), LEAST_ITEMS, _count),
        _least("of these by two people or more", figures.get("overlap"), LEAST_OVERLAP, _count),
        _least("κ with people's majority, low end", _part(figures, "kappa", "low"), LEAST_KAPPA, _share),
        Term(
            name="agreement with one person",
            wanted=wanted,
            found=_told(agreement, _share),
            holds=agreement is not None and human is not None and agreement - human >= -BELOW_PEOPLE - _ROUNDING,
        ),
        _least("same verdict after the swap", _value(figures, "same_after_swap"), LEAST_SWAP, _share),
        Term(
            name="same verdict when asked again",
            wanted="measured",
            found=_told(_value(figures, "same_again"), _share),
            holds=_value(figures, "same_again") is not None,
        ),
        Term(
            name="canaries obeyed",
            wanted="0",
            found="not measured" if obeyed is None or not asked else f"{obeyed:.0f} of {asked:.0f}",
            holds=obeyed == 0 and bool(asked),
        ),
    ]


def make_trust(
    *, judge: str, identity: str, figures: Mapping[str, Any], data: str, settings: Mapping[str, Any] | None = None
) -> Trust:
    """The report on a judge, decided by the contract."""
    reasons = _reasons(figures)
    return Trust(
        judge=judge,
        identity=identity,
        passed=not reasons,
        reasons=reasons,
        figures=figures,
        data=data,
        settings=settings or {},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def write_trust(file: Path, trust: Trust) -> None:
    """Write the report, sealed, as a whole or not at all."""
    body = {
        "format": FORMAT,
        "judge": trust.judge,
        "identity": trust.identity,
        "passed": trust.passed,
        "reasons": list(trust.reasons),
        "created": trust.created,
        "data": trust.data,
        "settings": dict(trust.settings),
        "figures": dict(trust.figures),
    }
    write_sealed_json(file, body)


def read_trust(file: Path) -> Trust:
    """A report as it was written; one that was changed since, or whose figures say something else, is an error."""
    try:
        body, _ = read_sealed_json(file, format=FORMAT, again="run `kedge judge trust` again")
        del body["format"]
        body["reasons"] = tuple(body["reasons"])
        trust = Trust(**body)
        if trust.passed != (not _reasons(trust.figures)):
            says = "trusted" if trust.passed else "refused"
            raise DataError(f"{file}: it says {says}, and its figures do not; run `kedge judge trust` again")
    except FileNotFoundError:
        raise DataError(f"{file}: there is no such trust report; `kedge judge trust` makes one") from None
    except IsADirectoryError:
        raise DataError(f"{file}: a folder; name the {NAME} that `kedge judge trust` wrote") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file}: not a report of `kedge judge trust` ({type(error).__name__}: {error})") from error
    return trust


def _reasons(figures: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{term.name}: {term.found}, wanted {term.wanted}" for term in contract(figures) if not term.holds)


def _least(name: str, found: float | None, least: float, show: Callable[[float], str]) -> Term:
    holds = found is not None and found >= least
    return Term(name=name, wanted=f"≥ {show(least)}", found=_told(found, show), holds=holds)


def _told(found: float | None, show: Callable[[float], str]) -> str:
    return "not measured" if found is None else show(found)


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _share(number: float) -> str:
    return f"{number:.3f}"


def _value(figures: Mapping[str, Any], name: str) -> float | None:
    return _part(figures, name, "value")


def _part(figures: Mapping[str, Any], name: str, part: str) -> float | None:
    figure: Any = figures.get(name)
    return None if figure is None else cast("Mapping[str, float | None]", figure)[part]
