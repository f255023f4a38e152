"""Pydantic's complaints in the words of a recipe: file, line, field, what was found, what is allowed."""

from __future__ import annotations

import types
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kedge.core.plugin_sections import PluginSection
from kedge.core.quoting import one_line, quoted
from kedge.core.suggest import did_you_mean
from kedge.core.urls import redacted
from kedge.core.yaml.source import KeyPath, Tree

Describe = Callable[[Mapping[str, Any], Any], str]

_WORDS: dict[str, Describe] = {
    "greater_than": lambda ctx, found: f"must be greater than {ctx['gt']:g}, found {quoted(found)}",
    "greater_than_equal": lambda ctx, found: f"must be at least {ctx['ge']:g}, found {quoted(found)}",
    "less_than": lambda ctx, found: f"must be less than {ctx['lt']:g}, found {quoted(found)}",
    "less_than_equal": lambda ctx, found: f"must be at most {ctx['le']:g}, found {quoted(found)}",
    "literal_error": lambda ctx, found: f"must be {ctx['expected']}, found {quoted(found)}{_near(found, ctx)}",
    "int_type": lambda _, found: f"must be a whole number, found {quoted(found)}",
    "int_parsing": lambda _, found: f"must be a whole number, found {quoted(found)}",
    "int_from_float": lambda _, found: f"must be a whole number, found {quoted(found)}",
    "float_type": lambda _, found: f"must be a number, found {quoted(found)}",
    "float_parsing": lambda _, found: f"must be a number, found {quoted(found)}",
    "finite_number": lambda _, found: f"must be a finite number, found {quoted(found)}",
    "bool_type": lambda _, found: f"must be true or false, found {quoted(found)}",
    "bool_parsing": lambda _, found: f"must be true or false, found {quoted(found)}",
    "string_type": lambda _, found: f"must be text, found {quoted(found)}",
    "string_too_long": lambda ctx, found: f"must have at most {ctx['max_length']} characters, found {quoted(found)}",
    "too_long": lambda ctx, found: f"may have at most {ctx['max_length']} item(s), found {len(found):,}",
    "string_too_short": lambda _, found: f"must not be empty, found {quoted(found)}",
    "string_pattern_mismatch": lambda ctx, found: f"must match {ctx['pattern']}, found {quoted(found)}",
    "list_type": lambda _, found: f"must be a list, found {quoted(found)}",
    "tuple_type": lambda _, found: f"must be a list, found {quoted(found)}",
    "dict_type": lambda _, found: f"must be a mapping of settings, found {quoted(found)}",
    "model_type": lambda _, found: f"must be a mapping of settings, found {quoted(found)}",
    "model_attributes_type": lambda _, found: f"must be a mapping of settings, found {quoted(found)}",
    "too_short": lambda ctx, found: f"needs at least {ctx['min_length']} item(s), found {len(found)}",
    "value_error": lambda ctx, found: one_line(str(ctx["error"]), 2000),
    "union_tag_invalid": lambda ctx, _: f"kind must be {_tags(ctx)}, found {quoted(ctx['tag'])}{_near_tag(ctx)}",
    "union_tag_not_found": lambda ctx, found: f"needs a `kind`, found {quoted(found)}",
}


MAX_DESCRIBED = 100
"""Problems of one section that are described in full."""
RENAMED: dict[str, str] = {"hold": "memory", "watch": "logging", "look": "eval"}
"""Keys of version 0.1, and what they are called now."""
GONE: dict[str, str] = {"packing": "sequences are always packed without padding; leave it out"}
"""Keys of version 0.1 that nothing is in the place of, and why."""
OTHER_VALUES: dict[str, tuple[str, str]] = {"truncate": ("too_long", "`left` is `cut`, `refuse` is the same")}
"""Keys of version 0.1 that are called otherwise now and have other values."""


def lines(error: ValidationError, section: type[BaseModel], tree: Tree, prefix: KeyPath = ()) -> list[tuple[int, str]]:
    """One (line, text) per problem, without repeats of the same place by the branches of a union."""
    found: dict[tuple[KeyPath, str], tuple[int, str]] = {}
    complaints = error.errors(include_url=False)
    lists = {details["loc"][:at] for details in complaints for at, part in enumerate(details["loc"]) if _is_list(part)}
    for number, details in enumerate(complaints):
        if _is_of_another_branch(details, lists):
            continue
        if number >= MAX_DESCRIBED and details["type"] == "extra_forbidden":
            # It is counted, and not shown; to look for the nearest name of forty thousand keys takes minutes.
            path = (*prefix, *details["loc"])
            found[path, ""] = tree.problem(path, "not a setting here")
            continue
        path = (*prefix, *_written(details, section))
        text = describe(details, section)
        found.setdefault((path, text), tree.problem(path, text))
    return list(found.values())


def placed_lines(error: ValidationError, section: type[BaseModel], tree: Tree) -> list[tuple[int, str]]:
    """The same for a section whose keys are names that users choose: a place is what the tree has of pydantic's
    location."""
    found: dict[tuple[KeyPath, str], tuple[int, str]] = {}
    for details in error.errors(include_url=False):
        path, text = _placed(details, tree), describe(details, section)
        found.setdefault((path, text), tree.problem(path, text))
    return list(found.values())


def _placed(details: ErrorDetails, tree: Tree) -> KeyPath:
    path: KeyPath = ()
    for part in details["loc"]:
        if (*path, part) in tree.places:
            path = (*path, part)
    is_key = details["type"] in ("missing", "extra_forbidden") and path != details["loc"]
    return (*path, details["loc"][-1]) if is_key and path[-1:] != details["loc"][-1:] else path


