"""Which model is exported: the folder of a model, a stage or a run; an alias; a hub id."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kedge.commands.sample import is_language_model
from kedge.commands.serve import is_reward_place
from kedge.core.errors import ModelError
from kedge.models.loading.resolve import model_of_stage, resolve
from kedge.runs.folder import runs_in
from kedge.runs.manifest import MANIFEST_NAME, read_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A language model that is there."""

    place: str
    """The model's own folder, or a hub id."""
    name: str
    """What the export is called unless it gets another name: RUN-STAGE, or the model's own name."""
    stage: Path | None
    """The folder of the stage that made it, where it is known."""

    @property
    def adapter(self) -> Path | None:
        folder = Path(self.place).with_name("adapter")
        return folder if self.stage is not None and (folder / "adapter_config.json").is_file() else None


def find_source(place: str) -> Source:
    """Of a whole run, what its last stage made that made a language model; of rounds, the best."""
    if is_reward_place(place):
        raise ModelError(
            f"{place}: a reward model, and a language model is wanted here. Its folder is in the Hugging Face layout "
            "as it is; `kedge score` asks it, and `kedge serve` puts it behind HTTP"
        )
    folder = Path(place).expanduser()
    if not folder.is_dir():
        found = resolve(place)
        return Source(place=str(found), name=_plain(place.rpartition("/")[2]), stage=None)
    model = Path(resolve(_last_policy(folder)))
    stage = model.parent if model.name == "model" and (model.parent / MANIFEST_NAME).is_file() else None
    if stage is None:
        return Source(place=str(model), name=_plain(model.resolve().name), stage=None)
    manifest = read_manifest(stage)
    name = "-".join(part for part in (manifest.name, manifest.stage) if part)
    return Source(place=str(model), name=_plain(name or stage.name), stage=stage)


def _last_policy(folder: Path) -> Path:
    """The stage of a run that made its last language model; any other folder as it is."""
    if not (folder / MANIFEST_NAME).is_file() or (folder / "config.json").is_file():
        return folder
    if read_manifest(folder).kind != "pipeline":
        return model_of_stage(folder)
    stages = [stage for stage in runs_in(folder) if is_language_model(stage / "model")]
    if not stages:
        raise ModelError(f"{folder}: none of the stages of this run has made a language model")
    return stages[-1]


def saved_dtype(place: str) -> Literal["float32", "bfloat16", "float16"]:
    """The type that the weights of a model folder were saved in, as its config.json says; float32 where it does not."""
    config = Path(place) / "config.json"
    facts: dict[str, Any] = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    dtype = facts.get("dtype") or facts.get("torch_dtype") or "float32"
    return dtype if dtype in ("float32", "bfloat16", "float16") else "float32"


def _plain(name: str) -> str:
    """A name that is fit for a file.

    >>> _plain("my run/ppo")
    'my-run-ppo'
    """
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name).strip("-.") or "model"
