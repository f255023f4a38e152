"""Settings that a plugin brings along: a field whose section belongs to an installed part, chosen by its `kind`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import GenericAlias
from typing import Any, cast

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from kedge.core import plugins
from kedge.core.errors import PluginError
from kedge.core.quoting import quoted
from kedge.core.settings import Section
from kedge.core.suggest import did_you_mean


class PluginSection:
    """Marks a field that holds the settings of a part: `{kind: NAME, …}`, or its bare name.

    `Annotated[Section, PluginSection("generators")]` is validated by the `settings` section of the part that is
    installed under that name, which is imported at that moment. The location of an error inside that section has the
    part's name behind the field's, as that of a tagged union has. Messages call a part `noun`, and show `example`.
    """

    def __init__(
        self,
        kind: plugins.Kind,
        *,
        noun: str | None = None,
        example: str = "{kind: NAME}",
        section_of: Callable[[str], type[Section]] | None = None,
    ) -> None:
        self._kind: plugins.Kind = kind
        self._noun = noun or kind.removesuffix("s")
        self._example = example
        self._section_of = section_of or self._settings_of_part

    @property
    def kind(self) -> plugins.Kind:
        return self._kind

    def section_of(self, name: str) -> type[Section]:
        """The settings of an installed part, which is imported for them."""
        return self._section_of(name)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validated)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        sections = [handler(section.__pydantic_core_schema__) for section in self._importable()]
        return {"anyOf": [{"type": "string", "enum": plugins.names(self._kind)}, *sections]}

    def _validated(self, value: Any) -> Section:
        if not isinstance(value, str | dict | Section):
            raise ValueError(
                f"must be the name of a {self._noun}, or a mapping with its settings, found {quoted(value)}"
            )
        name, installed = kind_of(value), plugins.names(self._kind)
        if name is None:
            raise ValueError(
                f"a {self._noun} with settings says which one it is, such as {self._example}; found no kind"
            )
        if name not in installed:
            hint, listed = did_you_mean(str(name), installed), ", ".join(installed)
            raise ValueError(f"there is no {self._noun} {quoted(name)}{hint}; {self._noun}s: {listed}")
        try:
            section = self.section_of(name)
        except PluginError as error:
            raise ValueError(str(error)) from error
        if isinstance(value, section):
            return value
        by_name: Any = GenericAlias(dict, (str, section))  # so that errors have the part's name in their location
        given: Any = {"kind": value} if isinstance(value, str) else value
        return TypeAdapter(by_name).validate_python({name: given})[name]

    def _settings_of_part(self, name: str) -> type[Section]:
        part = plugins.find(self._kind, name)
        settings: Any = getattr(part, "settings", None)
        if not (isinstance(settings, type) and issubclass(settings, Section)):
            raise PluginError(f"{self._noun} '{name}' is a {type(part).__name__} without a section of `settings`")
        return settings

    def _importable(self) -> Iterator[type[Section]]:
        """The sections of all parts that can be imported; one that cannot is reported where a recipe names it."""
        for name in plugins.names(self._kind):
            try:
                yield self.section_of(name)
            except PluginError:
                continue


def kind_of(value: Any) -> Any:
    """Which part a recipe names, rightly or wrongly: by a word, or by the `kind` of its settings; None without one."""
    return cast("dict[str, Any]", value).get("kind") if isinstance(value, dict) else getattr(value, "kind", value)


def installed_name(kind: plugins.Kind) -> Callable[[Any], Any]:
    """A validator of a field that holds the bare name of an installed part."""

    def check(value: Any) -> Any:
        names = plugins.names(kind)
        if value not in names:
            *others, last = (f"'{name}'" for name in names)
            allowed = f"{', '.join(others)} or {last}" if others else last
            raise ValueError(f"must be {allowed}, found {quoted(value)}{did_you_mean(str(value), names)}")
        return value

    return check
