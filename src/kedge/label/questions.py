"""What a project asks, and the verdicts that answer it: validated before anything is written."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from kedge.core.errors import ConfigError, DataError
from kedge.core.files import check_text
from kedge.core.suggest import did_you_mean

ItemKind = Literal["pair", "rank", "thumb", "write"]
Verdict = Literal["step", "both_bad", "ranking", "thumb", "written", "skip", "undone", "decided"]
KINDS: tuple[ItemKind, ...] = ("pair", "rank", "thumb", "write")
QUESTIONS = (*KINDS, "axes", "edit")
AXES = ("helpful", "honest", "harmless")
FLAGS = ("harmful", "private", "broken", "unclear", "known_model")
VERDICTS: Mapping[ItemKind, tuple[Verdict, ...]] = {
    "pair": ("step", "both_bad", "skip"),
    "rank": ("ranking", "skip"),
    "thumb": ("thumb", "skip"),
    "write": ("written", "skip"),
}
_MOST_STEP = 3
_MOST_AXES = 12
_AXIS = re.compile(r"[^\W_][\w-]{0,39}")
_MOST_REASON = 10_000
_MOST_EDIT = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a person decided, in the order in which the answers were shown.

    `outcome`: −3 (the first is much better) to 3 (the second is), 0 a tie; for thumbs −1 or 1. `ranking[i]` is the
    place of the answer that was shown as number i, 1 is best, equal numbers are ties. `edit` is a better answer.
    """

    verdict: Verdict
    outcome: int | None = None
    ranking: tuple[int, ...] | None = None
    axes: Mapping[str, int] | None = None
    reason: str | None = None
    edit: str | None = None
    seconds: float = 0.0
    idle_seconds: float = 0.0
    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    """Kinds of flags with a word on each."""


