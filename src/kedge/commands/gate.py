"""What `kedge gate`, `kedge promote` and `kedge badcase` do: from names on the command line to a verdict, to the
registry, and to cases that every gate replays."""

from __future__ import annotations

import getpass
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from kedge.commands.sample import find_model
from kedge.core.errors import ConfigError, DataError, KedgeError
from kedge.core.files import write_text
from kedge.core.quoting import one_line
from kedge.core.yaml.source import parse_scalar
from kedge.data.sources import rows
from kedge.exams.exam import Turns
from kedge.gate.badcases import Badcase, Severity, add_badcase, case_id, change_status, find_answer, read_badcases
from kedge.gate.checks import parse_check, passes
from kedge.gate.registry import Promotion, promote, promotions
from kedge.gate.replayed import CaseResult
from kedge.gate.rules import default_rules
from kedge.gate.suggested import suggested_rules
from kedge.gate.table import table_lines
from kedge.gate.verdict import NAME, SealedVerdict, read_verdict
from kedge.models.loading.load import DTypeName
from kedge.runs.manifest import MANIFEST_NAME, read_manifest
from kedge.stages.gate.gating import GateRequest, NamedModel, gate, refuse, verdict_facts
from kedge.stages.gate.models import gated_model, home_of, training_files
from kedge.stages.gate.replay import Replay, judge_settings, replay, reward_settings
from kedge.stages.shared.device import checked_device

