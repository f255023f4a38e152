"""Ready recipes: listed by the first comment line of each, written out with the data that we ship for them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import kedge
from kedge.core.errors import ConfigError
from kedge.core.settings import Section
from kedge.core.suggest import did_you_mean
from kedge.recipe.schema import load_recipe
from kedge.recipe.wiring import connect

START = ("tiny", "loop", "gpu", "hh", "real-demo")
"""What to start from, the smallest first; the other recipes are one method or one kind of data each."""


def template_folder() -> Path:
    """The recipes of this installation: inside the package in a wheel, beside `src/` in a checkout."""
    package = Path(kedge.__file__).parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def templates() -> dict[str, str]:
    """Name and summary of every ready recipe: those of `START`, then the others by name."""
    summaries = {file.stem: _summary(file) for file in sorted(template_folder().glob("*.yaml"))}
    return {name: summaries[name] for name in (*START, *(name for name in summaries if name not in START))}


def template_files(name: str) -> list[tuple[Path, Path]]:
    """The recipe of a template and the shipped files that it reads: where each is, and where it belongs in a folder."""
    known = templates()
    if name not in known:
        raise ConfigError(f"no template named {name!r}{did_you_mean(name, known)}; there are: {', '.join(known)}")
    home = template_folder().resolve()
    recipe = load_recipe(home / f"{name}.yaml")
    return [(source, source.relative_to(home)) for source in (recipe.file, *_shipped_files(home, recipe.file))]


def write_template(name: str, folder: Path) -> list[Path]:
    """Copy a recipe, and the shipped files it reads, into `folder`; nothing is overwritten."""
    files = template_files(name)
    targets = [folder / place for _, place in files]
    present = [str(target) for target in targets if target.exists()]
    if present:
        raise ConfigError(f"{', '.join(present)}: already there, and nothing is overwritten; use --to another folder")
    for (source, _), target in zip(files, targets, strict=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    return targets


def free_folder(folder: Path) -> Path:
    """`folder`, or the first of folder-2, folder-3, … that is not there yet."""
    names = (folder, *(folder.with_name(f"{folder.name}-{number}") for number in range(2, 10_000)))
    return next(name for name in names if not name.exists())


def _shipped_files(home: Path, file: Path) -> list[Path]:
    """The files below `home` that a recipe reads, each once, in the order of first use."""
    recipe = load_recipe(file)
    plan = connect(recipe)
    paths = [Path(link.source()).resolve() for links in plan.links.values() for link in links if not link.stage]
    paths += [(home / name).resolve() for settings in recipe.stages.values() for name in _function_files(settings)]
    return list(dict.fromkeys(path for path in paths if path.is_file() and path.is_relative_to(home)))


def _function_files(settings: Section) -> Iterator[str]:
    """The files of the reward functions in settings, as the recipe names them: `file.py:function`."""
    for name in type(settings).model_fields:
        value: Any = getattr(settings, name)
        parts: Iterable[Any] = cast("dict[str, Any]", value).values() if isinstance(value, dict) else (value,)
        for part in parts:
            if isinstance(part, Section):
                yield from _function_files(part)
    if getattr(settings, "kind", None) == "function":
        yield str(getattr(settings, "path", "")).rpartition(":")[0]


def _summary(file: Path) -> str:
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()