def parse_questions(asked: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The questions of a project by their names, or with their settings.

    >>> parse_questions({"pair": {"ties": False}, "axes": ["brief"]})
    {'pair': {'steps': 7, 'ties': False, 'both_bad': True}, 'axes': ['brief']}
    """
    names = list(asked)
    for name in names:
        if name not in QUESTIONS:
            raise ConfigError(
                f"--questions {name}: there is no such question{did_you_mean(name, QUESTIONS)}; "
                f"choose of {', '.join(QUESTIONS)}"
            )
    if not set(names) & set(KINDS):
        raise ConfigError(f"--questions {','.join(names)}: ask at least one of {', '.join(KINDS)}")
    if "axes" in names and "pair" not in names:
        raise ConfigError("--questions axes: axes are asked about pairs; add pair")
    given = asked if isinstance(asked, Mapping) else {}
    return {name: _settings_of(name, given.get(name)) for name in QUESTIONS if name in names}


_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "pair": {"steps": 7, "ties": True, "both_bad": True},
    "rank": {"ties": True},
    "thumb": {},
    "write": {},
}


def _settings_of(name: str, given: Any) -> Any:
    """The settings of one question; where nothing or True is given, those that it has by itself."""
    if name == "axes":
        return list(AXES) if given is None or given is True else _axes(given)
    if name == "edit":
        if given not in (None, True, "optional"):
            raise ConfigError(f"questions.edit: found {given!r}; a better answer is optional")
        return "optional"
    defaults = _DEFAULTS[name]
    if given is None or given is True:
        return dict(defaults)
    if not isinstance(given, Mapping):
        raise ConfigError(f"questions.{name}: found {given!r}; write its settings as {{{', '.join(defaults)}}}")
    settings = cast("Mapping[str, Any]", given)
    for key, value in settings.items():
        if key not in defaults:
            known = ", ".join(defaults) or "none"
            raise ConfigError(f"questions.{name}.{key}: its settings are {known}{did_you_mean(key, list(defaults))}")
        if key == "steps" and value != 7:
            raise ConfigError(f"questions.{name}.steps: found {value!r}; there are 7 steps")
        if key != "steps" and not isinstance(value, bool):
            raise ConfigError(f"questions.{name}.{key}: found {value!r}; it is true or false")
    return {**defaults, **settings}


def _axes(given: Any) -> list[str]:
    names = cast("list[Any]", given) if isinstance(given, list) else []
    is_fit = 0 < len(names) <= _MOST_AXES and len(set(map(str, names))) == len(names)
    if not is_fit or not all(isinstance(name, str) and _AXIS.fullmatch(name) for name in names):
        raise ConfigError(
            f"questions.axes: found {given!r}; it is a list of 1 to {_MOST_AXES} different names, of letters, digits, "
            "_ and -"
        )
    return list(names)


def check_decision(decision: Decision, kind: ItemKind, questions: Mapping[str, Any], answers: int) -> None:
    """A DataError where a decision does not answer what was asked."""
    if decision.verdict not in VERDICTS[kind]:
        allowed = ", ".join(VERDICTS[kind])
        raise DataError(f"verdict: found '{decision.verdict}'; this item asks for one of {allowed}")
    _check_outcome(decision)
    _check_ranking(decision, answers)
    _check_offered(decision, cast("Mapping[str, Any]", questions.get(kind) or {}))
    _check_axes(decision, cast(Sequence[str], questions.get("axes", ())))
    _check_words(decision, questions, kind)
    for name in ("seconds", "idle_seconds"):
        value = getattr(decision, name)
        if not math.isfinite(value) or value < 0:
            raise DataError(f"{name}: found {value}; it must be a finite number of seconds, 0 or more")


def _check_outcome(decision: Decision) -> None:
    allowed = {"step": range(-_MOST_STEP, _MOST_STEP + 1), "thumb": (-1, 1)}.get(decision.verdict)
    if allowed is None and decision.outcome is not None:
        raise DataError(f"outcome: found {decision.outcome}; a verdict '{decision.verdict}' has none")
    if allowed is not None and (isinstance(decision.outcome, bool) or decision.outcome not in allowed):
        raise DataError(f"outcome: found {decision.outcome!r}; it must be one of {', '.join(map(str, allowed))}")


def _check_ranking(decision: Decision, answers: int) -> None:
    ranking = decision.ranking
    if (decision.verdict == "ranking") != (ranking is not None):
        raise DataError(f"ranking: a verdict '{decision.verdict}' has {'one' if ranking is None else 'none'}")
    if ranking is not None and (len(ranking) != answers or not all(1 <= rank <= answers for rank in ranking)):
        raise DataError(f"ranking: found {list(ranking)}; it must have {answers} places from 1 to {answers}")


def _check_offered(decision: Decision, settings: Mapping[str, Any]) -> None:
    """What the project does not offer: both bad, ties."""
    if decision.verdict == "both_bad" and not settings.get("both_bad", True):
        raise DataError("verdict: found 'both_bad'; the project asks which answer is better, bad or not")
    ranking = decision.ranking or ()
    is_tie = (decision.verdict == "step" and decision.outcome == 0) or len(set(ranking)) < len(ranking)
    if is_tie and not settings.get("ties", True):
        raise DataError("a tie: the project asks for a decision")


def _check_axes(decision: Decision, axes: Sequence[str]) -> None:
    if decision.axes and decision.verdict != "step":
        raise DataError(f"axes: a verdict '{decision.verdict}' has none")
    for name, step in (decision.axes or {}).items():
        if name not in axes:
            raise DataError(f"axes.{name}: the project asks for {', '.join(axes) or 'none'}{did_you_mean(name, axes)}")
        if isinstance(step, bool) or step not in range(-_MOST_STEP, _MOST_STEP + 1):
            raise DataError(f"axes.{name}: found {step!r}; it must be a step from -3 to 3")


def _check_words(decision: Decision, questions: Mapping[str, Any], kind: ItemKind) -> None:
    if decision.verdict == "skip" and not (decision.reason or "").strip():
        raise DataError("reason: a skip says why")
    if decision.verdict == "written" and not (decision.edit or "").strip():
        raise DataError("edit: the answer that was asked for is empty")
    if decision.edit is not None and kind != "write" and "edit" not in questions:
        raise DataError("edit: the project does not ask for better answers")
    if decision.edit is not None and decision.verdict == "skip":
        raise DataError("edit: a skip has none")
    for name, value, most in (("reason", decision.reason, _MOST_REASON), ("edit", decision.edit, _MOST_EDIT)):
        if value is not None and len(check_text(value, name)) > most:
            raise DataError(f"{name}: {len(value):,} characters; at most {most:,} are taken")
    for name, words in decision.flags.items():
        if name not in FLAGS:
            raise DataError(f"flags.{name}: there is no such flag{did_you_mean(name, FLAGS)}; {', '.join(FLAGS)}")
        if len(check_text(words, f"flags.{name}")) > _MOST_REASON:
            raise DataError(f"flags.{name}: {len(words):,} characters; at most {_MOST_REASON:,} are taken")


def to_places(decision: Decision, order: Sequence[int]) -> tuple[int | None, list[int] | None, dict[str, int] | None]:
    """Outcome, ranking and axes by the places of the answers in the item, whatever order they were shown in.

    >>> to_places(Decision(verdict="step", outcome=-3, axes={"honest": 1}), [1, 0])
    (3, None, {'honest': -1})
    >>> to_places(Decision(verdict="ranking", ranking=(1, 2, 3)), [2, 0, 1])
    (None, [2, 3, 1], None)
    """
    sign = -1 if decision.verdict == "step" and tuple(order) == (1, 0) else 1
    outcome = None if decision.outcome is None else sign * decision.outcome
    axes = {name: sign * step for name, step in decision.axes.items()} if decision.axes else None
    if decision.ranking is None:
        return outcome, None, axes
    ranking = [0] * len(order)
    for shown, place in enumerate(order):
        ranking[place] = decision.ranking[shown]
    return outcome, ranking, axes
