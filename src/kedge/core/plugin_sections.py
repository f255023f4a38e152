"""Settings that a plugin brings along: a field whose section belongs to an installed part, chosen by its `kind`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from kedge.core import plugins
from kedge.core.errors import PluginError
from kedge.core.settings import Section
from kedge.core.suggest import did_you_mean


class PluginSection:
    """Marks a field that holds the settings of a part: `{kind: NAME, …}`, or its bare name.

    `Annotated[Section, PluginSection("generators")]` is checked by the `settings` section of the part that is installed
    under that name, which is imported at that moment; problems inside are reported with their own place.
    """

    def __init__(self, kind: plugins.Kind) -> None:
        self.kind: plugins.Kind = kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self._validated, serialization=core_schema.plain_serializer_function_ser_schema(_dumped, info_arg=True)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        names = plugins.names(self.kind)
        sections = [cast("type[Section]", plugins.find(self.kind, name).settings) for name in names]
        described = [section.model_json_schema(by_alias=True) for section in sections]
        for one in described:
            if "$defs" in one:
                raise PluginError(f"{self.kind}: the settings of {one.get('title')} nest other sections: inline them")
        return {"anyOf": [{"enum": names}, *described]}

    def _validated(self, value: Any) -> Section:
        if isinstance(value, Section):
            return value
        given: dict[str, Any] = {"kind": value} if isinstance(value, str) else value
        if not isinstance(given, dict):  # pyright: ignore[reportUnnecessaryIsInstance]  # it comes from a recipe
            raise ValueError(f"must be the name of one, or a mapping with its settings, found {value!r}")
        name, installed = given.get("kind"), plugins.names(self.kind)
        singular = self.kind.removesuffix("s")
        if name is None:
            raise ValueError(f"needs a `kind`; installed: {', '.join(installed)}")
        if name not in installed:
            hint = did_you_mean(str(name), installed)
            raise ValueError(f"there is no {singular} of kind {name!r}{hint}; installed: {', '.join(installed)}")
        try:
            part = plugins.find(self.kind, name)
        except PluginError as error:
            raise ValueError(str(error)) from error
        return cast("type[Section]", part.settings).model_validate(given)


def _dumped(section: Section, info: core_schema.SerializationInfo) -> dict[str, Any]:
    return section.model_dump(mode=info.mode, by_alias=bool(info.by_alias))


def installed_name(kind: plugins.Kind) -> Callable[[Any], Any]:
    """A validator of a field that holds the bare name of an installed part."""

    def check(value: Any) -> Any:
        names = plugins.names(kind)
        if value not in names:
            *others, last = (f"'{name}'" for name in names)
            allowed = f"{', '.join(others)} or {last}" if others else last
            raise ValueError(f"must be {allowed}, found {value!r}{did_you_mean(str(value), names)}")
        return value

    return check
