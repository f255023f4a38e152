"""What a stage is made from, by content: data and models, the code of reward functions, templates, installed parts.

All of it is in the stage's manifest, and a run is not resumed with anything else. Left out: files that a reward
function opens, and packages that it imports, whose versions are in the manifest's environment where Kedge knows them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

from kedge.core import plugins
from kedge.core.errors import ConfigError
from kedge.core.files import hash_file, hash_folder, hash_json
from kedge.core.plugin_sections import PluginSection, kind_of
from kedge.core.settings import Section
from kedge.core.stage import PartName
from kedge.recipe.schema import Recipe
from kedge.recipe.wiring import Link
from kedge.runs.lineage import describe, locate
from kedge.runs.manifest import Artefact, Manifest

CODE: Final = "code"
TEMPLATE: Final = "template"
PLUGIN: Final = "plugin"
_OWN_PACKAGE: Final = "kedge"


def inputs_of_stage(
    name: str, recipe: Recipe, links: Sequence[Link], sources: Sequence[str], home: Path
) -> list[Artefact]:
    """Every input of a stage: `sources` are the files and models behind its `links`."""
    artefacts = [_artefact(link, source, home) for link, source in zip(links, sources, strict=True)]
    template = recipe.chat_template
    if template and Path(template).is_file() and not all(link.is_data for link in links):
        artefacts.append(describe("chat_template", TEMPLATE, Path(template), run_folder=home))
    parts = list(_parts_in(recipe.stages[name]))
    for field, mark, value in parts:
        file, colon, _ = value.rpartition(":")
        if mark.is_code and colon:
            artefacts.extend(_code(field, recipe.file.parent / file, home))
    named = [(mark.kind, value) for _, mark, value in parts if not (mark.is_code and ":" in value)]
    trackers = [("trackers", tracker) for tracker in recipe.settings.trackers]
    stage = ("stages", str(getattr(recipe.stages[name], "kind", "")))
    artefacts.extend(_installed(cast("Sequence[tuple[plugins.Kind, str]]", [stage, *named, *trackers])))
    return artefacts


def refuse_changed_inputs(name: str, inputs: Sequence[Artefact], before: Manifest, home: Path) -> None:
    """An error that lists what is not as it was when the stage was started.

    A manifest of a version that did not record code, templates and installed parts has nothing to compare them with.
    """
    is_complete = before.environment.threads is not None
    now = _by_name([artefact for artefact in inputs if is_complete or artefact.kind not in (CODE, TEMPLATE, PLUGIN)])
    then = _by_name(before.inputs)
    if not is_complete:
        now = {key: _as_hashed_before(artefact, then.get(key), home) for key, artefact in now.items()}
    changed = [_change(then.get(key), now.get(key)) for key in dict.fromkeys((*then, *now))]
    if lines := [line for line in changed if line]:
        listed = "\n".join(f"  {line}" for line in lines)
        raise ConfigError(
            f"{home}: inputs of stage {name!r} have changed since it was started:\n{listed}\n"
            "Restore them, or start a new run with --set name=ANOTHER"
        )


def _change(then: Artefact | None, now: Artefact | None) -> str | None:
    """What became of one input, in words; None where it is the same."""
    if then is None or now is None:
        there = then or now
        assert there is not None
        return f"{there.name} ({there.kind}): {there.path} {'is new' if then is None else 'is no input any more'}"
    if now.hash == then.hash and (now.hash != "hub" or now.path == then.path):
        return None
    where = now.path if now.path == then.path else f"was {then.path}, is {now.path}"
    return f"{now.name} ({now.kind}): {where}{'' if now.kind == PLUGIN else ', with other content'}"


def _as_hashed_before(now: Artefact, then: Artefact | None, home: Path) -> Artefact:
    """The same input with the hash of an older version, which counted the card of a model, where that is its hash."""
    folder = locate(now, home)
    is_same = then is not None and folder.is_dir() and hash_folder(folder) == then.hash
    return replace(now, hash=then.hash) if is_same and then else now


def _by_name(artefacts: Sequence[Artefact]) -> dict[tuple[str, int], Artefact]:
    """By field and place among those of the same field."""
    named: dict[tuple[str, int], Artefact] = {}
    for artefact in artefacts:
        count = sum(name == artefact.name for name, _ in named)
        named[artefact.name, count] = artefact
    return named


def _artefact(link: Link, source: str, home: Path) -> Artefact:
    """An input by its content. What lives on a hub is known by its name alone until it is loaded."""
    from kedge.models.loading.aliases import ALIASES, folder_of

    path = folder_of(source) if source in ALIASES and not link.is_data else Path(source)
    kind = link.kinds[0]
    if path.exists():
        return describe(link.field, kind, path, run_folder=home)
    return Artefact(name=link.field, kind=kind, path=source, hash="hub")


def _parts_in(settings: Section, above: tuple[str, ...] = ()) -> Iterator[tuple[str, PartName, str]]:
    """The installed parts and the code that settings name, also in sections inside of them: field, mark and value."""
    for name, info in type(settings).model_fields.items():
        value: Any = getattr(settings, name)
        where = (*above, info.alias or name)
        for mark in info.metadata:
            if isinstance(mark, PartName) and isinstance(value, str):
                yield ".".join(where), mark, value
            elif isinstance(mark, PluginSection) and value is not None:
                yield ".".join(where), PartName(mark.kind), str(kind_of(value))
        yield from _inside(value, where)


def _inside(value: Any, where: tuple[str, ...]) -> Iterator[tuple[str, PartName, str]]:
    if isinstance(value, Section):
        yield from _parts_in(value, where)
    elif isinstance(value, Mapping):
        for key, part in cast("Mapping[str, Any]", value).items():
            yield from _inside(part, (*where, str(key)))
    elif isinstance(value, list | tuple):
        for place, part in enumerate(cast("Sequence[Any]", value)):
            yield from _inside(part, (*where, str(place)))


def _code(field: str, file: Path, home: Path) -> Iterator[Artefact]:
    """The file of a function, and the modules beside it that it imports, and so on. A missing file is named later."""
    if not file.is_file():
        return
    yield describe(field, CODE, file, run_folder=home)
    for module in local_modules(file):
        place = module.relative_to(file.parent).as_posix()
        yield describe(f"{field} imports {place}", CODE, module, run_folder=home)


def local_modules(file: Path) -> list[Path]:
    """The Python files in the folder of `file` that it imports, directly or through one another, sorted."""
    folder, imported, queue = file.parent, set[Path](), [file]
    while queue:
        for module in _imported_by(queue.pop(), folder):
            if module != file and module not in imported:
                imported.add(module)
                queue.append(module)
    return sorted(imported)


def _imported_by(file: Path, folder: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # the import itself says what is wrong with it
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            names = [*base, *(".".join([*base, alias.name]) for alias in node.names)]
        else:
            continue
        for start in {folder, file.parent}:
            for name in names:
                yield from _files_of(name, start)


def _files_of(module: str, folder: Path) -> Iterator[Path]:
    """The files that importing a dotted name reads below `folder`: packages on the way, and the module."""
    place = folder
    for part in module.split("."):
        place /= part
        for candidate in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if candidate.is_file():
                yield candidate


def _installed(parts: Sequence[tuple[plugins.Kind, str]]) -> Iterator[Artefact]:
    """Parts of other packages, each with its version and its own code. Kedge's own are in the environment."""
    for kind, name in dict.fromkeys(parts):
        origin = plugins.origin(kind, name)
        if origin is None or origin.package == _OWN_PACKAGE:
            continue
        source = hash_file(origin.file) if origin.file and origin.file.is_file() else ""
        yield Artefact(
            name=f"{kind}.{name}",
            kind=PLUGIN,
            path=f"{origin.package} {origin.version}",
            hash=hash_json([origin.package, origin.version, source]),
        )
