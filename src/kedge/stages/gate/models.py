"""Which models a gate is about: their folders, hashes and ancestors, and what they are called in other folders."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.core.errors import ConfigError, ModelError
from kedge.core.files import hash_folder
from kedge.core.stage import DATA_KINDS
from kedge.core.suggest import did_you_mean
from kedge.gate.evidence import EVALUATION, EXAM, Role, Source
from kedge.gate.verdict import GatedModel
from kedge.models.loading.resolve import resolve
from kedge.runs.lineage import CARD, lineage, locate
from kedge.runs.manifest import MANIFEST_NAME, Manifest, read_manifest

_SCORERS = ("reward", "gold", "judge")


def gated_model(name: str, place: str) -> GatedModel:
    """A model by its content. One of a hub, whose weights may change behind its name, is refused."""
    folder = resolve(place)
    if not isinstance(folder, Path):
        raise ModelError(f"{place}: the weights of a hub may change behind their name; download the model to a folder")
    return GatedModel(
        name=name,
        path=str(folder),
        weights=hash_folder(folder, suffixes=(".safetensors",)),
        content=hash_folder(folder, without=(CARD,)),
    )


def home_of(model: GatedModel) -> Path | None:
    """The run that made a model; None for a folder from elsewhere."""
    folder = Path(model.path).resolve()
    for home in (folder, *folder.parents[:2]):
        if (home / MANIFEST_NAME).is_file() and read_manifest(home).kind != "pipeline":
            return home
    return None


def root_of(candidate: GatedModel, baseline: GatedModel) -> str:
    """What a lineage is known by: the model from outside that it began with. A folder from elsewhere belongs to the
    lineage of its baseline."""
    for model in (candidate, baseline):
        if (home := home_of(model)) is not None:
            outside = [link for link in lineage(home) if link.parent is None and link.artefact.kind == "model"]
            if outside:
                return outside[-1].artefact.hash
    return baseline.content


def training_files(model: GatedModel) -> list[Path] | None:
    """The data that a model and its ancestors were trained on; None where nobody knows."""
    home = home_of(model)
    if home is None:
        return None
    links = [link for link in lineage(home) if link.artefact.kind in DATA_KINDS]
    return list(dict.fromkeys(locate(link.artefact, link.child) for link in links))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A model that is looked for in a folder: by its content where that was written down, else by these names."""

    model: GatedModel
    names: tuple[str, ...]


def open_source(place: Path, wanted: Mapping[Role, Wanted]) -> Source:
    """A folder with what the two models are called in it. A folder that asked neither of them is an error."""
    folder = place if place.is_dir() else place.parent
    if not folder.is_dir():
        raise ConfigError(f"{place}: there is no such folder; `from` names exam and evaluate stages")
    about = _about(folder)
    asked: list[str] = list(about.get("models", ()))
    contents = contents_of(folder)
    names: dict[Role, str] = {}
    for role, model in wanted.items():
        if (name := _name_of(model, asked, contents, folder)) is not None:
            names[role] = name
    if asked and not names:
        looked_for = [model.names[0] for model in wanted.values()]
        near = did_you_mean(looked_for[0], asked)
        raise ConfigError(f"{folder}: asked {', '.join(asked)}, and neither {' nor '.join(looked_for)}{near}")
    settings = _manifest(folder)
    tie = settings.settings.get("tie") if settings else None
    return Source(folder=folder, names=names, **({"tie": float(tie)} if tie is not None else {}))


def _name_of(wanted: Wanted, asked: list[str], contents: Mapping[str, tuple[str, str]], folder: Path) -> str | None:
    """By content, whatever a model was called; a name alone counts where the folder does not say what was behind it."""
    by_content = [
        name for name, hashes in contents.items() if wanted.model.content in hashes or wanted.model.weights in hashes
    ]
    if by_content:
        return by_content[0]
    for name in wanted.names:
        if name in asked:
            if name in contents:
                raise ConfigError(
                    f"{folder}: {name} had other weights there than {wanted.model.path} has now; run the stage again"
                )
            return name
    return None


def _about(folder: Path) -> Mapping[str, Any]:
    for file in (folder / EXAM, folder / EVALUATION):
        if file.is_file():
            try:
                return json.loads(file.read_bytes())
            except ValueError as error:
                raise ConfigError(f"{file}: not JSON ({error}); run the stage again") from error
    return {}


def contents_of(folder: Path) -> dict[str, tuple[str, str]]:
    """The hashes of the models of a stage, by name: as its manifest has them, or as `exam.json` has."""
    stated: Mapping[str, str] = _about(folder).get("weights", {})
    hashes = {name: (digest, digest) for name, digest in stated.items()}
    manifest = _manifest(folder)
    named = manifest.settings.get("models", ()) if manifest else ()
    inputs = [artefact for artefact in manifest.inputs if artefact.name == "models"] if manifest else []
    if len(named) == len(inputs):
        for name, artefact in zip(named, inputs, strict=True):
            hashes[str(name)] = (artefact.hash, hashes.get(str(name), ("",))[0])
    return hashes


def _manifest(folder: Path) -> Manifest | None:
    return read_manifest(folder) if (folder / MANIFEST_NAME).is_file() else None


def judges_of(folders: list[Path]) -> Iterator[tuple[str, Any]]:
    """Who scored the answers of an evaluation, as its recipe said it: source and settings."""
    for folder in folders:
        manifest = _manifest(folder)
        if manifest is not None and (folder / EVALUATION).is_file():
            for source in _SCORERS:
                if (settings := manifest.settings.get(source)) is not None:
                    yield f"{folder.name}.{source}", settings