def describe(details: ErrorDetails, section: type[BaseModel]) -> str:
    """The words for one complaint."""
    kind, context = details["type"], details.get("ctx", {})
    if kind == "missing":
        return "is required and missing"
    if kind == "extra_forbidden":
        return unknown_key(str(details["loc"][-1]), known_keys(section, details["loc"][:-1]))
    words = _WORDS[kind](context, details["input"]) if kind in _WORDS else None
    return redacted(words or f"{details['msg']}, found {quoted(details['input'])}")


def unknown_key(key: str, known: Sequence[str]) -> str:
    """The words for a key that is not one of `known`."""
    if RENAMED.get(key) in known:
        return f"is called `{RENAMED[key]}` now; the settings inside are the same"
    if key in OTHER_VALUES and OTHER_VALUES[key][0] in known:
        name, values = OTHER_VALUES[key]
        return f"is called `{name}` now: {values}"
    if key in GONE:
        return f"is no longer a setting: {GONE[key]}"
    allowed = f"; allowed: {', '.join(known)}" if known else ""
    return f"not a setting here{did_you_mean(key, known) or allowed}"


def known_keys(section: type[BaseModel], location: Iterable[str | int]) -> list[str]:
    """The keys that the section at `location` (seen from `section`) accepts."""
    current: list[Any] = [section]
    for part in location:
        current = [inner for annotation in current for inner in _step(annotation, part)] or current
    return list(dict.fromkeys(name for annotation in current for name in _names(annotation)))


def _is_of_another_branch(details: ErrorDetails, lists: Container[tuple[int | str, ...]]) -> bool:
    """Where text, a mapping or a list may stand, a mapping is not complained about for not being text, nor the reverse.

    `lists` are the places where a list may stand too.
    """
    if len(details["loc"]) < 2 or details["type"] not in ("string_type", "list_type", "model_type"):
        return False
    *place, branch = details["loc"]
    value = details["input"]
    may_be_list = tuple(place) in lists
    if branch == "str":
        return isinstance(value, Mapping) or (may_be_list and isinstance(value, list))
    return may_be_list and (_is_list(branch) or details["type"] == "model_type")


def _is_list(part: int | str) -> bool:
    return str(part).startswith("list[")


_PYTHON_KINDS = frozenset({"callable"})
"""Kinds that only a script can give, with an object that no recipe can hold."""


def _tags(context: Mapping[str, Any]) -> str:
    return " or ".join(f"'{tag}'" for tag in _recipe_tags(context))


def _near_tag(context: Mapping[str, Any]) -> str:
    return did_you_mean(str(context["tag"]), _recipe_tags(context))


def _recipe_tags(context: Mapping[str, Any]) -> list[str]:
    tags = [tag.strip("'") for tag in str(context["expected_tags"]).split(", ")]
    return [tag for tag in tags if tag not in _PYTHON_KINDS]


def _near(found: Any, context: Mapping[str, Any]) -> str:
    options = str(context["expected"]).replace(" or ", ", ").split(", ")
    return did_you_mean(str(found), [option.strip("'") for option in options])


def _names(model: Any) -> list[str]:
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return []
    return [info.alias or name for name, info in model.model_fields.items()]


def _step(model: Any, part: str | int) -> list[Any]:
    """The types that a value below `part` may have; a union's tag or a list's index stays where it is.

    Where the section belongs to a plugin, the plugin's name is the next part.
    """
    if isinstance(model, PluginSection):
        return [model.section_of(str(part))]
    if isinstance(model, type) and issubclass(model, BaseModel):
        for name, info in model.model_fields.items():
            if part in (name, info.alias):
                marks = [mark for mark in info.metadata if isinstance(mark, PluginSection)]
                return marks or unwrapped(info.annotation)
    return []


def _is_mapping(model: Any, part: str | int) -> bool:
    """Whether the field `part` holds names that people give, with a section behind each."""
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return False
    annotations = [info.annotation for name, info in model.model_fields.items() if part in (name, info.alias)]
    options = [option for annotation in annotations for option in (annotation, *get_args(annotation))]
    return any(get_origin(option) is dict for option in options)


def unwrapped(annotation: Any) -> list[Any]:
    """The types that an annotation names, out of unions, lists and mappings."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return unwrapped(get_args(annotation)[0])
    if origin in (Union, types.UnionType, list, tuple, dict):
        return [inner for argument in get_args(annotation) for inner in unwrapped(argument)]
    return [] if origin is Literal else [annotation]


def _written(details: ErrorDetails, section: type[BaseModel]) -> KeyPath:
    """Drop from pydantic's location what nobody wrote: class names, union tags, plugin names, validator names."""
    location, path = details["loc"], list[str | int]()
    current: list[Any] = [section]
    is_name = False
    for index, part in enumerate(location):
        following = [inner for model in current for inner in _step(model, part)]
        if is_name:  # the key of a mapping, behind which its values are described
            path.append(part)
            is_name = False
            continue
        is_name = any(_is_mapping(model, part) for model in current)
        is_plugin = any(isinstance(model, PluginSection) for model in current)
        is_key = bool(following) or isinstance(part, int) or any(part in _names(model) for model in current)
        is_branch = part == "str" or str(part).startswith(("tagged-union[", "list["))
        is_branch = is_branch or details["type"] == "value_error"
        if not is_plugin and (is_key or (index == len(location) - 1 and not (is_branch and index))):
            path.append(part)
        current = following or current
    return tuple(path)
