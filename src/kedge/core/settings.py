"""Settings: frozen pydantic sections that reject unknown keys. A section lives next to the code that reads it.

Two rules hold for every section, wherever it stands. A mapping that gives a part of a section keeps the default of the
field that holds it: `actor: {clip: 0.5}` changes `clip` alone. And every number is bounded, by its own field or by
`LARGEST` and `LARGEST_OF`, so that a slip of the keyboard is an error and not an endless run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, cast, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

from kedge.core.quoting import quoted

LARGEST: Final = 10**9
"""The most that a number of a recipe may be, either side of 0, where its field has no bound of its own."""

LARGEST_OF: Final[Mapping[str, int]] = {
    "epochs": 10_000,
    **dict.fromkeys(("batch", "micro_batch", "minibatches", "rows"), 1_000_000),
    **dict.fromkeys(("answers", "n", "rounds"), 100_000),
    **dict.fromkeys(("max_length", "max_prompt_tokens", "max_new_tokens", "max_tokens"), 100_000_000),
    **dict.fromkeys(("lr", "temperature"), 100),
    **dict.fromkeys(("timeout_s", "backoff_s"), 7 * 24 * 3600),
    "retries": 1000,
}
"""The same for settings that mean the same in every section, by their names."""
MAX_PATH, MAX_PATH_PART = 4096, 255
"""Bytes of a path and of each name in it, as most disks have them."""


def unusable_path(text: str) -> str | None:
    """Why no file can be called so; None where one can."""
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
        return f"no file name has control characters, found {quoted(text)}"
    names = [name.encode(errors="surrogatepass") for name in text.split("/")]
    if sum(len(name) + 1 for name in names) > MAX_PATH or max(map(len, names)) > MAX_PATH_PART:
        return f"longer than a file's name can be ({MAX_PATH_PART} bytes), found {quoted(text)}"
    return None


def _usable(text: str) -> str:
    if problem := unusable_path(text):
        raise ValueError(problem)
    return text


PathText = Annotated[str, AfterValidator(_usable)]
"""What may name a file or folder."""


def _bound_numbers(schema: Any, largest: int = LARGEST) -> None:
    """Give a bound to every number of a model's schema that has none; sections inside are models of their own."""
    match schema:
        case {"type": "int" | "float"}:
            if not {"le", "lt"} & schema.keys():
                schema["le"] = largest
            if not {"ge", "gt"} & schema.keys():
                schema["ge"] = -LARGEST
        case {"type": "model-fields"}:
            for name, field in schema["fields"].items():
                _bound_numbers(field["schema"], LARGEST_OF.get(name, LARGEST))
        case {"type": "union"}:
            for choice in schema["choices"]:
                _bound_numbers(choice[0] if isinstance(choice, tuple) else choice, largest)
        case {"type": "tuple", "items_schema": parts}:
            for part in parts:
                _bound_numbers(part, largest)
        case {"type": "list", "items_schema": part}:
            _bound_numbers(part, largest)
        case {"type": "dict"}:
            _bound_numbers(schema.get("values_schema"), largest)
        case {"schema": inner}:
            _bound_numbers(inner, largest)
        case _:
            pass


class Section(BaseModel):
    """One group of settings. Each field has a range and a docstring below it; class defaults are recommended."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        populate_by_name=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _read_as_meant(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        values = dict(cast("Mapping[str, Any]", given))
        for name, info in cls.model_fields.items():
            _spell_out_truth(values, name, info)
            default = default_of(info)
            if isinstance(default, Section):
                _put_under(values, name, info, default)
        return values

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _bound_numbers(handler.resolve_ref_schema(schema))
        return schema


def _spell_out_truth(values: dict[str, Any], name: str, info: FieldInfo) -> None:
    """`true` where a number is wanted is no number: pydantic would read 1, a learning rate of 1.0 among them."""
    key = info.alias if info.alias in values else name
    if isinstance(values.get(key), bool) and _is_number(info.annotation):
        values[key] = str(values[key]).lower()  # refused by the field itself, as any other word


def _is_number(annotation: Any) -> bool:
    """Whether a field takes numbers, and no truth values.

    >>> _is_number(float | None), _is_number(int | Literal["auto"]), _is_number(bool | int), _is_number(bool)
    (True, True, False, False)
    """
    kinds = {*_kinds(annotation)}
    return bool(kinds & {int, float}) and not kinds & {bool, Any, object}


def _kinds(annotation: Any) -> Iterator[Any]:
    """The types of a union, without what they are annotated with; the types of the values of a `Literal`."""
    if get_origin(annotation) is Literal:
        yield from map(type, get_args(annotation))
    elif get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _kinds(part)
    else:
        yield get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def default_of(info: FieldInfo) -> Any:
    """The default of a field; None where it has none, or where that depends on other fields."""
    if info.is_required() or info.default_factory_takes_validated_data:
        return None
    return info.get_default(call_default_factory=True)


def _put_under(values: dict[str, Any], name: str, info: FieldInfo, default: Section) -> None:
    """Fill up what `values` say of one field from its default, where they give a part of the same section."""
    key = next((key for key in (info.alias, name) if key in values), None)
    given: Any = values[key] if key is not None else None
    if key is not None and isinstance(given, Mapping) and _is_part_of(default, cast("Mapping[str, Any]", given), info):
        values[key] = _filled_up(cast("Mapping[str, Any]", given), default)


def _is_part_of(default: Section, given: Mapping[str, Any], info: FieldInfo) -> bool:
    """Where a field has a choice of sections, those of another `kind` have nothing of the default."""
    choices = [kind for kind in (info.annotation, *get_args(info.annotation)) if _is_section(kind)]
    return choices == [type(default)] or given.get("kind") == getattr(default, "kind", None) is not None


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _filled_up(given: Mapping[str, Any], default: Section) -> dict[str, Any]:
    """`given` over what `default` has set otherwise than its class does."""
    values = dict(given)
    for name, info in type(default).model_fields.items():
        own: Any = getattr(default, name)
        if name not in values and info.alias not in values:
            if info.is_required() or own != default_of(info):
                values[info.alias or name] = own
        elif isinstance(own, Section):
            _put_under(values, name, info, own)
    return values
