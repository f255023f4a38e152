"""Decisions that do not answer what was asked, and what the refusal must name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kedge.core.errors import DataError
from kedge.label.questions import Decision, check_decision, parse_questions

EVERYTHING = parse_questions(["pair", "rank", "thumb", "write", "axes", "edit"])
BARE = parse_questions(["pair"])
DECIDED = parse_questions({"pair": {"ties": False, "both_bad": False}, "rank": {"ties": False}, "axes": ["brief"]})


@dataclass(frozen=True)
class Case:
    name: str
    kind: Any
    decision: dict[str, Any]
    names: str
    """What the refusal must say, as a pattern."""
    questions: Any = None
    answers: int = 2


CASES = [
    Case("a step too far", "pair", {"verdict": "step", "outcome": 4}, "outcome: found 4"),
    Case("a step that is none", "pair", {"verdict": "step"}, "outcome: found None"),
    Case("true for a step", "pair", {"verdict": "step", "outcome": True}, "outcome: found True"),
    Case("half a step", "pair", {"verdict": "step", "outcome": 0.5}, "outcome: found 0.5"),
    Case("both bad with a step", "pair", {"verdict": "both_bad", "outcome": 1}, "outcome: found 1"),
    Case("a thumb for a pair", "pair", {"verdict": "thumb", "outcome": 1}, "verdict: found 'thumb'"),
    Case("a thumb in the middle", "thumb", {"verdict": "thumb", "outcome": 0}, "outcome: found 0", answers=1),
    Case("an undo by hand", "pair", {"verdict": "undone"}, "verdict: found 'undone'"),
    Case("a ranking too short", "rank", {"verdict": "ranking", "ranking": (1, 2)}, "3 places", answers=3),
    Case("a ranking from nought", "rank", {"verdict": "ranking", "ranking": (0, 1, 2)}, "from 1 to 3", answers=3),
    Case("a ranking that is none", "rank", {"verdict": "ranking"}, "ranking", answers=3),
    Case("a tie unasked", "pair", {"verdict": "step", "outcome": 0}, "asks for a decision", DECIDED),
    Case("both bad unasked", "pair", {"verdict": "both_bad"}, "found 'both_bad'", DECIDED),
    Case("ties unasked", "rank", {"verdict": "ranking", "ranking": (1, 1, 2)}, "a decision", DECIDED, answers=3),
    Case("an axis of others", "pair", {"verdict": "step", "outcome": 1, "axes": {"honest": 1}}, "brief", DECIDED),
    Case("an unknown axis", "pair", {"verdict": "step", "outcome": 1, "axes": {"helpfull": 1}}, "mean 'helpful'"),
    Case("an axis too far", "pair", {"verdict": "step", "outcome": 1, "axes": {"honest": 9}}, "axes.honest: found 9"),
    Case("axes unasked", "pair", {"verdict": "step", "outcome": 1, "axes": {"honest": 1}}, "none", BARE),
    Case("axes of a skip", "pair", {"verdict": "skip", "reason": "x", "axes": {"honest": 1}}, "axes"),
    Case("a skip without a reason", "pair", {"verdict": "skip", "reason": " "}, "reason: a skip says why"),
    Case("an edit unasked", "pair", {"verdict": "step", "outcome": 1, "edit": "x"}, "edit", BARE),
    Case("nothing written", "write", {"verdict": "written", "edit": "\n"}, "edit", answers=0),
    Case("half a character", "pair", {"verdict": "step", "outcome": 1, "reason": "a\ud800"}, "half a character"),
    Case("half a character in an edit", "pair", {"verdict": "step", "outcome": 1, "edit": "\udfff"}, "edit has half"),
    Case("a reason without end", "pair", {"verdict": "step", "outcome": 1, "reason": "x" * 20_000}, "20,000"),
    Case("an unknown flag", "pair", {"verdict": "step", "outcome": 1, "flags": {"harmfull": ""}}, "mean 'harmful'"),
    Case("time that is none", "pair", {"verdict": "step", "outcome": 1, "seconds": float("nan")}, "seconds: found nan"),
    Case("time backwards", "pair", {"verdict": "step", "outcome": 1, "idle_seconds": -1.0}, "idle_seconds: found -1"),
]


def attempt(case: Case) -> str | None:
    try:
        check_decision(Decision(**case.decision), case.kind, case.questions or EVERYTHING, case.answers)
    except DataError as error:
        return None if re.search(case.names, str(error)) else f"{case.name}: the refusal is {error}"
    return f"{case.name}: it was taken"
