"""Badcases: answers that must never come again, kept for ever and put to every candidate.

`badcases/*.jsonl` is only ever added to. A line with a prompt is a case; a line with the same id and no prompt changes
its status. A case that was fixed is replayed all the same; one in quarantine is not, until its day comes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Literal

import orjson

from kedge.core.errors import ConfigError, DataError
from kedge.core.files import hash_json
from kedge.core.suggest import did_you_mean
from kedge.exams.exam import Turns
from kedge.gate.checks import Check, parse_check

Severity = Literal["block", "warn"]
Status = Literal["open", "fixed", "quarantined"]
FOLDER = Path("badcases")
FILE = "cases.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Badcase:
    id: str
    prompt: Turns
    bad: str
    """The answer that must not come again."""
    why: str
    check: Check
    severity: Severity
    samples: int
    needed: int
    """So many of the samples must be good."""
    siblings: tuple[str, ...] = ()
    """The same question in other words, never to be trained on: what counts where the prompt itself was."""
    origin: Mapping[str, Any] = field(default_factory=dict[str, Any])
    status: Status = "open"
    reason: str = ""
    until: str = ""
    """The day from which a case in quarantine counts again."""
    file: str = ""

    def counts(self, today: date) -> bool:
        return self.status != "quarantined" or (bool(self.until) and date.fromisoformat(self.until) <= today)

    def prompts(self) -> list[Turns]:
        """What is asked: the prompt, then its siblings, each in the place of its last turn."""
        return [self.prompt, *((*self.prompt[:-1], (self.prompt[-1][0], text)) for text in self.siblings)]

    def as_dict(self) -> dict[str, Any]:
        """As a line has it."""
        return {
            "id": self.id,
            "prompt": [{"role": role, "content": content} for role, content in self.prompt],
            "bad": self.bad,
            "why": self.why,
            "check": self.check.as_dict(),
            "severity": self.severity,
            "samples": self.samples,
            "needed": self.needed,
            "siblings": list(self.siblings),
            "origin": dict(self.origin),
            "status": self.status,
        }


def case_id(prompt: Turns, bad: str) -> str:
    return f"case-{hash_json([list(map(list, prompt)), bad])[:8]}"


def read_badcases(folder: Path) -> list[Badcase]:
    """All cases of a folder with the status that they have now; none where there is no folder."""
    cases: dict[str, Badcase] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            if line.strip():
                _fold(cases, line, file, f"{file}:{number}")
    return list(cases.values())


def _fold(cases: dict[str, Badcase], line: bytes, file: Path, where: str) -> None:
    try:
        fields: dict[str, Any] = orjson.loads(line)
        name = str(fields["id"])
        if "prompt" in fields:
            if name in cases:
                raise DataError(f"{where}: case {name} is there already ({cases[name].file}); a case stands once")
            cases[name] = _case(fields, file, where)
        elif name not in cases:
            raise DataError(f"{where}: no case {name} above this line{did_you_mean(name, cases)}")
        else:
            cases[name] = _with_status(cases[name], fields, where)
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{where}: not a badcase ({type(error).__name__}: {error})") from error


def _case(fields: Mapping[str, Any], file: Path, where: str) -> Badcase:
    case = Badcase(
        id=str(fields["id"]),
        prompt=tuple((str(turn["role"]), str(turn["content"])) for turn in fields["prompt"]),
        bad=str(fields["bad"]),
        why=str(fields["why"]),
        check=parse_check(fields["check"], where=f"{where}: check"),
        severity=fields["severity"],
        samples=int(fields["samples"]),
        needed=int(fields["needed"]),
        siblings=tuple(map(str, fields.get("siblings", ()))),
        origin=fields.get("origin", {}),
        file=str(file),
    )
    check_case(case, where=where)
    return case


def check_case(case: Badcase, *, where: str) -> None:
    if case.severity not in ("block", "warn"):
        raise ConfigError(f"{where}: severity is block or warn, found {case.severity!r}")
    if not case.prompt or not case.prompt[-1][1].strip():
        raise ConfigError(f"{where}: an empty prompt")
    if not 1 <= case.needed <= case.samples <= 1000:
        raise ConfigError(
            f"{where}: needed is from 1 to samples, and samples at most 1,000: found {case.needed} of {case.samples}"
        )
    if not case.why.strip():
        raise ConfigError(f"{where}: say why the answer is bad (--why)")


def _with_status(case: Badcase, fields: Mapping[str, Any], where: str) -> Badcase:
    status, until = fields["status"], str(fields.get("until") or "")
    if status not in ("open", "fixed", "quarantined"):
        raise DataError(f"{where}: status is open, fixed or quarantined, found {status!r}")
    if until:
        parse_day(until, where)
    return replace(case, status=status, reason=str(fields.get("reason") or ""), until=until)


def parse_day(text: str, where: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{where}: a day as 2027-01-31, found {text!r}") from None


def add_badcase(folder: Path, case: Badcase) -> Path:
    """Add a case to the folder's file; one that is there already is refused."""
    check_case(case, where=case.id)
    known = {other.id: other for other in read_badcases(folder)}
    if case.id in known:
        raise ConfigError(f"{known[case.id].file}: this answer to this prompt is a case already, {case.id}")
    return _append(folder / FILE, {**case.as_dict(), "at": _now()})


def change_status(folder: Path, name: str, status: Status, *, reason: str, until: str, by: str) -> Badcase:
    """Add the line that changes the status of a case; gives the case as it is now."""
    known = {case.id: case for case in read_badcases(folder)}
    if name not in known:
        raise ConfigError(f"no case {name} in {folder}{did_you_mean(name, known)}; there are {len(known)}")
    if not reason.strip():
        raise ConfigError("--reason: say why; it stays in the file")
    if status == "quarantined" and not until:
        raise ConfigError("--until: the day from which the case counts again, as 2027-01-31")
    if until and parse_day(until, "--until") <= datetime.now(UTC).date():
        raise ConfigError(f"--until: {until} is not after today")
    line = {"id": name, "status": status, "reason": reason, "until": until or None, "by": by, "at": _now()}
    _append(Path(known[name].file), line)
    return replace(known[name], status=status, reason=reason, until=until)


def _append(file: Path, line: Mapping[str, Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    is_cut_off = file.is_file() and file.stat().st_size > 0 and not file.read_bytes().endswith(b"\n")
    with file.open("ab") as out:
        out.write((b"\n" if is_cut_off else b"") + orjson.dumps(line) + b"\n")
        out.flush()
        os.fsync(out.fileno())
    return file


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def badcases_hash(cases: Iterable[Badcase]) -> str:
    return hash_json([[case.as_dict(), case.status, case.reason, case.until] for case in cases])


def find_answer(rows: Sequence[Mapping[str, Any]], name: str, file: Path) -> Mapping[str, Any]:
    """The row of an answers file with this id."""
    by_id = {str(row.get("id")): row for row in rows}
    if name not in by_id:
        raise ConfigError(f"{file}: no answer {name!r}{did_you_mean(name, by_id)}; it has {len(by_id):,}")
    return by_id[name]
