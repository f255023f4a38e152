"""What may change between a run and its resumption.

What a stage that has begun was given stays: its settings, the seed, the inputs. Settings that steer without changing
results (`MayChange`), and everything about stages that have not begun, may change; that is an event of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from kedge.core.errors import ConfigError
from kedge.core.settings import Section
from kedge.core.stage import MayChange
from kedge.recipe.schema import Recipe
from kedge.runs.folder import Run, status_of
from kedge.runs.journal import Alteration
from kedge.runs.manifest import MANIFEST_NAME, Environment, Manifest, read_manifest

ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """A setting that differs: `stage` is empty for one of the whole recipe."""

    stage: str
    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        where = f"stages.{self.stage}" + (f".{self.key}" if self.key else "") if self.stage else self.key
        return f"{where}: was {self.before!r}, is {self.after!r}"

    def as_dict(self) -> dict[str, Any]:
        return {"stage": self.stage, "key": self.key, "before": self.before, "after": self.after}


def accepted_changes(folder: Path, recipe: Recipe) -> list[SettingChange]:
    """What differs from the recipe that the run in `folder` was started with; an error where a stage has used it."""
    before, after = dict(read_manifest(folder).settings), recipe.resolved()
    begun = begun_stages(folder, (*before["stages"], *recipe.stages))
    refused, accepted = list[str](), list[SettingChange]()
    old, new = (_without_changeable({**values, "stages": {}}, recipe.settings) for values in (before, after))
    for change in _changes("", old, new):
        users = [name for name, manifest in begun.items() if _uses(manifest, change.key)]
        if users:
            refused.append(f"{change} ({_used_by(folder, users)})")
        else:
            accepted.append(change)
    for name in dict.fromkeys((*before["stages"], *recipe.stages)):
        old, new = before["stages"].get(name, ABSENT), after["stages"].get(name, ABSENT)
        if name not in begun:
            accepted.extend(_changes(name, old, new))
        elif name not in recipe.stages:
            refused.append(f"stages.{name}: is not in the recipe any more ({_used_by(folder, [name])})")
        else:
            old = _in_today_s_terms(begun[name].settings, recipe.stages[name])
            section = recipe.stages[name]
            fixed = _changes(name, _without_changeable(old, section), _without_changeable(new, section))
            refused.extend(f"{change} ({_used_by(folder, [name])})" for change in fixed)
            accepted.extend(change for change in _changes(name, old, new) if change not in fixed)
    if refused:
        listed = "\n".join(f"  {line}" for line in refused)
        raise ConfigError(
            f"{folder}: the recipe has changed since this run was started, where stages have used it already:\n"
            f"{listed}\nUndo this, or start a new run with --set name=ANOTHER. What only stages that have not begun "
            "use may change"
        )
    return accepted


def begun_stages(folder: Path, names: tuple[str, ...]) -> dict[str, Manifest]:
    """The manifests of the stages that have begun, in this order."""
    homes = {name: folder / name for name in names}
    return {name: read_manifest(home) for name, home in homes.items() if (home / MANIFEST_NAME).exists()}


def refuse_altered_journals(folder: Path) -> None:
    """An error that names the file and the line where a journal of a run or stage is not as it was written.

    Lines that are missing behind the newest checkpoint do no harm: they are written again, and a power cut loses them.
    """
    run = Run.open(folder, for_writing=False)
    harmful = [alteration for alteration in run.alterations() if not _is_behind_checkpoint(run, alteration)]
    if harmful:
        chains = ", ".join(f".{alteration.file.name}.chain" for alteration in harmful)
        listed = "\n".join(f"  {alteration}" for alteration in harmful)
        raise ConfigError(
            f"{folder}: journals of this run were altered after they had been written:\n{listed}\nRestore them from a "
            f"copy, or start a new run with --set name=ANOTHER; to go on with them as they are, remove {chains}"
        )


def version_changes(before: Environment, now: Environment) -> dict[str, dict[str, str]]:
    """Versions that are not what they were: `{"torch": {"before": "2.11.0", "after": "2.13.0"}}`."""
    old, new = _versions(before), _versions(now)
    return {
        name: {"before": old.get(name, ABSENT), "after": new.get(name, ABSENT)}
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    }


def in_words(changes: Mapping[str, Mapping[str, Any]]) -> str:
    """
    >>> in_words({"torch": {"before": "2.11.0", "after": "2.13.0"}})
    'torch 2.11.0 → 2.13.0'
    """
    return ", ".join(f"{name} {change['before']} → {change['after']}" for name, change in changes.items())


def _versions(environment: Environment) -> dict[str, str]:
    return {"kedge": environment.kedge, "python": environment.python, **environment.packages}


def _is_behind_checkpoint(run: Run, alteration: Alteration) -> bool:
    if not alteration.is_cut or run.manifest.status == "done":
        return False
    steps = run.checkpoints.steps()
    num_lines = run.checkpoints.read(steps[-1], check_hashes=False).num_lines if steps else {}
    return alteration.line > num_lines.get(alteration.file.name, 0)


def _uses(manifest: Manifest, key: str) -> bool:
    """Whether a stage that has begun was given the recipe's setting `key`; `model` only where it names no other."""
    return key != "model" or manifest.settings.get("from", ABSENT) is None


def _used_by(folder: Path, names: list[str]) -> str:
    return ", ".join(f"{name} is {status_of(folder / name)}" for name in names)


def _in_today_s_terms(settings: Mapping[str, Any], section: Section) -> dict[str, Any]:
    """Settings of an older version with the defaults of keys that it did not have."""
    try:
        return type(section).model_validate(settings).model_dump(mode="json", by_alias=True)
    except ValidationError:
        return dict(settings)


def _without_changeable(values: Mapping[str, Any], settings: Section) -> dict[str, Any]:
    fixed = dict(values)
    for name, info in type(settings).model_fields.items():
        key, part = info.alias or name, getattr(settings, name)
        if any(isinstance(mark, MayChange) for mark in info.metadata):
            fixed.pop(key, None)
        elif isinstance(part, Section) and isinstance(fixed.get(key), dict):
            fixed[key] = _without_changeable(fixed[key], part)
        elif isinstance(part, list) and isinstance(fixed.get(key), list) and len(fixed[key]) == len(part):
            fixed[key] = [
                _without_changeable(value, entry) if isinstance(entry, Section) and isinstance(value, dict) else value
                for value, entry in zip(fixed[key], cast("list[Any]", part), strict=True)
            ]
    return fixed


def _changes(stage: str, before: Any, after: Any, key: str = "") -> list[SettingChange]:
    """What differs between two resolved sections.

    >>> [str(change) for change in _changes("sft", {"seed": 1, "a": {"lr": 2}}, {"seed": 1, "a": {"lr": 3}})]
    ['stages.sft.a.lr: was 2, is 3']
    """
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return [] if before == after else [SettingChange(stage=stage, key=key, before=before, after=after)]
    old, new = cast("dict[str, Any]", before), cast("dict[str, Any]", after)
    return [change for name in dict.fromkeys((*old, *new)) for change in _inside(stage, old, new, name, key)]


def _inside(stage: str, old: dict[str, Any], new: dict[str, Any], name: str, key: str) -> Iterator[SettingChange]:
    yield from _changes(stage, old.get(name, ABSENT), new.get(name, ABSENT), f"{key}.{name}" if key else name)
