"""A configuration of another tool is read, its recipe checked, and both recipe and table of fields written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from kedge.core.errors import ConfigError
from kedge.core.files import write_text
from kedge.core.suggest import did_you_mean
from kedge.importing import axolotl, llama_factory, openrlhf, trl
from kedge.importing.engine import Row, through
from kedge.importing.recipe import recipe_text, recipe_values, table_text
from kedge.importing.rules import Asked
from kedge.recipe.schema import recipe_of

TOOLS: Final[Mapping[str, ModuleType]] = {
    "trl": trl,
    "openrlhf": openrlhf,
    "llama-factory": llama_factory,
    "axolotl": axolotl,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRecipe:
    recipe: Mapping[str, Any]
    rows: tuple[Row, ...]
    text: str
    page: str
    file: Path
    table_file: Path

    def count(self, verdict: str) -> int:
        return sum(row.verdict == verdict for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        return {
            "file": str(self.file),
            "table": str(self.table_file),
            "recipe": dict(self.recipe),
            "fields": [row.as_dict() for row in self.rows],
        }


def import_recipe(tool: str, config: Path, to: Path, asked: Asked, *, skip_unknown: bool = False) -> ImportedRecipe:
    """The recipe and its table, checked by the schema; nothing is written yet."""
    if tool not in TOOLS:
        raise ConfigError(f"no tool {tool!r} to import from{did_you_mean(tool, TOOLS)}; there are {', '.join(TOOLS)}")
    module = TOOLS[tool]
    try:
        source = module.source_of(config, asked, to.parent)
        fixed = module.fixed(source)
    except ConfigError:
        raise
    except (ValueError, TypeError, ArithmeticError) as problem:
        raise ConfigError(f"{config}: {problem}") from None
    imported = through(source, module.TABLE, fixed, skip_unknown=skip_unknown)
    values = recipe_values(imported, source)
    try:
        recipe_of(values, label="recipe")
    except ConfigError as problem:
        culprits = _culprits(str(problem), imported.rows)
        raise ConfigError(f"{config}: what it says makes no recipe that Kedge runs; {problem}{culprits}") from None
    table_file = to.with_suffix(".import.md")
    return ImportedRecipe(
        recipe=values,
        rows=imported.rows,
        text=recipe_text(values, source, tool, table_file.name),
        page=table_text(imported.rows, source, tool),
        file=to,
        table_file=table_file,
    )


def _culprits(problem: str, rows: tuple[Row, ...]) -> str:
    """The fields that the settings named in a message come from."""
    listed: list[str] = []
    for row in rows:
        for setting in row.becomes:
            path = setting.partition(": ")[0]
            if f"{path}: " in problem:
                where = f" (line {row.line})" if row.line else " (by its default)" if row.is_default else ""
                listed.append(f"\n  {path} comes from {row.field}{where}")
    return "".join(listed)


def write_recipe(imported: ImportedRecipe) -> None:
    """Both files; nothing is overwritten."""
    present = [str(path) for path in (imported.file, imported.table_file) if path.exists()]
    if present:
        raise ConfigError(f"{', '.join(present)}: already there, and nothing is overwritten; use --to another file")
    imported.file.parent.mkdir(parents=True, exist_ok=True)
    write_text(imported.table_file, imported.page)
    write_text(imported.file, imported.text)