Undecided = Literal["block", "allow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a model answers badcases."""

    seed: int
    device: str
    dtype: DTypeName
    chat_template: str | None
    max_new_tokens: int

    def replay(self, model: str, files: Sequence[Path] | None, say: Callable[[str], None]) -> Replay:
        return Replay(
            model=model,
            files=files,
            folder=Path(),
            seed=self.seed,
            device=checked_device(self.device),
            dtype=self.dtype,
            chat_template=self.chat_template,
            max_new_tokens=self.max_new_tokens,
            say=say,
        )


def write_rules(file: Path, sources: Sequence[Path]) -> None:
    """The rules that ship, or rules for what was measured in these folders. A file that is there stays."""
    if file.exists():
        raise ConfigError(f"{file}: already there, and nothing is overwritten")
    write_text(file, suggested_rules(sources) if sources else default_rules())


def decide(
    candidate: str,
    baseline: str,
    sources: Sequence[Path],
    *,
    rules: Path,
    badcases: Path,
    ledger: Path,
    is_reserved: bool,
    out: Path,
    sampling: Sampling,
    say: Callable[[str], None],
) -> tuple[SealedVerdict, list[str]]:
    """A verdict in `out`, and what is to be said besides."""
    models = [NamedModel(place=find_model(model), names=names_of(model)) for model in (candidate, baseline)]
    request = GateRequest(
        candidate=models[0],
        baseline=models[1],
        sources=sources,
        rules=rules,
        badcases=badcases,
        ledger=ledger,
        is_reserved=is_reserved,
        replay=sampling.replay(models[0].place, None, say),
    )
    return gate(request, out)


def names_of(model: str) -> tuple[str, ...]:
    """What a model may be called in results: as it was named, and as its folder or stage is."""
    path = Path(model)
    if not path.is_dir():
        return (model,)
    folder = path.resolve()
    short = folder.parent.name if folder.name == "model" else folder.name
    return tuple(dict.fromkeys((short, model, str(path), find_model(model))))


def verdicts_for(model: str, given: Sequence[Path]) -> Iterator[tuple[Path, SealedVerdict]]:
    """Verdicts that may be about a model: those that were named, else those of its run and of this folder.

    One that was named and cannot be read is an error; others that cannot are none for this model.
    """
    if given:
        yield from ((file, read_verdict(file / NAME if file.is_dir() else file)) for file in given)
        return
    own = gated_model(model, find_model(model))
    home = home_of(own)
    files = [Path(NAME), *(sorted(home.parent.glob(f"*/{NAME}")) if home else ())]
    for file in files:
        if file.is_file():
            yield file, read_verdict(file)


def promote_model(model: str, *, alias: str, verdicts: Sequence[Path], registry: Path, override: str) -> Promotion:
    """Enter a model into the registry. With an override a verdict that was changed is none."""
    if not alias.strip() or any(letter.isspace() for letter in alias):
        raise ConfigError(f"--as {alias!r}: a name without blanks, for example prod")
    promotions(registry)  # one that was changed takes no more lines
    own = gated_model(names_of(model)[0], find_model(model))
    try:
        about = list(verdicts_for(model, verdicts))
    except KedgeError:
        if not override:
            raise
        about = []
    return promote(registry, alias=alias, model=own, verdicts=about, by=getpass.getuser(), override=override)


def promotion_lines(registry: Path) -> list[str]:
    """What was promoted, the newest last."""
    return [
        f"{line.at}  {line.alias}  {line.model.path} ({line.model.weights})  verdict {line.verdict}, by {line.by}"
        + (f"  OVERRIDE: {line.override}" if line.override else "")
        for line in promotions(registry)
    ]


def add_case(
    folder: Path,
    file: Path,
    answer: str,
    *,
    why: str,
    check: str,
    severity: Severity,
    samples: int,
    needed: int | None,
    siblings: Sequence[str],
    person: str | None = None,
) -> tuple[Badcase, Path]:
    """A case from an answer of a file, as `evaluate` and `kedge sample` write them; gives the file it went to. `person`
    is who adds it, by default the user of this process."""
    values = parse_scalar(check, option="--check")
    wanted = parse_check(values, where="--check")
    if wanted.judge is not None:
        judge_settings(wanted.judge, where="--check judge")
    if wanted.beats is not None:
        reward_settings(wanted.beats, where="--check beats")
    if not file.is_file():
        raise ConfigError(f"{file}: there is no such file of answers")
    read = [row.fields for row in rows(file) if row.fields is not None]
    row = find_answer(read, answer, file)
    prompt, bad = _prompt_of(row, file), str(row.get("answer", ""))
    if passes(wanted, prompt[-1][1], bad):
        raise ConfigError(
            f"--check {check}: the bad answer passes this check ({one_line(bad)!r}), so the case would never fail"
        )
    case = Badcase(
        id=case_id(prompt, bad),
        prompt=prompt,
        bad=bad,
        why=why,
        check=wanted,
        severity=severity,
        samples=samples,
        needed=samples if needed is None else needed,
        siblings=tuple(siblings),
        origin=_origin(file, row, person or getpass.getuser()),
    )
    return case, add_badcase(folder, case)


def typed_check(kind: str, text: str) -> str:
    """The check of a badcase, as `--check` takes it, from what somebody typed into a page.

    >>> typed_check("number", "4"), typed_check("refusal", "cannot, will not")
    ('{"number": 4.0}', '{"refusal": ["cannot", "will", "not"]}')
    """
    value: object = text.replace(",", " ").split() if kind == "refusal" else text
    if kind == "number":
        try:
            value = float(text)
        except ValueError as error:
            raise DataError(f"a good answer ends with {text!r}: this is no number") from error
    return json.dumps({kind: value}, ensure_ascii=False)


def _prompt_of(row: Any, file: Path) -> Turns:
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return (("user", prompt),)
    turns = cast("list[dict[str, str]]", prompt) if isinstance(prompt, list) else []
    if not turns or not all("role" in turn and "content" in turn for turn in turns):
        raise ConfigError(
            f"{file}: answer {row.get('id')} has no prompt; expected text, or messages with role and content"
        )
    return tuple((turn["role"], turn["content"]) for turn in turns)


def _origin(file: Path, row: Any, person: str) -> dict[str, Any]:
    home = file.parent
    run = read_manifest(home) if (home / MANIFEST_NAME).is_file() else None
    return {
        "file": str(file),
        "answer": str(row["id"]),
        "model": row.get("model"),
        "run": {"name": run.name, "stage": run.stage, "recipe": run.recipe_hash} if run else None,
        "person": person,
    }


def case_lines(folder: Path) -> Iterator[str]:
    today = datetime.now(UTC).date()
    for case in read_badcases(folder):
        status = case.status if case.counts(today) else f"quarantined until {case.until}"
        reason = f" ({case.reason})" if case.reason else ""
        need = f"{case.needed} of {case.samples}, {len(case.siblings)} sibling(s)"
        check = one_line(str(case.check.as_dict()), 60)
        yield f"{case.id}  {case.severity}  {status}{reason}  {need}  {check}  {one_line(case.why, 80)}"


def set_case(folder: Path, name: str, *, is_fixed: bool, reason: str, until: str) -> Badcase:
    status = "fixed" if is_fixed else "quarantined"
    return change_status(folder, name, status, reason=reason, until=until, by=getpass.getuser())


def replay_on(
    model: str,
    folder: Path,
    *,
    only: Sequence[str],
    sampling: Sampling,
    say: Callable[[str], None],
) -> list[CaseResult]:
    """All cases that count, or those that are named, put to a model."""
    today = datetime.now(UTC).date()
    cases = read_badcases(folder)
    if unknown := set(only) - {case.id for case in cases}:
        raise ConfigError(f"no case {', '.join(sorted(unknown))} in {folder}; `kedge badcase list` shows them")
    if not cases:
        raise ConfigError(f"{folder}: there are no badcases; `kedge badcase add` makes one")
    chosen = [case for case in cases if (case.id in only if only else case.counts(today))]
    place = find_model(model)
    return replay(chosen, sampling.replay(place, training_files(gated_model(model, place)), say))


def replay_lines(results: Sequence[CaseResult]) -> Iterator[str]:
    for result in results:
        mark = {"pass": "pass", "fail": "FAIL", "undecided": "undecided"}[result.verdict]
        yield f"{result.id}  {result.severity}  {mark}  {result.reason}  {one_line(result.why, 80)}"
        example = next((asked.example for asked in result.asked if asked.example), "")
        if example and result.verdict != "pass":
            yield f"    {one_line(example, 160)}"
    held = sum(result.verdict == "pass" for result in results)
    yield f"{held} of {len(results)} cases hold"


__all__ = [
    "Sampling", "Undecided", "add_case", "case_lines", "decide", "names_of", "promote_model", "promotion_lines",
    "refuse", "replay_lines", "replay_on", "set_case", "table_lines", "verdict_facts", "write_rules",
]  # fmt: skip
