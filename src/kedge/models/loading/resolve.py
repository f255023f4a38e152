"""What a recipe's `model:` means: an alias, a folder, or an id on the model hub. No weights are read here.

A folder is checked for its three parts (config, safetensors weights, tokenizer), so that a missing one is named
before anything heavy starts. Whether a hub id exists shows when it is loaded.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from kedge.core.errors import ModelError
from kedge.core.suggest import did_you_mean
from kedge.models.loading.aliases import ALIASES, folder_of

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


def resolve(model: str | Path) -> Path | str:
    """The folder of `model`, checked; or the hub id, unchanged, for `organisation/name`.

    An alias may be converted on first use. A folder that exists wins over a hub id of the same spelling.
    """
    if isinstance(model, str) and model in ALIASES:
        return folder_of(model)
    folder = Path(model).expanduser()
    if folder.is_dir():
        folder = model_of_stage(folder)
        check_folder(folder)
        return folder
    if folder.is_file():
        raise ModelError(f"{model} is a file; a model is the folder that holds its config.json")
    if isinstance(model, str) and _HUB_ID.fullmatch(model):
        return model
    if isinstance(model, Path) or "/" in model or "\\" in model or model.startswith((".", "~")):
        raise ModelError(f"no model folder at {folder.absolute()}; expected a folder with config.json and weights")
    raise ModelError(
        f"no model named '{model}'{did_you_mean(model, ALIASES)}; use an alias ({', '.join(ALIASES)}), "
        "a folder (./path/to/model) or a hub id (organisation/name)"
    )


def model_of_stage(folder: Path) -> Path:
    """The model that a stage made, for the folder of that stage, and the best one for that of rounds; any other folder
    as it is.

    A stage that is not done is an error: its model is missing, or not the one that it would have made.
    """
    facts = _run_facts(folder)
    if facts is None or facts.get("kind") == "pipeline":
        return folder
    if facts.get("kind") == "rounds":
        return _best_of_rounds(folder, facts)
    name, status, model = facts.get("stage") or folder.name, facts.get("status"), folder / "model"
    if status == "done" and is_model(model):
        return model
    if status == "done":
        raise ModelError(f"{folder}: stage '{name}' (kind {facts.get('kind')}) has made no model, or it was moved away")
    ended = "is running, or was killed" if status == "running" else f"has the status '{status}'"
    saved = f"; what it has saved all the same is in {model}: name that to use it" if is_model(model) else ""
    raise ModelError(
        f"{folder}: stage '{name}' is not done (it {ended}), so it has no finished model; go on with it first: "
        f"kedge run RECIPE --resume{saved}"
    )


def _best_of_rounds(folder: Path, facts: dict[str, Any]) -> Path:
    for output in facts.get("outputs") or ():
        if output.get("name") == "best" and is_model(folder / output["path"]):
            return folder / output["path"]
    raise ModelError(
        f"{folder}: a run of several rounds, of which none is known to be the best yet; its status is "
        f"'{facts.get('status')}'; name a stage of one of them: {folder / 'round-1'}/STAGE"
    )


def _run_facts(folder: Path) -> dict[str, Any] | None:
    """What `run.json` says of a stage or a whole run; None for any other folder, models among them."""
    record = folder / "run.json"
    if is_model(folder) or not record.is_file():
        return None
    try:
        facts = json.loads(record.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{record} is not JSON ({error}); name the model's own folder") from error
    return facts if isinstance(facts, dict) else None


def is_model(folder: Path) -> bool:
    """Whether a folder is that of a model or of an ensemble of reward models."""
    return (folder / "config.json").is_file() or (folder / "ensemble.json").is_file()


def check_folder(folder: Path) -> None:
    """Raise for the first part of a model that `folder` lacks."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ModelError(f"{folder} holds a LoRA adapter, not a model; merge it into its base first")
        if _run_facts(folder) is not None:
            models = [str(stage) for stage in sorted(folder.iterdir()) if is_model(stage / "model")]
            which = f"name one of its stages: {', '.join(models)}" if models else "none of its stages has made a model"
            raise ModelError(f"{folder} is a whole run, not a model; {which}")
        raise ModelError(f"{folder}: no config.json; this is not a model folder in the Hugging Face layout")
    _check_weights(folder)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"{folder}: no tokenizer.json; copy the tokenizer files of the model that this one was trained from"
        )


def _check_weights(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise ModelError(
                f"{folder}: {len(missing)} of {len(shards)} weight files named in {index.name} are missing, "
                f"first {missing[0]}; download the folder again"
            )
    elif not (folder / "model.safetensors").is_file():
        pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
        if pickled:
            raise ModelError(
                f"{folder}: only pickled weights ({pickled[0]}), and nothing is unpickled here, because a pickle can "
                "run code; on a machine where you trust the file, load it with transformers and save it again: "
                "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)"
            )
        raise ModelError(f"{folder}: no weights; expected model.safetensors or {index.name} with its shards")
