"""A recipe that is being written: its YAML text in the project, changed by the form or as text, and what is wrong.

Every change is saved at once, so that a closed tab loses nothing. It names the text that it is a change of: a tab that
shows an older one is told so and changes nothing.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kedge.core import plugins
from kedge.core.errors import ConfigError, DataError, KedgeError
from kedge.core.files import hash_bytes, write_text
from kedge.core.quoting import quoted
from kedge.core.suggest import did_you_mean
from kedge.core.yaml.editing import tree_of_text, with_value, without
from kedge.core.yaml.limits import MAX_BYTES
from kedge.core.yaml.source import KeyPath, dotted, parse_scalar
from kedge.recipe.schema import LONGEST_NAME, NAME_PATTERN, Recipe, load_recipe
from kedge.recipe.wiring import connect
from kedge.web.studio.fields import Field, Form, Group, form_of
from kedge.web.studio.project import Project, refused_settings

Operation = Literal["set", "unset", "kind", "text", "on", "off", "add_stage", "remove_stage"]
_AT_LINE = re.compile(r"^(?:\S.*? )?line \d+: ")
_SAVING = threading.Lock()
"""Two tabs may save at the same moment: who comes second must see what the first has written."""
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.yaml")


class Outdated(DataError):
    """Another tab, or an editor, has changed the recipe since it was shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    file: Path
    text: str

    @property
    def hash(self) -> str:
        return hash_bytes(self.text.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change by the form. `text` is what somebody typed."""

    operation: Operation
    path: KeyPath
    text: str = ""


@dataclass(slots=True, kw_only=True)
class Problems:
    """What is wrong, at the field or group where it is; `top` has what belongs to none."""

    top: list[str] = field(default_factory=list[str])
    at: dict[KeyPath, list[str]] = field(default_factory=dict[KeyPath, list[str]])

    def __bool__(self) -> bool:
        return bool(self.top or self.at)

    def by_key(self) -> dict[str, list[str]]:
        return {key_of(path): texts for path, texts in self.at.items()}


def key_of(path: KeyPath) -> str:
    """A path as pages have it."""
    return json.dumps(list(path), ensure_ascii=False)


def recipe_file(project: Project, name: str) -> Path:
    """The file of a recipe of the project, which may not be there yet."""
    if not _FILE.fullmatch(name):
        raise DataError(f"{quoted(name)}: a recipe is called NAME.yaml: letters, digits, - and _")
    return project.inside(name)


def read_draft(project: Project, name: str) -> Draft:
    file = recipe_file(project, name)
    if not file.is_file():
        raise DataError(f"{name}: there is no such recipe here{did_you_mean(name, project.recipes())}")
    if file.stat().st_size > MAX_BYTES:
        raise DataError(f"{name}: larger than {MAX_BYTES // 2**20} MiB, the most that a recipe may have")
    return _read(file)


def _read(file: Path) -> Draft:
    try:
        return Draft(file=file, text=file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise Outdated(f"{file.name} was taken away meanwhile; nothing was saved") from error
    except UnicodeDecodeError as error:
        # Shown with marks in the place of its letters it would be saved so.
        raise DataError(f"{file.name}: invalid UTF-8 at byte {error.start + 1}; save it as UTF-8") from error


def save_text(draft: Draft, text: str, *, base: str) -> Draft:
    """Put `text` in the place of the draft, which must still be the one with the hash `base`."""
    if len(text.encode(errors="surrogatepass")) > MAX_BYTES:
        raise DataError(f"more than {MAX_BYTES // 2**20} MiB, the most that a recipe may have")
    try:
        with _SAVING:
            if _read(draft.file).hash != base:
                raise Outdated(
                    f"{draft.file.name} was changed elsewhere since this page was loaded (another tab, an editor); "
                    "nothing was saved: load the page again"
                )
            write_text(draft.file, text)
    except UnicodeEncodeError as error:
        raise DataError("the text has half a character (a surrogate), which no file can hold") from error
    return Draft(file=draft.file, text=text)


def changed(text: str, change: Change) -> str:
    """The text after a change by the form; what cannot be read as a value is refused with words for its field."""
    path = change.path
    match change.operation:
        case "set":
            if not change.text.strip():
                return without(text, path)
            form = form_of(tree_of_text(text, Path("recipe.yaml")).values)
            value = _value(form, path, change.text)
            return with_value(_with_usual_kinds(text, form, path), path, value)
        case "unset" | "off":
            return without(text, path)
        case "on":
            part = find_part(form_of(tree_of_text(text, Path("recipe.yaml")).values), path)
            kind = part.kind if isinstance(part, Group) else ""
            return with_value(text, path, {"kind": kind} if kind else {})
        case "kind":
            return _with_kind(text, path, change.text)
        case "text":
            return with_value(text, path, change.text)
        case "add_stage":
            name = _stage_name(text, str(path[-1]) if path else "")
            return with_value(text, ("stages", name), {"kind": change.text})
        case "remove_stage":
            return without(text, path)


def _with_kind(text: str, path: KeyPath, kind: str) -> str:
    """A section of another kind has other settings; a stage keeps those that it has, and is told which do not fit."""
    if len(path) == 2 and path[0] == "stages":
        return with_value(text, (*path, "kind"), kind)
    return with_value(text, path, {"kind": kind}) if kind else without(text, path)


def _stage_name(text: str, name: str) -> str:
    stages: Any = tree_of_text(text, Path("recipe.yaml")).values.get("stages")
    if not re.fullmatch(NAME_PATTERN, name) or len(name) > LONGEST_NAME:
        raise DataError(f"a stage's name: letters, digits, - and _, found {quoted(name)}")
    if isinstance(stages, dict) and name in stages:
        raise DataError(f"there is a stage {name} already; call this one otherwise")
    return name


def _with_usual_kinds(text: str, form: Form, path: KeyPath) -> str:
    """A setting of a part that the recipe has not named belongs to the one that is the default."""
    for part in form.parts():
        is_around = part.path == path[: len(part.path)]
        if is_around and isinstance(part, Group) and part.kind and not part.is_written:
            text = with_value(text, (*part.path, "kind"), part.kind)
    return text


def _value(form: Form, path: KeyPath, typed: str) -> Any:
    """What was typed, as the value that the setting's type asks for: a name stays a text, whatever it looks like."""
    part = find_part(form, path)
    if not isinstance(part, Field):
        raise DataError("there is no such setting here; load the page again")
    if part.control == "text":
        return typed
    if part.is_list and not typed.lstrip().startswith("["):
        return [word.strip() for word in typed.split(",") if word.strip()]
    try:
        return parse_scalar(typed, option=dotted(path[-1:]))
    except ConfigError:
        if part.control == "yaml" and not typed.lstrip().startswith(("[", "{", "-")):
            return typed
        raise


def find_part(form: Form, path: KeyPath) -> Field | Group | None:
    return next((part for part in form.parts() if part.path == path), None)


def look_at(project: Project, draft: Draft) -> tuple[Form | None, Recipe | None, Problems]:
    """The form of a draft, the recipe where it is one, and all that can be said of it without its data and models."""
    problems = Problems()
    try:
        values = tree_of_text(draft.text, draft.file).values
    except KedgeError as error:
        problems.top.append(str(error))
        return None, None, problems
    form = form_of(values)
    if refused := list(refused_settings(project, values, draft.file)):
        for path, text in refused:
            put(problems, form, path, text)
        return form, None, problems
    try:
        recipe = load_recipe(draft.file)
        plan = connect(recipe)
    except KedgeError as error:
        for line in _lines(error):
            put_text(problems, form, line)
        return form, None, problems
    for name, links in plan.links.items():
        for link in links:
            if link.is_data and not link.stage and "/" in link.source() and not _is_there(link.source()):
                text = f"there is no file {quoted(link.value)} in the project; upload it, or name another"
                put(problems, form, ("stages", name, *link.field.split(".")), text)
    return form, recipe if not problems else None, problems


def _is_there(source: str) -> bool:
    """Also as `FOLDER:SPLIT`; a hub's name has one slash and no file."""
    from kedge.data.sources import is_hub_id

    return Path(source).exists() or Path(source.rpartition(":")[0] or source).exists() or is_hub_id(source)


def _lines(error: KedgeError) -> Sequence[str]:
    """The problems of an error that lists them below its first line."""
    first, *others = str(error).splitlines()
    return [line.strip() for line in others if line.strip()] or [first]


def put_text(problems: Problems, form: Form, line: str) -> None:
    """A problem in words goes to the field that it begins with: `line 7: stages.sft.batch: must be …`."""
    words = _AT_LINE.sub("", line)
    name, colon, text = words.partition(": ")
    places = {dotted(part.path): part.path for part in form.parts()}
    if colon and (path := places.get(name) or places.get(f"stages.{name}")):
        put(problems, form, path, text)
        return
    parts = name.split(".")
    while len(parts) > 1:
        last, parts = parts[-1], parts[:-1]
        if path := places.get(".".join(parts)) or places.get(f"stages.{'.'.join(parts)}"):
            put(problems, form, path, f"{last}: {text}")
            return
    problems.top.append(line)


def put(problems: Problems, form: Form, path: KeyPath, text: str) -> None:
    """A problem at the field of `path`, or at the nearest group around it; at the top where there is none."""
    known = {part.path for part in form.parts()}
    near = path
    while near and near not in known:
        near = near[:-1]
    if not near:
        problems.top.append(f"{dotted(path)}: {text}" if path else text)
        return
    inner = dotted(path[len(near) :])
    texts = problems.at.setdefault(near, [])
    words = f"{inner}: {text}" if inner else text
    if words not in texts:
        texts.append(words)


def suggestions(project: Project, form: Form, models: Iterable[str]) -> Mapping[str, list[str]]:
    """Names to offer, by the list that a field asks for."""
    stages = [group.label for group in form.stages]
    outputs = [f"{group.label}.{output}" for group in form.stages for output in _outputs(group)]
    return {
        "data": [*outputs, *project.data_files()],
        "model": [*stages, *models, *project.model_folders()],
        "stage": stages,
    }


def _outputs(group: Group) -> list[str]:
    """What a stage makes that is data."""
    if group.kind not in plugins.names("stages"):
        return []
    try:
        makes: Mapping[str, Any] = plugins.find("stages", group.kind).makes
    except KedgeError:
        return []
    return [name for name, kind in makes.items() if kind not in ("model", "reward_model", "evaluation", "verdict")]
