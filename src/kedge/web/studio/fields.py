"""The form of a recipe, made from its own schema: sections are groups that fold, settings are fields.

It is made of what the YAML says, right or wrong: a recipe that cannot run yet still has its form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from kedge.core import plugins
from kedge.core.errors import PluginError
from kedge.core.plugin_sections import PluginSection
from kedge.core.settings import Section, default_of
from kedge.core.stage import DATA_KINDS, Input, PartName, Stage
from kedge.core.yaml.source import KeyPath
from kedge.recipe.schema import RecipeSettings

Control = Literal["text", "number", "choice", "flag", "yaml"]
_BOUNDS = (("ge", "at least {}"), ("gt", "more than {}"), ("le", "at most {}"), ("lt", "less than {}"))
_ONE_KIND = 1
_MARKS = frozenset(",[]{}\"'#:\n")
"""What a word between commas may not have."""
_ABSENT: Any = object()
"""What the YAML does not say; `null` is something that it says."""
_LEFT_OUT = frozenset({"kedge", "stages"})
"""Of the top: the version is no choice, and stages have groups of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One setting. `value` is what the YAML says, as text; empty where it says nothing and the default counts."""

    path: KeyPath
    label: str
    help: str
    control: Control
    value: str
    default: str
    bounds: str = ""
    choices: tuple[str, ...] = ()
    suggestions: str = ""
    """Which list of names is offered beside it: `data`, `model`, or none."""
    is_required: bool = False
    is_list: bool = False
    """Whether it holds a list alone, which may be typed as words between commas."""
    kinds: tuple[str, ...] = ()
    """Sections that may stand here instead of a text, by their kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A section. `kinds` are those that it may be; `kind` is the one that it is."""

    path: KeyPath
    label: str
    help: str
    parts: tuple[Field | Group, ...]
    is_written: bool
    """Whether the YAML says anything of it."""
    is_optional: bool = False
    """Whether it may be left out as a whole: then it is off until the YAML has it."""
    kind: str = ""
    kinds: tuple[str, ...] = ()
    may_be_text: bool = False

    @property
    def is_off(self) -> bool:
        return self.is_optional and not self.is_written


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    top: tuple[Field | Group, ...]
    stages: tuple[Group, ...]

    def parts(self) -> Iterator[Field | Group]:
        """All fields and groups, the outer ones before the inner ones."""
        for part in (*self.top, *self.stages):
            yield from _walk(part)

    def fields(self) -> Iterator[Field]:
        return (part for part in self.parts() if isinstance(part, Field))


def _walk(part: Field | Group) -> Iterator[Field | Group]:
    yield part
    if isinstance(part, Group):
        for inner in part.parts:
            yield from _walk(inner)


def form_of(values: Mapping[str, Any]) -> Form:
    """The form of a recipe that says `values`."""
    stages = values.get("stages")
    named = cast("Mapping[str, Any]", stages) if isinstance(stages, Mapping) else {}
    top = _parts(RecipeSettings, values, (), skip=_LEFT_OUT)
    return Form(top=top, stages=tuple(_stage(str(name), raw) for name, raw in named.items()))


def _stage(name: str, raw: Any) -> Group:
    values = cast("Mapping[str, Any]", raw) if isinstance(raw, Mapping) else {}
    kind, kinds = str(values.get("kind", "")), tuple(plugins.names("stages"))
    parts, summary = tuple[Field | Group, ...](), "say what kind of stage this is"
    if kind in kinds:
        try:
            stage = cast(Stage, plugins.find("stages", kind))
            parts, summary = _parts(stage.settings, values, ("stages", name), skip=frozenset({"kind"})), stage.summary
        except PluginError as error:
            summary = str(error)
    return Group(
        path=("stages", name), label=name, help=summary, parts=parts, is_written=True, kind=kind, kinds=kinds
    )  # fmt: skip


def _parts(
    section: type[Section],
    values: Mapping[str, Any],
    path: KeyPath,
    *,
    default: Section | None = None,
    skip: frozenset[str] = frozenset(),
) -> tuple[Field | Group, ...]:
    """Plain fields first, then the sections inside: what is looked for most stands at the top."""
    parts: list[Field | Group] = []
    for name, info in section.model_fields.items():
        key = info.alias or name
        if key in skip or info.exclude:
            continue
        raw = values.get(key, values.get(name, _ABSENT))
        own = getattr(default, name) if default is not None else default_of(info)
        parts.append(_part(key, info, raw, (*path, key), own))
    return tuple(sorted(parts, key=lambda part: isinstance(part, Group)))


def _part(key: str, info: FieldInfo, raw: Any, path: KeyPath, default: Any) -> Field | Group:
    mark = next((mark for mark in info.metadata if isinstance(mark, PluginSection)), None)
    options = _options(info.annotation)
    if mark is not None:
        return _plugin_group(key, mark, info, raw, path, default)
    sections = [
        option
        for option in options
        if isinstance(option, type) and issubclass(option, Section) and _kinds_of(option) != ("callable",)
    ]
    by_kind = {kind: section for section in sections for kind in _kinds_of(section)}
    has_text = str in options
    if len(sections) == _ONE_KIND and not has_text and not _literals(options) and list not in _origins(options):
        return _section_group(key, sections[0], info, raw, path, default)
    if by_kind and len(by_kind) == len(sections) and isinstance(raw, Mapping):
        return _kind_group(key, by_kind, info, cast("Mapping[str, Any]", raw), path, may_be_text=has_text)
    kinds = tuple(by_kind) if by_kind and len(by_kind) >= len(sections) > 0 and has_text else ()
    return _field(key, info, options, raw, path, default, kinds=kinds)


def _section_group(key: str, section: type[Section], info: FieldInfo, raw: Any, path: KeyPath, default: Any) -> Group:
    values = cast("Mapping[str, Any]", raw) if isinstance(raw, Mapping) else {}
    own = default if isinstance(default, section) else None
    only_kind = kinds[0] if len(kinds := _kinds_of(section)) == 1 else ""
    return Group(
        path=path,
        label=key,
        help=_help(info),
        parts=_parts(section, values, path, default=own, skip=frozenset({"kind"} if only_kind else ())),
        is_written=raw is not _ABSENT,
        kind=only_kind,
        is_optional=NoneType in _options(info.annotation) and own is None,
    )


def _kind_group(
    key: str,
    by_kind: Mapping[str, type[Section]],
    info: FieldInfo,
    raw: Mapping[str, Any],
    path: KeyPath,
    *,
    may_be_text: bool,
) -> Group:
    kind = str(raw.get("kind", ""))
    section = by_kind.get(kind)
    parts = () if section is None else _parts(section, raw, path, skip=frozenset({"kind"}))
    return Group(
        path=path,
        label=key,
        help=_help(info),
        parts=parts,
        is_written=True,
        kind=kind,
        kinds=tuple(by_kind),
        may_be_text=may_be_text,
    )


def _plugin_group(key: str, mark: PluginSection, info: FieldInfo, raw: Any, path: KeyPath, default: Any) -> Group:
    values = cast("Mapping[str, Any]", raw) if isinstance(raw, Mapping) else {}
    usual = str(getattr(default, "kind", ""))
    kind = raw if isinstance(raw, str) else str(values.get("kind", "")) or usual
    parts = tuple[Field | Group, ...]()
    if kind in plugins.names(mark.kind):
        try:
            parts = _parts(mark.section_of(kind), values, path, skip=frozenset({"kind"}))
        except PluginError:
            parts = ()
    return Group(
        path=path,
        label=key,
        help=_help(info),
        parts=parts,
        is_written=raw is not _ABSENT,
        kind=kind,
        kinds=tuple(plugins.names(mark.kind)),
    )


def _field(
    key: str, info: FieldInfo, options: Sequence[Any], raw: Any, path: KeyPath, default: Any, kinds: tuple[str, ...]
) -> Field:
    literals = _literals(options)
    part = next((mark for mark in info.metadata if isinstance(mark, PartName)), None)
    if part is not None and not part.is_code:
        literals = tuple(plugins.names(part.kind))
    plain = [option for option in options if option is not NoneType and get_origin(option) is not Literal]
    is_choice = bool(literals) and (not plain or part is not None)
    control: Control = (
        "choice" if is_choice
        else "flag" if plain == [bool]
        else "number" if plain and set(plain) <= {int, float}
        else "text" if plain == [str]
        else "yaml"
    )  # fmt: skip
    is_list = control == "yaml" and {get_origin(option) or option for option in plain} <= {list, tuple}
    choices = literals if is_choice else ("true", "false", *literals) if control == "flag" else ()
    if choices and NoneType in options and default is not None:
        choices = (*choices, "null")
    return Field(
        path=path,
        label=key,
        help=_help(info),
        control=control,
        value="" if raw is _ABSENT else shown(raw, is_list=is_list),
        default="" if default is None else shown(_plain(default), is_list=is_list),
        bounds=_bounds(info),
        choices=choices,
        suggestions=_suggestions(path, info),
        is_required=info.is_required(),
        is_list=is_list,
        kinds=kinds,
    )


def shown(value: Any, *, is_list: bool = False) -> str:
    """A value as a field has it: text as it is, a list of words with commas where only a list may stand, anything else
    as JSON, which YAML reads too.

    >>> shown("a"), shown(0.002), shown(["a", "b"]), shown(["a", "b"], is_list=True), shown(True)
    ('a', '0.002', '["a", "b"]', 'a, b', 'true')
    """
    parts = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else ()
    if is_list and parts and all(isinstance(part, str) and part and not set(part) & _MARKS for part in parts):
        return ", ".join(parts)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in cast("Mapping[str, Any]", value).items()}
    return [_plain(part) for part in cast("Sequence[Any]", value)] if isinstance(value, list | tuple) else value


def _help(info: FieldInfo) -> str:
    return " ".join((info.description or "").split())


def _bounds(info: FieldInfo) -> str:
    """The range of a number, in words."""
    ends = [
        words.format(f"{getattr(mark, name):g}")
        for name, words in _BOUNDS
        for mark in info.metadata
        if getattr(mark, name, None) is not None and abs(getattr(mark, name)) < 1e15
    ]
    return ", ".join(ends)


def _suggestions(path: KeyPath, info: FieldInfo) -> str:
    mark = next((mark for mark in info.metadata if isinstance(mark, Input)), None)
    if path == ("model",):
        return "model"
    if mark is None:
        return ""
    return "data" if DATA_KINDS & set(mark.kinds) else "model" if "model" in mark.kinds else "stage"


def _options(annotation: Any) -> list[Any]:
    """The types that a setting may have, out of unions and annotations."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _options(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [option for part in get_args(annotation) for option in _options(part)]
    return [annotation]


def _origins(options: Sequence[Any]) -> set[Any]:
    return {get_origin(option) for option in options}


def _literals(options: Sequence[Any]) -> tuple[str, ...]:
    return tuple(shown(value) for option in options if get_origin(option) is Literal for value in get_args(option))


def _kinds_of(section: type[Section]) -> tuple[str, ...]:
    info = section.model_fields.get("kind")
    return _literals(_options(info.annotation)) if info is not None else ()
