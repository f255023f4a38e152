"""The recipe that settings by path make, as text; and the table of fields as Markdown."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Final, cast

from ruamel.yaml import YAML

from kedge.core.errors import ConfigError
from kedge.core.quoting import one_line
from kedge.importing.engine import Imported, Row
from kedge.importing.rules import Source, folder_name

TOP: Final = ("kedge", "name", "seed", "model", "chat_template", "device", "trackers", "placement", "stages")
NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "ppo": ("prompts", "reward"),
    "group": ("prompts", "reward"),
}
"""Inputs of a stage by kind; `data` where nothing is said."""
OPTIONS: Final = {"data": "--data", "prompts": "--data", "reward": "--reward"}


def recipe_values(imported: Imported, source: Source) -> dict[str, Any]:
    """The recipe as nested values. What it needs and nobody named is reported all at once."""
    values: dict[str, Any] = {}
    for path, setting in {**imported.settings, **_asked(source)}.items():
        _put(values, path.split("."), setting)
    stage: dict[str, Any] = values.pop("stage", {})
    missing = ["the model (--model)"] if "model" not in values else []
    missing += [
        f"{name} of the stage ({OPTIONS[name]})" for name in NEEDED.get(source.kind, ("data",)) if name not in stage
    ]
    if missing:
        told = [
            f"\n  {f'line {row.line}: ' if row.line else ''}{row.field}: {row.value}: {row.why}"
            for row in imported.rows
            if row.verdict == "refused" and any(option in row.why for option in ("--model", *OPTIONS.values()))
        ]
        raise ConfigError(f"{source.file}: does not say what a recipe needs: {', '.join(missing)}{''.join(told)}")
    if source.processes > 1:
        values["placement"] = {**values.get("placement", {}), "processes": source.processes}
    method = stage.get("method")
    method_name: Any = (
        cast("dict[str, Any]", method).get("kind", source.trainer) if isinstance(method, dict) else method
    )
    name = folder_name(method_name) if source.kind in ("preference", "group") else source.kind
    values |= {"kedge": 1, "stages": {name: {"kind": source.kind, **stage}}}
    values.setdefault("name", folder_name(source.file.stem))
    return {key: values[key] for key in TOP if key in values}


def _asked(source: Source) -> dict[str, Any]:
    """What the command line names, over what the configuration does."""
    asked = source.asked
    named = {
        "model": asked.model,
        "stage.prompts" if source.is_rl else "stage.data": asked.data,
        "stage.reward": asked.reward if source.is_rl else None,
    }
    return {path: name for path, name in named.items() if name is not None}


def _put(values: dict[str, Any], path: list[str], setting: Any) -> None:
    for key in path[:-1]:
        inner = values.setdefault(key, {})
        if not isinstance(inner, dict):
            inner = values[key] = {}
        values = cast("dict[str, Any]", inner)
    held = values.get(path[-1])
    if setting == {} and isinstance(held, dict):  # a section that is asked for, and has parts already
        return
    values[path[-1]] = setting


def recipe_text(values: Mapping[str, Any], source: Source, tool: str, table_name: str) -> str:
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # pyright: ignore[reportAttributeAccessIssue]  # the order is ours
    yaml.width = 120
    out = io.StringIO()
    yaml.dump(dict(values), out)  # pyright: ignore[reportUnknownMemberType]  # ruamel has no types for it
    head = f"# {one_line(source.file.name)} of {tool} ({source.trainer}); what became of each field: {table_name}\n"
    return head + out.getvalue()


def table_text(rows: tuple[Row, ...], source: Source, tool: str) -> str:
    """The table of fields as a page of Markdown."""
    lines = [
        f"# {_cell(source.file.name)} of {tool} ({source.trainer})",
        "",
        "| field | value | verdict | becomes | why |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        verdict = f"{row.verdict}, by its default" if row.is_default else row.verdict
        cells = (f"`{_cell(row.field)}`", _cell(row.value), verdict, _cell(", ".join(row.becomes)), _cell(row.why))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    """Text of others inside a table: it begins no cell, no tag and no code."""
    escaped = one_line(text, 400).replace("\\", "\\\\").replace("|", "\\|")
    return escaped.replace("<", "&lt;").replace("`", "'")
