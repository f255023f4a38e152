"""What adapters on disk remember of the base they were trained on, and how it is found again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kedge.core.errors import ModelError
from kedge.core.files import hash_folder


def weights_hash(folder: Path) -> str:
    """The identity of the weights of a model folder; its tokenizer and settings do not count."""
    return hash_folder(folder, suffixes=(".safetensors",))


def about_base(source: str, folder: Path) -> dict[str, str]:
    """Where the base is, as seen from `folder`, and its hash; a hub model has its name alone."""
    place = Path(source)
    if not place.is_dir():
        return {"source": source}
    # The relative path survives a move of both together; the hash tells another model of the same name.
    return {
        "source": source,
        "relative": os.path.relpath(place, folder.absolute()),
        "hash": weights_hash(place),
    }


def find_base(folder: Path, about: Mapping[str, str], given: str | Path | None) -> str | Path:
    """The base that `about` speaks of, or the one at `given`; it must have the same weights."""
    if given is None and "hash" not in about:
        return about["source"]
    places = [folder / about["relative"], Path(about["source"])] if given is None else [Path(given)]
    found = next((place.resolve() for place in places if place.is_dir()), None)
    if found is None:
        raise ModelError(
            f"{folder}: the base of its members is not at {places[-1]}; LoRA members need it: put it back, or give the "
            "folder where it is now as `base`"
        )
    if "hash" in about and weights_hash(found) != about["hash"]:
        raise ModelError(f"{folder}: the weights in {found} are not those of the base that its members were trained on")
    return found
